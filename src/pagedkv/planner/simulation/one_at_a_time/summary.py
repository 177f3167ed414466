"""The result of a replay, as values: exact counts, ratios computed from them, and separate times.

Knows nothing of how requests were served. Counts follow from the requests and the pool alone and are equal on every
run; only :class:`ReplayTiming` depends on the machine.
"""

from dataclasses import asdict, dataclass, replace

from pagedkv.planner.traces.request import TokenizedRequest

__all__ = ["ReplayCounts", "ReplaySummary", "ReplayTiming"]


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """Exact counts. All but the first two are over the served requests.

    Args:
        num_requests: requests seen, rejected ones included.
        num_with_content: requests whose content is in the trace; without any, hits are unknown.
        num_rejected: requests whose prompt and output together exceed the whole pool; they were not served.
        num_prompt_tokens: tokens of the prompts.
        num_output_tokens: tokens generated.
        num_prompt_blocks: blocks of the prompts that could hit: ``(input_length - 1) // block_size`` of each, for only
            full blocks are cached and the last token is always computed.
        num_hit_tokens: prompt tokens that were found in the cache.
        num_hit_blocks: the blocks that hold them.
        peak_blocks_in_use: the most blocks in use at once.
        sum_blocks_in_use: blocks in use when a request was largest (after its last token), summed over requests.
    """

    num_requests: int = 0
    num_with_content: int = 0
    num_rejected: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_prompt_blocks: int = 0
    num_hit_tokens: int = 0
    num_hit_blocks: int = 0
    peak_blocks_in_use: int = 0
    sum_blocks_in_use: int = 0

    @property
    def num_served(self) -> int:
        """Requests that were served."""
        return self.num_requests - self.num_rejected

    def plus_rejected(self, request: TokenizedRequest) -> "ReplayCounts":
        """Return the counts after one more request, which was rejected."""
        return replace(
            self,
            num_requests=self.num_requests + 1,
            num_with_content=self.num_with_content + request.has_content,
            num_rejected=self.num_rejected + 1,
        )

    def plus_served(
        self, request: TokenizedRequest, block_size: int, num_hit_tokens: int, num_blocks_in_use: int
    ) -> "ReplayCounts":
        """Return the counts after one more request, which was served."""
        return replace(
            self,
            num_requests=self.num_requests + 1,
            num_with_content=self.num_with_content + request.has_content,
            num_prompt_tokens=self.num_prompt_tokens + len(request.prompt_token_ids),
            num_output_tokens=self.num_output_tokens + len(request.output_token_ids),
            num_prompt_blocks=self.num_prompt_blocks + (len(request.prompt_token_ids) - 1) // block_size,
            num_hit_tokens=self.num_hit_tokens + num_hit_tokens,
            num_hit_blocks=self.num_hit_blocks + num_hit_tokens // block_size,
            peak_blocks_in_use=max(self.peak_blocks_in_use, num_blocks_in_use),
            sum_blocks_in_use=self.sum_blocks_in_use + num_blocks_in_use,
        )


@dataclass(frozen=True, slots=True)
class ReplayTiming:
    """Time of the block space: all of its work, and nothing else.

    Args:
        bookkeeping_ns: nanoseconds spent in calls that change the block space.
        num_tokens: tokens of the served requests, prompts and outputs.
    """

    bookkeeping_ns: int
    num_tokens: int

    @property
    def bookkeeping_s(self) -> float:
        """Seconds in all."""
        return self.bookkeeping_ns / 1e9

    @property
    def ns_per_token(self) -> float:
        """Nanoseconds a token of the served requests."""
        return _ratio(self.bookkeeping_ns, self.num_tokens)


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """The result of a replay.

    Args:
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens a block.
        counts: of the requests.
        num_evictions: cached blocks that were allocated for other content.
        timing: how long the bookkeeping took.
    """

    num_blocks: int
    block_size: int
    counts: ReplayCounts
    num_evictions: int
    timing: ReplayTiming

    @property
    def block_hit_ratio(self) -> float | None:
        """Hit blocks of the prompt blocks that could hit; None if the trace has no content."""
        return self._hit_ratio(self.counts.num_hit_blocks, self.counts.num_prompt_blocks)

    @property
    def token_hit_ratio(self) -> float | None:
        """Hit tokens of all prompt tokens; None if the trace has no content."""
        return self._hit_ratio(self.counts.num_hit_tokens, self.counts.num_prompt_tokens)

    def _hit_ratio(self, part: int, whole: int) -> float | None:
        is_known = self.counts.num_with_content or not self.counts.num_requests
        return _ratio(part, whole) if is_known else None

    @property
    def mean_blocks_in_use(self) -> float:
        """Blocks in use when a request is largest, mean over the served requests."""
        return _ratio(self.counts.sum_blocks_in_use, self.counts.num_served)

    @property
    def waste(self) -> float:
        """Reserved slots without a token: ``1 - tokens / slots`` when each request is largest.

        Tokens and slots are summed over the requests before dividing, so long requests weigh more.
        """
        num_tokens = self.counts.num_prompt_tokens + self.counts.num_output_tokens
        num_slots = self.counts.sum_blocks_in_use * self.block_size
        return _ratio(num_slots - num_tokens, num_slots)

    def as_dict(self) -> dict[str, object]:
        """Lay the summary out for JSON: the same on every run, so without times."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            **asdict(self.counts),
            "num_evictions": self.num_evictions,
            "block_hit_ratio": self.block_hit_ratio,
            "token_hit_ratio": self.token_hit_ratio,
            "mean_blocks_in_use": self.mean_blocks_in_use,
            "waste": self.waste,
        }


def _ratio(part: int, whole: int) -> float:
    """Divide; 0 / 0 is 0."""
    return part / whole if whole else 0.0
