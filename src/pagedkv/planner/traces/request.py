"""A request of a trace, with the runs of its block ids and its tenant; and a request with tokens.

::

    trace file --TraceReader--> Request --tokenized()--> TokenizedRequest --Replayer--> ReplaySummary
                                seeded workload -------------^

A trace seldom has tokens. It has lengths and, at best, ids of prompt blocks. Figures about the trace alone need no more
than :class:`Request`. The block space matches and stores tokens, so its callers take :class:`TokenizedRequest`, from a
trace through :func:`pagedkv.planner.traces.token_blocks.tokenized` or from a generator of tokens.

Block ids of a prompt come as runs ``[first, count]``, which mean ``first, first + 1, ... first + count - 1``. A trace
of full blocks that does not state the block size b still determines it: a row of ``length`` tokens has ``length // b``
ids, and b is a power of two. For k >= 1 ids, ``length // b == k`` holds for b in ``(length / (k + 1), length / k]``.
This interval spans at most a factor of two, so it contains at most one power of two: the first row with ids determines
b, and all other rows must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.errors import TraceError
from pagedkv.planner.traces.lines import Line

MAX_BLOCK_ID: Final = 2**63 - 1


def expand_runs(runs: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Expand run-length coded ids.

    Args:
        runs: pairs ``(first, count)`` with ``first >= 0`` and ``count >= 1``.

    Returns:
        int64 ``[sum of counts]``.

    >>> expand_runs([(7, 3), (2, 1)]).tolist()
    [7, 8, 9, 2]
    """
    firsts, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(counts.sum(), dtype=np.int64)


