"""A prefix as frames: what an engine has cached of a prompt, in a file or in the memory of another process, and back.

::

    | frame of run 0 | frame of run 1 | ... | frame of the end |

The frames are those of tiers (docs/tier-format.md). The end has the blocks behind the last whole run, and windows and
states. A file is served only by the same model with the same weights and layout, and only if every byte is right.

A :class:`NixlLink` moves the same frames from the memory of one process to that of another by NIXL, without a tier::

    engine A: hand_over(prompt, link)    frames of the cached blocks, in memory that the link has registered
                 |  metadata, address, length: plain values in the HandOff
    engine B: take_over(hand_off, link)  one READ into memory of B, a notification to A, which frees its copy

They are verified before a block is filled from them. Memory is host memory, and UCX moves it: shared memory on one
machine, else a network. NIXL 1.5 needs no GPU for that.

Whoever has a hand-off can read the frames, and metadata of other ends are trusted: use links on trusted networks only.
"""

import base64
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final
from uuid import uuid4

import numpy as np

from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.extras import needing
from pagedkv.contract.keys import RequestKeys
from pagedkv.engine.content import StoredContent
from pagedkv.errors import ConfigurationError
from pagedkv.space import BlockSpace
from pagedkv.tiers import Identity, OpenFrame, Refusal, Run, frames_of, read_frames, write_frame
from pagedkv.tiers.entry_blocks import BlockBytes, EntryLayout, Rows, fill, longest_end
from pagedkv.tiers.frame import Buffer

ANY_TOKEN: Final = np.int32(0)
STAGING_NBYTES: Final = 2**26
TOKEN_NBYTES: Final = 4
HEADERS_NBYTES: Final = 2**26
"""More than the headers of a file have."""


def write_prefix(
    path: Path, content: StoredContent, space: BlockSpace, token_ids: Int32Array, keys: RequestKeys
) -> int:
    """Write what is cached of a prompt; return how many leading tokens that is. 0: nothing is cached, and no file made.

    The file appears whole, or not at all. Raises OSError.
    """
    num_tokens, frames = cached_frames(content, space, token_ids, keys)
    if not num_tokens:
        return 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for frame in frames:
                file.write(frame)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return num_tokens


def read_prefix(path: Path, content: StoredContent, space: BlockSpace, keys: RequestKeys) -> int:
    """Bring a prefix from a file into the cache; return how many tokens it has. 0: there are too few free blocks.

    At most so much is read as all blocks hold, whatever the file has.

    Raises:
        ConfigurationError: it is not a prefix of this model, or was damaged; nothing is changed.
        OSError: it cannot be read.
    """
    blocks = space.config.blocks_by_pool()
    groups = zip(space.config.groups, content.nbytes, strict=True)
    held = sum(blocks[spec.pool] * (nbytes + spec.block_size * TOKEN_NBYTES) for spec, nbytes in groups)
    with path.open("rb") as file:
        buffer = read_frames(file, held + HEADERS_NBYTES)
    return 0 if buffer is None else bring_frames(str(path), buffer, content, space, keys)


def cached_frames(
    content: StoredContent, space: BlockSpace, token_ids: Int32Array, keys: RequestKeys
) -> tuple[int, Iterator[bytes]]:
    """Return how many leading tokens of a prompt are cached, and their frames, which are read one by one."""
    layout = EntryLayout(space.config.groups, content.nbytes)
    tokens = np.append(token_ids, ANY_TOKEN)  # a match never hits the last token
    hit = longest_end(space, tokens, keys, len(token_ids), layout.alignment)
    if hit is None:
        return 0, iter(())
    chain = layout.new_chain(keys)
    chain.extend(token_ids[: hit.num_tokens])
    entries = [(run, layout.blocks_of_run(number, hit.block_ids)) for number, run in enumerate(chain.runs)]
    entries.append((chain.end(chain.num_blocks), layout.blocks_of_end(hit.num_tokens, hit.block_ids)))
    return hit.num_tokens, _frames(content, layout, entries)


def _frames(
    content: StoredContent, layout: EntryLayout, entries: Sequence[tuple[Run, Sequence[Int32Array]]]
) -> Iterator[bytes]:
    identity = content.identity(layout.blocks_per_run)
    largest = max(sum(len(ids) * layout.block_nbytes[group] for group, ids in enumerate(each)) for _, each in entries)
    block_bytes = content.open_block_bytes(2 * largest + STAGING_NBYTES)
    for run, blocks in entries:
        yield write_frame(identity, run, [_read(block_bytes, group, ids) for group, ids in enumerate(blocks)])


