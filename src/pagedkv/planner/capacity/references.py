"""The blocks to which a trace refers, the tree of their prefixes, and their reuses.

Block ids of prompts form one tree: an id names a block *together with everything before it*, so it has one place.
Blocks are numbered 1, 2, ... in the order in which they first appear; 0 is the root, the empty prompt. A prompt is the
path from the root to its last block, and that block alone identifies it::

    prompts  7 8 9 | 7 8 4 | 5          0 -+- 1 (id 7) -- 2 (id 8) -+- 3 (id 9)
                                           |                        `- 4 (id 4)
                                           `- 5 (id 5)

So a trace takes memory for its distinct blocks and not for its references. A trace of coding agents has 27 times as
many references, since each prompt repeats the conversation. A block takes 18 to 24 bytes: its id, its parent, and its
number in a hash table with linear probing. A dictionary took a hundred.

The references of a trace are each prompt's path in the tree, its arrival, and the length of its output; they are the
input of every policy. ``ReferenceCollector`` takes the requests one by one, so that its caller controls progress,
limits and interruption.

Hits depend only on the blocks that are used again, and these take far fewer rows than the references. A *reuse* is a
block together with two consecutive requests that use it. All blocks reused between the same two requests are
consecutive on the path that both prompts share, so one row counts them::

    request 0   a b c d
    request 1   a b x            0 -> 1: a b
    request 2   a b c            1 -> 2: a b     0 -> 2: c

In a request with two rows the head was last used by a later request than the tail, never the reverse, since a request
that uses a block uses all blocks before it. Mooncake's conversation trace has 288,500 references, 105,710 reuses of
blocks, and 16,708 rows.

Requests can be divided among tenants or windows of time, to count hits by part beside the total.
"""

import shlex
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.errors import NoBlocksError, TraceError
from pagedkv.planner.traces.request import Request, Tenants

T = TypeVar("T", bound=np.generic)
ROOT: Final = 0
NO_ID: Final = -1
FREE: Final = 0  # a slot of the table without a block
CONFLICT: Final = -1  # a prompt would give an id a second place
SPREAD: Final = 0x9E3779B1
WORD: Final = 2**32 - 1
UPPER: Final = 32
LEAST_ROOM: Final = 1024
SLOTS_A_BLOCK: Final = 2
"""After growing, the table has 1 to 2 slots a block: a lookup reads two or three."""
GROWTH: Final = 1.5


class BlockTree:
    """The tree of all prompts inserted so far.

    >>> tree = BlockTree()
    >>> [tree.insert(np.array(prompt)) for prompt in ([7, 8, 9], [7, 8, 4], [5], [7, 8], [])]
    [3, 4, 5, 2, 0]
    >>> tree.parents().tolist()
    [0, 0, 1, 2, 2, 0]
    """

    def __init__(self) -> None:
        self._num_blocks = 1  # the root
        self._parents = np.full(LEAST_ROOM, ROOT, np.int32)
        self._ids = np.full(LEAST_ROOM, NO_ID, np.int64)
        self._slots = np.zeros(SLOTS_A_BLOCK * LEAST_ROOM, np.int32)

    def insert(self, block_ids: npt.NDArray[np.int64]) -> int | None:
        """Add a prompt to the tree.

        Args:
            block_ids: int64 ``[n]``, none negative.

        Returns:
            The number of its last block (``ROOT`` for an empty prompt), or None if an id would get a second place; the
            tree is then unchanged. O(n); a known block takes about 1 ns.
        """
        self._make_room(len(block_ids))
        last_block = _insert(self._slots, self._ids, self._parents, self._num_blocks, block_ids)
        if last_block == CONFLICT:
            return None
        self._num_blocks = max(self._num_blocks, last_block + 1)
        return last_block

    def _make_room(self, num_blocks: int) -> None:
        """Grow the arrays to have room for this number of further blocks."""
        wanted = self._num_blocks + num_blocks
        if wanted > len(self._parents):
            room = max(wanted, int(GROWTH * len(self._parents)))
            self._parents = _grown(self._parents, room, ROOT)
            self._ids = _grown(self._ids, room, NO_ID)
        if wanted > len(self._slots):
            size = len(self._slots)
            while wanted > size:
                size *= SLOTS_A_BLOCK
            self._slots = np.zeros(size, np.int32)
            _fill_table(self._slots, self._ids, self._num_blocks)

    def parents(self) -> Int32Array:
        """Copy the tree: int32 ``[1 + blocks]``, the parent of each block, always a smaller number."""
        return self._parents[: self._num_blocks].copy()