def run_lengths(block_ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Code ids as the fewest runs; the inverse of :func:`expand_runs`. O(ids).

    Args:
        block_ids: int64 ``[n]``, none negative.

    >>> run_lengths(np.array([7, 8, 9, 2]))
    [(7, 3), (2, 1)]
    """
    if not len(block_ids):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(block_ids) != 1) + 1))
    counts = np.diff(starts, append=len(block_ids))
    return list(zip(block_ids[starts].tolist(), counts.tolist(), strict=True))


def count_ids(line: Line, runs: Sequence[tuple[int, int]], offset: int = 0, key: str = "hash_runs") -> int:
    """Check the runs of a row and count their ids without expanding them, since a count may be absurd.

    Args:
        line: the row.
        runs: pairs ``(first, count)``.
        offset: added to each id later.
        key: name of the runs in the format.

    Raises:
        TraceError: a run is empty, an id is negative, or one exceeds ``MAX_BLOCK_ID`` after ``offset`` is added.
    """
    for first, count in runs:
        if first < 0 or count < 1 or offset + first + count - 1 > MAX_BLOCK_ID:
            raise line.fault(f"{key} holds [{first}, {count}]", "A run is [first id >= 0, count >= 1], ids below 2**63")
    return sum(count for _, count in runs)


def wrong_number_of_ids(line: Line, input_length: int, num_ids: int, block_size: int, where: str = "") -> TraceError:
    """Build the error for a row whose ids do not fit its length."""
    return line.fault(
        f"{where}{num_ids} block ids do not fit a prompt of {input_length} tokens at {block_size} tokens a block",
        "Repair the row, or name the trace's block size (`TraceReader.block_size`)",
    )


class InferredBlockSize:
    """Number of tokens per id in a trace of full blocks: given, or inferred from the first row with ids.

    Args:
        given: the block size that the user states; None: infer it.
    """

    def __init__(self, given: int | None) -> None:
        self._block_size = given or 0
        self._longest_without_ids: tuple[int, Line] | None = None

    def learn(self, line: Line, input_length: int, num_ids: int) -> int:
        """Infer the block size from one row, or check it against the row.

        Returns:
            The block size, or 0 while no row has had ids.

        Raises:
            TraceError: this row, or an earlier one without ids, contradicts the block size.
        """
        if self._block_size == 0 and num_ids == 0:
            self._remember_without_ids(line, input_length)
            return 0
        if self._block_size == 0:
            self._block_size = _power_of_two_that_fits(line, input_length, num_ids)
            self._check_earlier_rows()
        if input_length // self._block_size != num_ids:
            raise wrong_number_of_ids(line, input_length, num_ids, self._block_size)
        return self._block_size

    def _remember_without_ids(self, line: Line, input_length: int) -> None:
        if self._longest_without_ids is None or input_length > self._longest_without_ids[0]:
            self._longest_without_ids = (input_length, line)

    def _check_earlier_rows(self) -> None:
        if self._longest_without_ids is None:
            return
        input_length, line = self._longest_without_ids
        if input_length >= self._block_size:
            raise wrong_number_of_ids(line, input_length, 0, self._block_size)


def _power_of_two_that_fits(line: Line, input_length: int, num_ids: int) -> int:
    """Find the block size: the largest power of two up to ``input_length / num_ids``, if it fits."""
    tokens_per_id = max(1, input_length // num_ids)
    block_size = 1 << (tokens_per_id.bit_length() - 1)
    if input_length // block_size != num_ids:
        raise line.fault(
            f"{num_ids} block ids do not fit a prompt of {input_length} tokens at any power of two",
            "Repair the row, or name the trace's block size (`TraceReader.block_size`)",
        )
    return block_size


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    Args:
        arrival_s: seconds from the start of the trace; in a trace of sessions, from the session's start.
        input_length: tokens of the prompt, at least 1.
        output_length: generated tokens, possibly 0.
        block_ids: int64 ``[n]``, ids of the prompt's leading blocks; None: the trace has no ids. Equal ids mean an
            equal *whole prefix* up to the end of that block.
        block_size: tokens per id, whether this request has ids or not; 0: unknown.
        session: name of the request's conversation, if the trace has it.
        num_samples: sequences generated from the one prompt, at least 1.
        priority: requests of a higher priority are admitted first.
        prompt_token_ids: int32 ``[input_length]`` if the trace has tokens, instead of block ids.
        output_token_ids: int32 ``[output_length]`` if the trace has these too.
        tenant: a customer, a team, or one of several logs, if known.
        salt: blocks with equal tokens and different salts are different; None: no salt.
        waits_for: sessions (agents) whose requests before this one had to end first, where the trace shows it; empty:
            its own session alone.
        pause_s: recorded seconds from these ends to its arrival; None: not recorded.
    """

    arrival_s: float
    input_length: int
    output_length: int
    block_ids: npt.NDArray[np.int64] | None = None
    block_size: int = 0
    session: str | None = None
    num_samples: int = 1
    priority: int = 0
    prompt_token_ids: npt.NDArray[np.int32] | None = None
    output_token_ids: npt.NDArray[np.int32] | None = None
    tenant: str | None = None
    salt: str | None = None
    waits_for: tuple[str, ...] = ()
    pause_s: float | None = None

    @property
    def has_content(self) -> bool:
        """Whether the trace shows what the prompt shares with others, by its tokens or by ids of its blocks."""
        return self.block_ids is not None or self.prompt_token_ids is not None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedRequest:
    """One request with the tokens of its prompt and of its output.

    Args:
        arrival_s: as in :class:`Request`.
        prompt_token_ids: int32 ``[input_length]``, at least one token.
        output_token_ids: int32 ``[output_length]``, possibly none.
        session: as in :class:`Request`, like the arguments after it.
        has_content: False if the tokens are generated, since the trace has only lengths.
    """

    arrival_s: float
    prompt_token_ids: npt.NDArray[np.int32]
    output_token_ids: npt.NDArray[np.int32]
    session: str | None = None
    num_samples: int = 1
    priority: int = 0
    has_content: bool = True
    tenant: str | None = None
    salt: str | None = None

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_length(self) -> int:
        """Generated tokens."""
        return len(self.output_token_ids)


NO_TENANT: Final = "(none)"
"""The name for requests without a tenant, where other requests have one."""


class Tenants:
    """Numbers tenants.

    >>> tenants = Tenants()
    >>> [tenants.number(name) for name in ("b", None, "a", "b")], tenants.names, tenants.are_known
    ([0, 1, 2, 0], ['b', '(none)', 'a'], True)
    """

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}

    def number(self, tenant: str | None) -> int:
        """Return the number of a tenant; a new tenant gets the next number."""
        return self._numbers.setdefault(tenant, len(self._numbers))

    @property
    def names(self) -> list[str]:
        """The names, by number."""
        return [NO_TENANT if name is None else name for name in self._numbers]

    @property
    def are_known(self) -> bool:
        """Whether any request had a tenant."""
        return bool(self._numbers.keys() - {None})