def bring_frames(
    what: str,
    buffer: Buffer,
    content: StoredContent,
    space: BlockSpace,
    keys: RequestKeys,
    *,
    prompt: Int32Array | None = None,
) -> int:
    """Bring the frames of a prefix into the cache; return how many tokens it has. 0: there are too few free blocks.

    Args:
        what: what has the frames, for errors; buffer: the frames.
        content, space, keys: of the engine, and of the requests that computed the prefix.
        prompt: the prompt that the prefix must begin, int32 ``[n]``; None: any.

    Raises:
        ConfigurationError: it is not a prefix of this model, or of this prompt, or was damaged; nothing is changed.
    """
    layout = EntryLayout(space.config.groups, content.nbytes)
    frames = frames_of(buffer)
    if isinstance(frames, Refusal):
        raise _refused(what, frames)
    if not frames:
        raise _refused(what, None)
    tokens = np.concatenate([frame.token_ids for frame in frames])
    if prompt is not None and not np.array_equal(tokens, prompt[: len(tokens)]):
        raise ConfigurationError(f"{what} is no prefix of this prompt: pass the prompt that was handed over")
    chain = layout.new_chain(keys)
    chain.extend(tokens)
    expected = [*chain.runs, chain.end(chain.num_blocks)]
    _require_equal(what, frames, expected, content.identity(layout.blocks_per_run))
    num_tokens = chain.num_blocks * layout.block_size
    load = space.load(tokens, num_tokens, keys=keys)
    if load is None or isinstance(load, Shortage):
        return 0 if load else num_tokens
    entries = [
        (layout.blocks_of_load(load, num_tokens, number if number < len(chain.runs) else None), frame.parts)
        for number, frame in enumerate(frames)
        if number == len(chain.runs) or (number + 1) * layout.run_tokens > load.num_hit_tokens
    ]
    is_filled = load.num_tokens == num_tokens and _fill(content.open_block_bytes(STAGING_NBYTES), entries)
    space.finish_load(load, num_tokens if is_filled else 0)
    if not is_filled:
        raise ConfigurationError(f"{what} is not a prefix of this model: its parts have other lengths")
    return num_tokens


def _read(block_bytes: BlockBytes, group: int, block_ids: Int32Array) -> memoryview:
    """Copy blocks to the host. Raises ConfigurationError: they cannot be read any more."""
    copied = block_bytes.read(group, block_ids)
    if copied is None:  # staging memory has room for two entries
        raise ConfigurationError("the blocks cannot be read: the other ranks of this engine have ended")
    copied.ticket.wait()
    return copied.rows.reshape(-1).data


def _fill(block_bytes: BlockBytes, entries: Sequence[tuple[Sequence[Int32Array], Sequence[memoryview]]]) -> bool:
    """Copy parts into blocks; return whether they have the right lengths."""
    tickets = fill(block_bytes, entries)
    block_bytes.close()
    return tickets is not None


def _require_equal(what: str, frames: Sequence[OpenFrame], expected: Sequence[Run], identity: Identity) -> None:
    """Refuse frames that are not those of a prefix of this model."""
    for frame, run in zip(frames, expected, strict=False):
        refusal = frame.compare(identity, run)
        if refusal is not None:
            raise _refused(what, refusal)
    if len(frames) != len(expected):
        raise ConfigurationError(f"{what} is not a whole prefix: it has {len(frames)} frames of {len(expected)}")


def _refused(what: str, refusal: Refusal | None) -> ConfigurationError:
    why = "it is empty" if refusal is None else f"{refusal.reason}: {refusal.detail}"
    return ConfigurationError(f"{what} is not a prefix of this model: {why}")


MOST_NBYTES: Final = 2**30
POLL_S: Final = 0.0002
MEMORY: Final = "DRAM"
UNDER_WAY: Final = "PROC"
DONE: Final = "DONE"
FIELDS: Final = frozenset({"metadata", "address", "nbytes", "ticket"})


@dataclass(frozen=True, slots=True, eq=False)
class _Offered:
    """Frames that wait to be taken."""

    memory: Rows
    registration: Any