def _grown(
    values: "np.ndarray[tuple[int], np.dtype[T]]", room: int, default: int
) -> "np.ndarray[tuple[int], np.dtype[T]]":
    grown = np.full(room, default, values.dtype)
    grown[: len(values)] = values
    return grown


@compiled
def _slot_of(slots: Int32Array, ids: Int64Array, block_id: int) -> int:
    """Find the slot that has an id's number, or the free slot for it."""
    slot = ((int(block_id) ^ int(block_id) >> UPPER) * SPREAD & WORD) % len(slots)
    while slots[slot] != FREE and ids[slots[slot]] != block_id:
        slot = slot + 1 if slot + 1 < len(slots) else 0
    return slot


@compiled
def _fill_table(slots: Int32Array, ids: Int64Array, num_blocks: int) -> None:
    """Insert all blocks into an empty table."""
    for block in range(1, num_blocks):
        slots[_slot_of(slots, ids, ids[block])] = block


@compiled
def _insert(slots: Int32Array, ids: Int64Array, parents: Int32Array, num_blocks: int, block_ids: Int64Array) -> int:
    """Add a prompt's blocks after the ``num_blocks`` existing ones; return its last one, or ``CONFLICT``."""
    num_known = _count_known(slots, ids, block_ids)
    last_block = slots[_slot_of(slots, ids, block_ids[num_known - 1])] if num_known else ROOT
    if not _is_path(parents, ids, last_block, block_ids[:num_known]):
        return CONFLICT
    for index in range(num_known, len(block_ids)):
        slot = _slot_of(slots, ids, block_ids[index])
        if slots[slot] != FREE:
            _take_back(slots, ids, num_blocks, num_blocks + index - num_known)
            return CONFLICT
        block = num_blocks + index - num_known
        slots[slot] = block
        ids[block] = block_ids[index]
        parents[block] = last_block
        last_block = block
    return int(last_block)


@compiled
def _count_known(slots: Int32Array, ids: Int64Array, block_ids: Int64Array) -> int:
    """Count the leading known ids by bisection; ids after them must be unknown."""
    low, high = 0, len(block_ids)
    while low < high:
        middle = (low + high) // 2
        if slots[_slot_of(slots, ids, block_ids[middle])] != FREE:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _take_back(slots: Int32Array, ids: Int64Array, first: int, stop: int) -> None:
    """Remove the latest blocks, in reverse, so that no remaining block was probed past a removed one."""
    for block in range(stop - 1, first - 1, -1):
        slots[_slot_of(slots, ids, ids[block])] = FREE


@compiled
def _is_path(parents: Int32Array, ids: Int64Array, last_block: int, block_ids: Int64Array) -> bool:
    """Return whether the path from the root to ``last_block`` has exactly these ids."""
    block = last_block
    for index in range(len(block_ids) - 1, -1, -1):
        if ids[block] != block_ids[index]:
            return False
        block = parents[block]
    return bool(block == ROOT)


@compiled
def write_path(parents: Int32Array, last_block: int, path: Int32Array) -> None:
    """Write the blocks of a prompt, head first."""
    block = last_block
    for index in range(len(path) - 1, -1, -1):
        path[index] = block
        block = parents[block]


