"""Drives the production block space with requests, one at a time, and counts hits, evictions and blocks.

Owns a block space of one full-attention group and the counts; knows neither files nor terminals, and reads the time
only from the given clock. The caller runs the loop, and so decides about progress, limits and interruption::

    replayer = Replayer(ReplayConfig(num_blocks=65_536, block_size=16), time.perf_counter_ns)
    for request in tokenized(trace):
        replayer.serve(request)
    print(replayer.summary())

Each request is served to its end before the next: its prompt is allocated and the step that computes it acknowledged,
then its output is appended at once and that step acknowledged, then it is freed. So the only pressure on
the pool is its size, and the figures follow from the order of the requests alone. A request whose prompt and
output do not fit the *empty* pool is counted as rejected and changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.answers import Shortage
from pagedkv.memory.contract.space_config import SpaceConfig
from pagedkv.memory.contract.spec import FullAttention
from pagedkv.memory.space import BlockSpace
from pagedkv.memory.warming import make_ready, of_spaces
from pagedkv.planner.simulation.one_at_a_time.summary import ReplayCounts, ReplaySummary, ReplayTiming
from pagedkv.planner.traces.request import TokenizedRequest

__all__ = ["ReplayConfig", "Replayer", "compile_loops"]

NUM_NULL_BLOCKS: Final = 1
LONGEST_REQUEST: Final = 2**25
"""Tokens of a longest prompt and a longest output, as trace readers admit them."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The pool that requests are replayed against.

    Args:
        num_blocks: blocks, the null block included; at least 2.
        block_size: tokens a block; at least 1.
    """

    num_blocks: int
    block_size: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the empty pool can hold for one sequence."""
        return (self.num_blocks - NUM_NULL_BLOCKS) * self.block_size

    def space_config(self) -> SpaceConfig:
        """Configure a block space that serves one sequence, of up to the whole pool.

        Raises:
            ConfigurationError: a size is out of range.
        """
        return SpaceConfig(
            groups=(FullAttention(block_size=self.block_size),),
            num_blocks=self.num_blocks,
            max_sequences=1,
            max_tokens=min(max(1, self.capacity_tokens), LONGEST_REQUEST),
            watermark=0.0,
            prefix_caching=True,
        )


class Replayer:
    """Serves requests one at a time through a block space with prefix caching.

    Args:
        config: the pool.
        clock: reads a monotonic time in nanoseconds, as :func:`time.perf_counter_ns` does.

    Raises:
        ConfigurationError: a size is out of range.
    """

    def __init__(self, config: ReplayConfig, clock: Callable[[], int]) -> None:
        self._config = config
        self._clock = clock
        self._space = BlockSpace(config.space_config())
        self._counts = ReplayCounts()
        self._bookkeeping_ns = 0

    @property
    def num_requests(self) -> int:
        """Requests seen so far."""
        return self._counts.num_requests

    def serve(self, request: TokenizedRequest) -> None:
        """Serve one request to its end, or count it as rejected. O(blocks of the request)."""
        if len(request.prompt_token_ids) + len(request.output_token_ids) > self._config.capacity_tokens:
            self._counts = self._counts.plus_rejected(request)
            return
        started_ns = self._clock()
        rows, num_hit_tokens = self._prefill(request.prompt_token_ids)
        self._generate(rows, request.output_token_ids)
        self._bookkeeping_ns += self._clock() - started_ns
        num_blocks_in_use = self._space.statistics().pools[0].num_in_use
        started_ns = self._clock()
        self._space.free(rows)
        self._bookkeeping_ns += self._clock() - started_ns
        self._counts = self._counts.plus_served(request, self._config.block_size, num_hit_tokens, num_blocks_in_use)

    def summary(self) -> ReplaySummary:
        """Sum up the requests so far. Changes nothing."""
        return ReplaySummary(
            num_blocks=self._config.num_blocks,
            block_size=self._config.block_size,
            counts=self._counts,
            num_evictions=self._space.statistics().pools[0].num_evictions,
            timing=ReplayTiming(
                bookkeeping_ns=self._bookkeeping_ns,
                num_tokens=self._counts.num_prompt_tokens + self._counts.num_output_tokens,
            ),
        )

    def _prefill(self, prompt_token_ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], int]:
        """Allocate and compute the prompt; returns the row, as an array, and the tokens that hit."""
        allocation = self._space.allocate(prompt_token_ids)
        if isinstance(allocation, Shortage):
            raise _impossible(allocation)
        self._run_step()
        return np.array([allocation.row], dtype=np.int32), allocation.num_hit_tokens

    def _generate(self, rows: npt.NDArray[np.int32], output_token_ids: npt.NDArray[np.int32]) -> None:
        """Append and compute the output, in one step."""
        if len(output_token_ids) == 0:
            return
        counts = np.array([len(output_token_ids)], dtype=np.int32)
        shortage = self._space.append(rows, output_token_ids, counts)
        if shortage is not None:
            raise _impossible(shortage)
        self._run_step()

    def _run_step(self) -> None:
        plan = self._space.plan_step()
        self._space.acknowledge(plan.step_id)


def _impossible(shortage: Shortage) -> AssertionError:
    """Build the error for a fault of the library: a request that fits the empty pool found too few blocks in it."""
    return AssertionError(f"a sequence that is alone and fits the pool found too few blocks: {shortage}")


def compile_loops() -> None:
    """Serve a few tiny requests in a temporary space, so that loops compile before time is measured.

    They hit, evict, end on a block boundary and repeat cached content: every case of a replay.
    """
    config = ReplayConfig(num_blocks=5, block_size=2)
    space_config = config.space_config()
    make_ready(of_spaces(space_config.eviction, has_features=space_config.has_features))
    replayer = Replayer(config, clock=lambda: 0)
    for first_token in (0, 0, 100, 200, 0):
        token_ids = np.arange(first_token, first_token + 7, dtype=np.int32)
        replayer.serve(TokenizedRequest(0.0, prompt_token_ids=token_ids[:4], output_token_ids=token_ids[4:]))