@final
class NixlLink:
    """One end of hand-offs by NIXL; an engine may use it for any number of prompts. One thread uses it at a time.

    Args:
        name: of this end, unlike that of any other end; None: machine, process and a random number.
        backend: NIXL's plug-in that moves the bytes.
        most_nbytes: most bytes of prompts that wait to be taken. Beyond that the oldest are dropped, and cannot be
            taken any more.

    Raises:
        MissingExtraError: NIXL is not installed.
        ConfigurationError: NIXL cannot open the plug-in.
    """

    def __init__(self, name: str | None = None, *, backend: str = "UCX", most_nbytes: int = MOST_NBYTES) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._most_nbytes = as_count(most_nbytes, "most_nbytes", least=1)
        with needing("nixl", "a hand-off from memory to memory"):
            nixl: Any = import_module("nixl._api")
        try:
            self._agent: Any = nixl.nixl_agent(self.name, nixl.nixl_agent_config(backends=[backend]))
        except Exception as problem:
            raise ConfigurationError(f"NIXL cannot open its plug-in {backend!r}: {problem!r}") from problem
        known = sorted(self._agent.get_plugin_list())
        if backend not in known:  # NIXL only logs it
            raise ConfigurationError(f"NIXL has no plug-in {backend!r}: it has {', '.join(known)}")
        self._offered: dict[str, _Offered] = {}

    @property
    def num_waiting(self) -> int:
        """Prompts that were handed over and not taken yet."""
        self._release_taken()
        return len(self._offered)

    def offer(self, frames: Sequence[bytes]) -> dict[str, Any]:
        """Put frames where another end can read them; return where, as plain values. O(bytes).

        Raises ConfigurationError: they are larger than ``most_nbytes``.
        """
        self._release_taken()
        nbytes = sum(map(len, frames))
        if nbytes > self._most_nbytes:
            raise ConfigurationError(
                f"the prompt has {nbytes:,} bytes, and the link has {self._most_nbytes:,}: raise most_nbytes"
            )
        while self._offered and sum(each.memory.nbytes for each in self._offered.values()) + nbytes > self._most_nbytes:
            self._drop(next(iter(self._offered)))
        memory = np.frombuffer(bytearray().join(frames), np.uint8)
        registration = self._agent.register_memory([(_address(memory), nbytes, 0, "")], MEMORY)
        ticket = uuid4().hex
        self._offered[ticket] = _Offered(memory, registration)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": _address(memory), "nbytes": nbytes, "ticket": ticket}

    def fetch(self, place: Mapping[str, Any], timeout_s: float) -> memoryview:
        """Read frames that another end has offered, and tell it that they are taken.

        Raises:
            ConfigurationError: the place is none, the other end does not answer in time, or it has dropped the frames.
        """
        if not isinstance(place, Mapping) or set(place) != FIELDS:
            raise ConfigurationError(f"the place of a hand-off has {sorted(FIELDS)}, got {place!r:.200}")
        memory = np.empty(as_count(place["nbytes"], "nbytes of a hand-off", least=1, most=self._most_nbytes), np.uint8)
        agent, registration = self._agent, None
        try:
            registration = agent.register_memory([(_address(memory), memory.nbytes, 0, "")], MEMORY)
            other = agent.add_remote_agent(base64.b64decode(place["metadata"]))
            here = agent.get_xfer_descs([(_address(memory), memory.nbytes, 0)], MEMORY)
            there = agent.get_xfer_descs([(place["address"], memory.nbytes, 0)], MEMORY)
            transfer = agent.initialize_xfer("READ", here, there, other, place["ticket"].encode())
            try:
                self._await(transfer, timeout_s)
            finally:
                agent.release_xfer_handle(transfer)
        except ConfigurationError:
            raise
        except Exception as problem:
            raise ConfigurationError(f"the hand-off cannot be read from its engine's memory: {problem!r}") from problem
        finally:
            if registration is not None:
                agent.deregister_memory(registration)
        return memory.data

    def close(self) -> None:
        """Drop what was not taken. The link cannot be used any more."""
        for ticket in list(self._offered):
            self._drop(ticket)
        del self._agent

    def _await(self, transfer: object, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        state = self._agent.transfer(transfer)
        while state == UNDER_WAY and time.monotonic() < until:
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(transfer)
        if state != DONE:
            raise ConfigurationError(
                f"the hand-off was not read within {timeout_s:g} s: its transfer is in state {state}"
            )

    def _release_taken(self) -> None:
        """Free the frames that other ends have read."""
        for tickets in self._agent.get_new_notifs().values():
            for ticket in tickets:
                self._drop(ticket.decode())

    def _drop(self, ticket: str) -> None:
        offered = self._offered.pop(ticket, None)
        if offered is not None:
            self._agent.deregister_memory(offered.registration)


def _address(memory: Rows) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
