"""Which blocks the entries of a store hold, for the groups of one space, and their copies to the host and back.

A *run* holds consecutive blocks of the groups that keep whole prefixes. If other groups are among them, windows or
states, a prefix can be continued only at an *end*, which holds their blocks there (:mod:`pagedkv.tiers.identity`).

:class:`BlockBytes` is implemented for each device by an engine, and without bytes by a simulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.record import NULL_BLOCK
from pagedkv.contract.answers import Load
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import GroupSpec, is_cross, keeps_state, keeps_whole_prefix, refuse_ahead
from pagedkv.errors import ConfigurationError
from pagedkv.space import BlockSpace, PrefixHit
from pagedkv.tiers.identity import RunChain

RUN_NBYTES: Final = 2**25
MOST_RUN_BLOCKS: Final = 8
WITHOUT_RUNS: Final = 2**24
"""Blocks of a run where no group keeps whole prefixes: there are none, and an end has all tokens before it."""


@final
class EntryLayout:
    """The blocks of runs and ends.

    Args:
        specs: the groups.
        block_nbytes: bytes of a block of each.

    Attributes:
        block_size: tokens of a block of the groups that keep whole prefixes; of others that keep tokens if none does.
        blocks_per_run: blocks of a run: 8, or so many that it has 32 MiB; ``WITHOUT_RUNS`` if there are none.
        alignment: tokens; ends are at multiples of it.
        has_runs: whether a group keeps whole prefixes.
        has_ends: whether another group needs ends.
        block_nbytes: as given; run_nbytes, end_nbytes: about the bytes of an entry.

    Raises:
        ConfigurationError: the names of a group cover tokens ahead; a group is cross-attention.
    """

    def __init__(self, specs: Sequence[GroupSpec], block_nbytes: Sequence[int]) -> None:
        refuse_ahead(specs, "a tier has no entries for them")
        if any(map(is_cross, specs)):
            raise ConfigurationError("a tier has no entries for encoders, whose blocks have no names: leave it out")
        self._whole = [index for index, spec in enumerate(specs) if keeps_whole_prefix(spec)]
        self._others = [index for index, spec in enumerate(specs) if not keeps_whole_prefix(spec)]
        self._sizes = [spec.block_size for spec in specs]
        tokens = [spec.block_size for spec in specs if not keeps_state(spec)]
        whole = [self._sizes[group] for group in self._whole]
        self.block_size = whole[0] if whole else min(tokens, default=min(self._sizes))
        assert set(whole) <= {self.block_size}, "full groups have one block size"
        self.alignment = lcm(*self._sizes)
        self.has_runs, self.has_ends = bool(self._whole), bool(self._others)
        together = sum(block_nbytes[group] for group in self._whole)
        self.blocks_per_run = max(1, min(MOST_RUN_BLOCKS, RUN_NBYTES // together)) if together else WITHOUT_RUNS
        self.run_nbytes = together * self.blocks_per_run
        self.end_nbytes = sum(block_nbytes[group] for group in self._others) + self.run_nbytes // 2
        self.num_groups = len(specs)
        self.block_nbytes = tuple(block_nbytes)

    @property
    def run_tokens(self) -> int:
        """Tokens of a run."""
        return self.block_size * self.blocks_per_run

    def new_chain(self, keys: RequestKeys) -> RunChain:
        """Return the chain of a sequence without tokens."""
        return RunChain(self.block_size, self.blocks_per_run, keys)

    def blocks_of_run(self, number: int, block_ids: Sequence[Int32Array], first: int = 0) -> list[Int32Array]:
        """Return, for each group, the blocks of a run among those of a prefix.

        Args:
            number: which run; block_ids: for each group the blocks of the prefix, from logical block ``first`` on.
        """
        begin, end = number * self.blocks_per_run - first, (number + 1) * self.blocks_per_run - first
        return [
            ids[max(0, begin) : max(0, end)] if group in self._whole else NO_BLOCKS
            for group, ids in enumerate(block_ids)
        ]

    def blocks_of_end(self, num_tokens: int, block_ids: Sequence[Int32Array], first_token: int = 0) -> list[Int32Array]:
        """Return, for each group, the blocks of an end among those of a prefix of ``num_tokens`` tokens.

        Of groups that keep whole prefixes these are the blocks behind the last whole run, of others those that are not
        null: the last ones. ``block_ids`` begin at position ``first_token``.
        """
        first = num_tokens // self.run_tokens * self.run_tokens
        return [
            ids[max(0, first - first_token) // self._sizes[group] :] if group in self._whole else _last(ids)
            for group, ids in enumerate(block_ids)
        ]

    def blocks_of_load(self, load: Load, num_tokens: int, run: int | None) -> list[Int32Array]:
        """Return, for each group, the blocks of a load that an entry fills.

        Args:
            load: the load, for ``num_tokens`` tokens or more.
            run: number of the run; None for the end at ``num_tokens``.
        """
        if run is None:
            return self.blocks_of_end(num_tokens, load.block_ids, load.num_hit_tokens)
        return self.blocks_of_run(run, load.block_ids, load.num_hit_tokens // self.block_size)


def _last(block_ids: Int32Array) -> Int32Array:
    """Return the blocks behind the last null block."""
    is_null = np.flatnonzero(block_ids == NULL_BLOCK)
    return block_ids[int(is_null[-1]) + 1 :] if len(is_null) else block_ids


Rows: TypeAlias = npt.NDArray[np.uint8]


class CopyEnd(Protocol):
    """The end of copies under way."""

    @property
    def event(self) -> Any | None:  # noqa: ANN401 - a device's
        """The device's event after the copies; None if they have ended already."""

    def is_done(self) -> bool:
        """Return whether the copies have ended, without waiting."""

    def wait(self) -> None:
        """Wait on the host until they have ended."""