class Reuses(NamedTuple):
    """Rows ordered by ``later``, then by ``earlier``: tail before head.

    Args:
        earlier: int32 ``[n]``, a request.
        later: int32 ``[n]``, the next request that uses the same blocks.
        num_blocks: int32 ``[n]``, blocks reused between the two, at least 1.
    """

    earlier: Int32Array
    later: Int32Array
    num_blocks: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class BlockReferences:
    """The references of a trace, request by request in file order.

    Args:
        block_size: tokens of a block.
        parents: int32 ``[1 + num_unique_blocks]``, the tree of :mod:`~pagedkv.planner.capacity.references`.
        last_blocks: int32 ``[num_requests]``, the last block of each prompt, or of its answer; the root if it has none.
        num_prompt_blocks: int32 ``[num_requests]``, blocks of each prompt.
        num_blocks: int32 ``[num_requests]``, blocks of each prompt and, where known, those that its answer adds. Blocks
            of answers are always new, so all hits are of prompts.
        input_lengths: int32 ``[num_requests]``, tokens of each prompt, including those in no block.
        arrivals_s: float64 ``[num_requests]``, arrival of each, never decreasing: a request that is out of order in
            the file gets the arrival of the previous one.
        output_lengths: int64 ``[num_requests]``, tokens generated for each.
        reuses: the blocks that are used again, from which request to which.
        tenants: names of tenants; empty where no request has one.
        tenant_numbers: int32 ``[num_requests]``, the tenant of each request; empty where there are none.
    """

    block_size: int
    parents: Int32Array
    last_blocks: Int32Array
    num_prompt_blocks: Int32Array
    num_blocks: Int32Array
    input_lengths: Int32Array
    arrivals_s: npt.NDArray[np.float64]
    output_lengths: npt.NDArray[np.int64]
    reuses: Reuses
    tenants: tuple[str, ...] = ()
    tenant_numbers: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def num_requests(self) -> int:
        """Number of requests, including those without a block."""
        return len(self.last_blocks)

    @property
    def num_block_refs(self) -> int:
        """Blocks of all prompts."""
        return int(self.num_prompt_blocks.sum())

    @property
    def num_unique_blocks(self) -> int:
        """Number of distinct blocks; a cache of this size never evicts."""
        return len(self.parents) - 1

    @property
    def longest_prompt(self) -> int:
        """Blocks of the longest prompt, with its answer."""
        return int(self.num_blocks.max())

    @property
    def num_answer_blocks(self) -> int:
        """Blocks of answers that are kept after their prompts."""
        return int(self.num_blocks.sum() - self.num_prompt_blocks.sum())

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a request, prompt and output."""
        return float(self.input_lengths.sum(dtype=np.int64) + self.output_lengths.sum()) / max(1, self.num_requests)

    def ideal_hits(self) -> npt.NDArray[np.int64]:
        """Blocks of each prompt that an earlier prompt had: hits of an unbounded cache. int64 ``[num_requests]``."""
        hits = np.bincount(self.reuses.later, weights=self.reuses.num_blocks, minlength=self.num_requests)
        return hits.astype(np.int64)  # the weighted sums are floats, and exact below 2**53

    def ideal_hit_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of those blocks. A partly filled last block counts only its tokens. int64 ``[num_requests]``."""
        return np.minimum(self.ideal_hits() * self.block_size, self.input_lengths)


