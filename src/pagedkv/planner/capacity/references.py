"""References of a trace: each prompt's path in the tree of blocks, its arrival, and the length of its output.

``ReferenceCollector`` takes the requests one by one, so that its caller controls progress, limits and interruption.
``BlockReferences`` is the input of every policy.
"""

import shlex
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import NoBlocksError, TraceError
from pagedkv.planner.capacity.block_tree import BlockTree
from pagedkv.planner.capacity.reuses import Reuses, find_reuses
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.tenants import Tenants

__all__ = ["BlockReferences", "ReferenceCollector"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockReferences:
    """The references of a trace, request by request in file order.

    Args:
        block_size: tokens of a block.
        parents: int32 ``[1 + num_unique_blocks]``, the tree of :mod:`~pagedkv.planner.capacity.block_tree`.
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