@dataclass(frozen=True, slots=True, eq=False)
class HostBlocks:
    """A copy of blocks to the host, under way.

    Args:
        rows: uint8 ``[blocks, block_nbytes]`` in host memory; valid once the ticket is done.
        ticket: the end of the copy.
    """

    rows: Rows
    ticket: CopyEnd


class BlockBytes(Protocol):
    """Copies of blocks of one storage, group by group.

    Attributes:
        read_nbytes_a_step, read_nbytes_a_second: bytes that may be read in a step, and for each second that it takes.
        read_nbytes_at_once: bytes of one copy, but for one entry; a GPU gathers blocks in its memory for it.
        filled_nbytes_a_step: bytes that may be written into blocks in a step while requests run; None: any number.
        filled_nbytes_at_once: bytes of one call.
    """

    read_nbytes_a_step: int
    read_nbytes_a_second: int
    read_nbytes_at_once: int
    filled_nbytes_a_step: int | None
    filled_nbytes_at_once: int

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group."""

    @property
    def room_nbytes(self) -> int | None:
        """Bytes that can be read now; None: any number."""

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Begin to copy blocks to the host, behind the steps that were launched; None: no room there now."""

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyEnd:
        """Begin to copy rows into blocks, behind the steps that were launched.

        Args:
            group: whose blocks; block_ids: int32 ``[n]``.
            rows: arrays of ``[any, block_nbytes]``, ``n`` rows in all. Their memory must not change afterwards.
        """

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Order all steps launched from now on behind a copy, on the device and without a wait on the host."""

    def close(self) -> None:
        """Wait for all copies."""


def fill(
    block_bytes: BlockBytes, entries: Sequence[tuple[Sequence[Int32Array], Sequence[memoryview]]]
) -> list[CopyEnd] | None:
    """Begin to copy the parts of entries into blocks; None, with an unknown number of blocks filled: parts are short.

    Args:
        block_bytes: copies.
        entries: for each, by group, the blocks to be filled, and the part whose last rows fill them.
    """
    tickets = []
    for group, nbytes in enumerate(block_bytes.nbytes):
        ids: list[Int32Array] = [NO_BLOCKS]
        rows: list[Rows] = []
        for blocks, parts in entries:
            if parts[group].nbytes % nbytes or parts[group].nbytes < len(blocks[group]) * nbytes:
                return None
            if len(blocks[group]):
                content = np.asarray(parts[group]).reshape(-1, nbytes)
                ids.append(blocks[group])
                rows.append(content[len(content) - len(blocks[group]) :])
        if rows:
            tickets.append(block_bytes.write(group, np.concatenate(ids), rows))
    return tickets


def longest_end(
    space: BlockSpace, token_ids: Int32Array, keys: RequestKeys, most: int, alignment: int
) -> PrefixHit | None:
    """Return the longest hit, of at most ``most`` tokens, that can be an end; None if there is none.

    Args:
        space: the block space.
        token_ids: int32 ``[n]``; the last one never hits.
        keys: extra keys of the tokens.
        most: tokens; alignment: ends are at multiples of it.
    """
    most = most // alignment * alignment
    while most > 0:
        hit = space.match(token_ids, keys=keys, max_hit_tokens=most)
        if hit.num_tokens == most and not hit.tails:
            return hit
        most = min(hit.num_whole_tokens, most - 1) // alignment * alignment
    return None