class ReferenceCollector:
    """Collects the references of a trace.

    Args:
        path: path of the trace, for messages.
        full_blocks_only: leave out the id of a partly filled last block, like an engine that caches full blocks only.
    """

    def __init__(self, path: str, *, full_blocks_only: bool = False) -> None:
        self._path = path
        self._full_blocks_only = full_blocks_only
        self._tree = BlockTree()
        self._block_size = 0
        self._last_blocks = array("i")
        self._num_prompt_blocks = array("i")
        self._num_answer_blocks: array[int] | None = None
        self._input_lengths = array("i")
        self._arrivals_s = array("d")
        self._output_lengths = array("q")
        self._tenants = Tenants()
        self._tenant_numbers = array("i")

    @property
    def num_requests(self) -> int:
        """Requests collected so far."""
        return len(self._last_blocks)

    def add(self, request: Request, num_answer_blocks: int = 0) -> None:
        """Add the next request. O(blocks of its prompt).

        Args:
            request: a request with ids.
            num_answer_blocks: number of ids at the end that are new blocks of its answer.

        Raises:
            TraceError: the request has no block ids, blocks of another size, or ids that do not name whole prefixes.
        """
        if request.block_ids is None and request.prompt_token_ids is not None:
            raise self._fault(
                "has tokens, but no block ids",
                f"Make them: `with_block_ids({shlex.quote(self._path)})`",
            )
        if request.block_ids is None:
            raise self._fault(
                "has lengths, and no content that could hit: neither block ids nor tokens nor texts",
                "What lengths alone show, memory in flight and times, is told by pagedkv replay and pagedkv plan; a "
                "curve needs block_runs, block_ids, hash_ids, hash_runs or requests, or tokens or texts",
            )
        block_ids = request.block_ids
        if self._full_blocks_only and request.block_size and not num_answer_blocks:
            block_ids = block_ids[: request.input_length // request.block_size]
        self._learn_block_size(request.block_size)
        last_block = self._tree.insert(block_ids)
        if last_block is None:
            raise self._fault(
                "repeats a block id after other blocks than before",
                "Give ids that name whole prefixes, as chained hashes do",
            )
        self._last_blocks.append(last_block)
        self._num_prompt_blocks.append(len(block_ids) - num_answer_blocks)
        self._note_answer(num_answer_blocks)
        self._input_lengths.append(request.input_length)
        self._arrivals_s.append(request.arrival_s)
        self._output_lengths.append(request.output_length)
        if request.tenant is not None or self._tenants.are_known:
            self._note_tenant(request.tenant)

    def _note_answer(self, num_blocks: int) -> None:
        """Record the number of answer blocks of the latest request; a trace without any takes no memory."""
        if self._num_answer_blocks is None and num_blocks:
            self._num_answer_blocks = array("i", bytes(4 * (self.num_requests - 1)))
        if self._num_answer_blocks is not None:
            self._num_answer_blocks.append(num_blocks)

    def _note_tenant(self, tenant: str | None) -> None:
        """Record the tenant of the latest request; requests before the first one with a tenant have none."""
        num_before = self.num_requests - 1 - len(self._tenant_numbers)
        if num_before:
            self._tenant_numbers.extend([self._tenants.number(None)] * num_before)
        self._tenant_numbers.append(self._tenants.number(tenant))

    def references(self) -> BlockReferences:
        """Build the result and end the collection: ids, which take the most memory, are dropped. O(references).

        Raises:
            NoBlocksError: no prompt of the trace has a block.
        """
        if not any(self._num_prompt_blocks):
            longest = max(self._input_lengths, default=0)
            reason = f"every prompt is shorter than a block: the longest has {longest:,} tokens"
            remedy = "Name a trace with longer ones, or smaller blocks where they are made of tokens (`block_size`)"
            raise NoBlocksError(self._path, None, reason, remedy)
        parents, last_blocks = self._tree.parents(), np.array(self._last_blocks, np.int32)
        self._tree = BlockTree()
        num_prompt_blocks = np.array(self._num_prompt_blocks, np.int32)
        answers = self._num_answer_blocks
        return BlockReferences(
            block_size=self._block_size,
            parents=parents,
            last_blocks=last_blocks,
            num_prompt_blocks=num_prompt_blocks,
            num_blocks=num_prompt_blocks if answers is None else num_prompt_blocks + np.array(answers, np.int32),
            input_lengths=np.array(self._input_lengths, np.int32),
            arrivals_s=np.maximum.accumulate(np.array(self._arrivals_s, np.float64)),
            output_lengths=np.array(self._output_lengths, np.int64),
            reuses=find_reuses(parents, last_blocks),
            tenants=tuple(self._tenants.names),
            tenant_numbers=np.array(self._tenant_numbers, np.int32),
        )

    def _learn_block_size(self, block_size: int) -> None:
        """Remember the size of the trace's blocks; 0 means that the size is still unknown."""
        if block_size and self._block_size not in {0, block_size}:
            raise self._fault(
                f"has blocks of {block_size} tokens, those before it of {self._block_size}", "Give blocks of one size"
            )
        self._block_size = self._block_size or block_size

    def _fault(self, reason: str, remedy: str) -> TraceError:
        return TraceError(self._path, None, f"request {self.num_requests + 1} {reason}", remedy)


NEVER = -1  # not used yet
ROWS_A_CALL: Final = 2**18
LONGEST_PROMPT: Final = 2**24  # blocks: the most tokens that a prompt may have


def find_reuses(parents: Int32Array, last_blocks: Int32Array) -> Reuses:
    """Find all reuses of a trace. O(references), about 1 ns each.

    Args:
        parents: int32 ``[1 + blocks]``, the tree of blocks.
        last_blocks: int32 ``[requests]``, the last block of each prompt.

    >>> reuses = find_reuses(np.array([0, 0, 1, 2, 3, 2], np.int32), np.array([4, 5, 3], np.int32))
    >>> list(zip(*(column.tolist() for column in reuses)))
    [(0, 1, 2), (0, 2, 1), (1, 2, 2)]
    """
    last_uses = np.full(len(parents), NEVER, np.int32)
    rows = np.empty((max(ROWS_A_CALL, min(len(parents), LONGEST_PROMPT)), 2), np.int32)
    found = [np.empty((0, 2), np.int32)]
    counts = np.zeros(len(last_blocks), np.int64)
    request = 0
    while request < len(last_blocks):
        stop = _use_prompts(parents, last_uses, last_blocks, request, rows, counts)
        found.append(rows[: counts[request:stop].sum()].copy())
        request = stop
    earlier, num_blocks = np.concatenate(found).T.copy()
    later = np.repeat(np.arange(len(last_blocks), dtype=np.int32), counts)
    return Reuses(earlier, later, num_blocks)


@compiled
def _use_prompts(  # noqa: PLR0913, PLR0917 - a compiled loop takes arrays and numbers separately
    parents: Int32Array,
    last_uses: Int32Array,
    last_blocks: Int32Array,
    first: int,
    pairs: Int32Array,
    num_reused: Int64Array,
) -> int:
    """Walk prompts from ``first`` on while there is room for another's pairs; return the first prompt not walked."""
    num_pairs = 0
    for request in range(first, len(last_blocks)):
        block, length = last_blocks[request], 0
        while block != ROOT:
            length += 1
            block = parents[block]
        if num_pairs + length > len(pairs):
            return request
        num_reused[request] = _use_prompt(parents, last_uses, last_blocks[request], request, pairs[num_pairs:])
        num_pairs += num_reused[request]
    return len(last_blocks)


@compiled
def _use_prompt(parents: Int32Array, last_uses: Int32Array, last_block: int, request: int, pairs: Int32Array) -> int:
    """Walk a prompt from tail to head, record this use, and write ``(earlier request, blocks)``; return the pairs."""
    num_pairs = 0
    block = last_block
    while block != ROOT:
        earlier = last_uses[block]
        last_uses[block] = request
        if num_pairs > 0 and pairs[num_pairs - 1, 0] == earlier:
            pairs[num_pairs - 1, 1] += 1
        elif earlier != NEVER:
            pairs[num_pairs, 0] = earlier
            pairs[num_pairs, 1] = 1
            num_pairs += 1
        block = parents[block]
    return num_pairs


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One division of the requests of a trace.

    Args:
        kind: "tenant" or "window".
        names: names of the parts.
        numbers: int32 ``[num_requests]``, the part of each request.
    """

    kind: str
    names: Sequence[str]
    numbers: Int32Array

    def sums(self, values: Int32Array | Int64Array) -> Int64Array:
        """Add up a value of each request, by part. int64 ``[parts]``; O(requests)."""
        sums = np.bincount(self.numbers, weights=values, minlength=len(self.names))
        return sums.astype(np.int64)  # the weighted sums are floats, and exact below 2**53

    def counts(self) -> Int64Array:
        """Count the requests of each part. int64 ``[parts]``."""
        return np.bincount(self.numbers, minlength=len(self.names)).astype(np.int64)
