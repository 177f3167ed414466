"""A second, independent computation of a replay: dictionaries and lists, no block ids, none of pagedkv's core.

A cached block is a *key* that stands for all tokens up to the block's end. Keys come from tokens (interned
prefix by prefix) or straight from a trace's block ids, which already stand for whole prefixes; the latter knows nothing
of how the library makes tokens from ids.

The rules, from the design: at most ``n - 1`` prompt tokens hit; only full blocks are cached, generated ones too;
blocks without content are taken first, then the least recently used, the tail of a sequence before its head.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from pagedkv.planner.traces.request import Request, TokenizedRequest

__all__ = ["NaiveReplay", "PrefixKeys", "trace_keys"]


@dataclass
class NaiveReplay:
    """Replays requests one at a time against a pool of ``num_usable`` blocks."""

    num_usable: int
    block_size: int
    cached: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)  # first to be evicted first
    num_empty: int = 0
    num_rejected: int = 0
    num_hit_blocks: int = 0
    num_evictions: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.num_empty = self.num_usable

    def serve(self, keys: Sequence[Hashable], input_length: int, output_length: int) -> None:
        """Serve one request, given the keys of all its full blocks (prompt and output)."""
        num_blocks = -(-(input_length + output_length) // self.block_size)
        if num_blocks > self.num_usable:
            self.num_rejected += 1
            return
        num_hits = 0
        while num_hits < (input_length - 1) // self.block_size and keys[num_hits] in self.cached:
            num_hits += 1
        for key in keys[:num_hits]:
            del self.cached[key]
        num_prompt_blocks = -(-input_length // self.block_size)
        num_full_prompt_blocks = input_length // self.block_size
        self._compute(keys[num_hits:num_full_prompt_blocks], num_prompt_blocks - num_hits)
        self._compute(keys[num_full_prompt_blocks:], num_blocks - num_prompt_blocks)
        self._free(keys)
        self.num_empty += num_blocks - len(keys)
        self.num_hit_blocks += num_hits
        self.peak = max(self.peak, num_blocks)

    def _free(self, keys: Sequence[Hashable]) -> None:
        """Leave content cached, the tail of the sequence to be evicted before its head."""
        for key in reversed(keys):
            self.cached[key] = None

    def _compute(self, keys: Sequence[Hashable], num_new: int) -> None:
        """Take blocks for new content. Content that is cached after all is used where it is."""
        num_evicted = max(0, num_new - self.num_empty)
        for _ in range(num_evicted):
            self.cached.popitem(last=False)
        self.num_evictions += num_evicted
        self.num_empty -= num_new - num_evicted
        for key in keys:
            if key in self.cached:
                del self.cached[key]
                self.num_empty += 1


class PrefixKeys:
    """Keys from tokens: a number for each distinct (number of the prefix before, tokens of the block)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, request: TokenizedRequest) -> list[Hashable]:
        """Name all full blocks of a request."""
        tokens = request.prompt_token_ids.tolist() + request.output_token_ids.tolist()
        keys: list[Hashable] = []
        number = -1
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            block = (number, tuple(tokens[end - self._block_size : end]))
            number = self._numbers.setdefault(block, len(self._numbers))
            keys.append(number)
        return keys


def trace_keys(request: Request, number: int, block_size: int) -> list[Hashable]:
    """Name all full blocks of a trace's request: by the id that covers a block's last token, if one does."""
    block_ids = [] if request.block_ids is None else request.block_ids.tolist()
    covered = min(request.input_length, len(block_ids) * request.block_size)
    return [
        (block_ids[(end - 1) // request.block_size], end) if end <= covered else ("request", number, end)
        for end in range(block_size, request.input_length + request.output_length + 1, block_size)
    ]
