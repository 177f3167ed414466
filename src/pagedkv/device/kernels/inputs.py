"""The inputs of kernels: of paged attention, tokens and states to be written, and the draws of sampling.

Paged attention takes rows, a layer's memory, and lists of a step's work.

A step's rows are split into independent pieces of work, so that a row's answer is bitwise the same for any other rows
of the step. Rows of few queries (decoding) are split along their keys: a *tile* is some keys of a row, a *span* is
consecutive tiles with one common partial answer, and spans are merged in their order::

    keys of a row     0      64     128    192    256    320    345
    tiles             | t    | t    | t    | t    | t    | t   |
    spans             | slot 0      | slot 1      | slot 2     |     merged: slots 0, 1, 2

The width of a span depends only on the row's own length. Rows of many queries (prompts) are split along their queries:
an *item* is some queries of one row with all the keys that they see. *Chunks* are rows between the two, such as a
question after a long cached prefix. They have too few items to occupy a device, so their items are split along keys
too. Consecutive rows that begin with the same blocks may read these once: the shared blocks are items of the first row,
their leader, and yield a partial answer for each of the rows.

The lists are made on the device, from lengths in its memory, once per step for all layers with the same ``Reading``. So
one captured graph can be replayed for any step. The kernels process the lists with as many programs as fit on the
device.

Draws are the parameters of sampling, and the noise for each token. Scores are perturbed by noise that depends only on
seed, sample, position and token id, and the largest sum gives the token (E. J. Gumbel, 1954). The noise is a hash:
SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014), a counter and a mixing function::

    key(seed, sample, position) = word(word(word(seed, 0), sample), position)
    word(key, counter)          = mix(key + (counter + 1) * GAMMA)

The integer arithmetic wraps around, so the words are the same on every device. 52 bits of a word are used; the midpoint
of their interval is exact in float64, so that no logarithm is taken of 0 or 1.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, final

import torch

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError

TILE_WORDS: Final = 10
"""Words of a tile: place, first token, number of queries, position of the first query, first key, state, spans, tiles
of its queries before it, their number, and the queries of split rows before it. The state is 1 if it is the last of its
span, plus 2 if it is the first, plus 4 times (1 + partial row of the span). Spans are the slot, ``SPANS`` times the
number of spans of its queries, and ``SPANS**2`` times the number of those of a shared prefix."""
ITEM_WORDS: Final = 8
"""Words of an item: place, first token, number of queries, position of the first query, first key, end of its keys,
partial row, slot."""
SPANS: Final = 1024
"""Factor of the number of spans in a word with it and a slot."""
NO_PARTIAL: Final = -1
"""Partial row of a result that needs no merging."""
NUM_COUNTS: Final = 3
"""Counts of a list: tiles, items, merges."""
ASSUMED_PROCESSORS: Final = 3
"""Number of multiprocessors assumed for a CPU."""
SEES_ALL: Final = 2**30
"""Position of queries that see all keys of their item."""
FEW_HEADS: Final = 16
"""Most heads of latents for which few warps read the keys for all heads."""
HALF_NBYTES: Final = 2
WIDE: Final = 256
MIDDLE: Final = 128
WIDEST_POWER: Final = 512
"""Dimensions of a head above which tiles are smaller. Values wider than WIDEST_POWER are padded to twice of it."""
LEAST_EXTENT: Final = 16
"""Smallest extent of a matrix product of tiles."""
MOST_COMMON: Final = 16
"""Most spans of a shared prefix."""
MERGE_WORDS: Final = 4
"""Words of a merge: token, number of spans, partial row of the first span, distance to the next span's partial row."""
CHUNK_PARTIAL_NBYTES: Final = 2**29
"""Most bytes of the partial answers of chunks, which limits into how many spans they are split."""


class PagedRows(NamedTuple):
    """Rows of one group in a step.

    Args:
        block_tables: int32 ``[places, width]``.
        starts: int32 ``[places]``, the first position of each row.
        seq_lens: int32 ``[places]``, the end of each row's positions; equal to its start for a row without queries.
        query_start_loc: int32 ``[places + 1]``, tokens before each place in the flat order.
    """

    block_tables: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


class PagedLayer(NamedTuple):
    """One layer's memory and score parameters.

    Args:
        keys: ``[num_blocks, block_size, key heads, key_dim]``, with contiguous elements of a head. Latents are keys of
            one head.
        values: ``[num_blocks, block_size, key heads, value_dim]``, likewise. Values of latents are a view of the keys'
            first dimensions.
        scale: factor of the product of query and key.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: no cap.
        key_scales, value_scales: float32 ``[key heads or 1]`` for memory of eight bits: the value of a stored number is
            the number times its scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    soft_cap: float = 0.0
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def is_latent(self) -> bool:
        """Whether values are a part of the keys."""
        return self.keys.data_ptr() == self.values.data_ptr()

    @property
    def is_read_once(self) -> bool:
        """Whether a kernel uses loaded keys as values too: for latents whose dimensions fill their tile."""
        value_dim = self.values.shape[3]
        return self.is_latent and value_dim >= LEAST_EXTENT and value_dim & (value_dim - 1) == 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Which positions p <= q a query at position q sees; the same for all layers of one list.

    Args:
        heads_of_key: query heads that share a key head.
        window: only positions ``p > q - window``, and the first ``num_sink_tokens`` (StreamingLLM, 2023); 0: all.
        chunk: only positions with ``p // chunk == q // chunk``; 0: all.
        num_sink_tokens: with a window, leading positions that every query sees.
    """

    heads_of_key: int
    window: int = 0
    chunk: int = 0
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the values. Raises ConfigurationError."""
        as_count(self.heads_of_key, "heads_of_key", least=1)
        for name in ("window", "chunk", "num_sink_tokens"):
            as_count(getattr(self, name), name)
        if self.window and self.chunk:
            raise ConfigurationError(f"a layer has a window ({self.window}) or a chunk ({self.chunk}), not both")

    def first_seen(self, position: int) -> int:
        """Return the first position that a query at ``position`` sees, apart from sink tokens."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How work is split, and how many threads process it. It affects only the rounding of answers.

    Args:
        key_tile: keys of a tile.
        span_tiles: tiles of a span, or a multiple if there would be more than ``most_spans``.
        head_tile: most heads of a key head that a program processes at once.
        warps, stages, programs: of the kernel for tiles: warps of a program, tiles in its pipeline, programs on a
            multiprocessor.
        query_rows: queries times heads of an item, at least the heads of a key.
        query_keys: keys that an item reads at once.
        query_warps, query_stages, query_programs: the same for the kernel for items; query_registers: most registers of
            a thread there; 0: no limit.
        shared_span: tokens of a shared prefix that one item reads, or a multiple.
        chunk_queries: most queries of a chunk; rows of more queries are prompts.
        chunk_span: keys of a span of a chunk, or a multiple if there would be more than ``most_chunk_spans`` spans, or
            more than ``chunk_partials`` partial answers per row.
    """

    key_tile: int = 128
    span_tiles: int = 2
    most_spans: int = 32
    head_tile: int = 32
    warps: int = 4
    stages: int = 2
    programs: int = 2
    query_rows: int = 128
    query_keys: int = 64
    query_warps: int = 8
    query_stages: int = 4
    query_programs: int = 2
    query_registers: int = 128
    shared_span: int = 512
    chunk_queries: int = 256
    chunk_span: int = 256
    most_chunk_spans: int = 8
    chunk_partials: int = 1024


@final
class WorkList:
    """The work of one step, for all layers with the same reading.

    Args:
        reading: which positions queries see.
        max_places: most rows of a step.
        max_tokens: most tokens of a step.
        max_length: most tokens of a row.
        num_heads: query heads.
        value_dim: dimensions of an answer.
        few_queries: rows of at most this many queries are split along their keys: one query, and drafts.
        shares: whether rows that begin with the same blocks read them once. If so, the rounding of an answer depends on
            the rows that share; else it depends only on the row itself.
        tiling: how work is split.
        device: the device of the lists.

    Attributes:
        tiles, items: int32 ``[capacity, words]``; merges: int32 ``[capacity, MERGE_WORDS]``.
        by_items: whether rows of few queries are split into items too, one for each span, for their many heads.
        counts: int32 ``[NUM_COUNTS]``, the numbers of tiles, items and merges.
        shares_begin: int32 ``[num_shares + 1]``: the first tile of each program's part.
        cut: int32 ``[few_rows, 2]``: token and number of spans of each query of few whose row has several spans.
        finished: int32 ``[few_rows, num_heads]``: how many spans of such queries are computed; zero between launches.
        shared: int32 ``[max_places, 2]``: tokens of the prefix that consecutive rows share, and, at the first of these
            rows, their number.
        partials: float32 ``[partial rows, num_heads, value_dim]``; sums: float32 ``[partial rows, num_heads]``, the
            logarithm (base 2) of the divisor of each partial answer. Partial row ``slot * few_rows + number`` is for
            the span ``slot`` of a query of a row of few queries; those of chunks follow, from ``chunk_base`` on,
            ``chunk_partials`` for each place.
        chunk_queries: most queries of a chunk; 0: there are no chunks, since windows limit the keys, or memory the
            spans.

    Raises:
        ConfigurationError: a number is out of range, or there is not enough memory for the lists.
    """

    def __init__(  # noqa: PLR0913 - the bounds of a step, by keywords
        self,
        reading: Reading,
        *,
        max_places: int,
        max_tokens: int,
        max_length: int,
        num_heads: int,
        value_dim: int,
        few_queries: int = 1,
        shares: bool = False,
        tiling: AttentionTiling | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        as_count(max_places, "max_places", least=1)
        as_count(max_tokens, "max_tokens", least=1)
        as_count(few_queries, "few_queries", least=1)
        self.reading = reading
        self.tiling = tiling or AttentionTiling()
        self.few_queries = few_queries
        sees_all = not (reading.window or reading.chunk)
        self.by_items = sees_all and reading.heads_of_key > self.tiling.head_tile
        self.shares = shares and sees_all and not self.by_items
        self.max_places, self.max_tokens = max_places, max_tokens
        cut, rows = self.tiling, max_places * few_queries
        key_tiles = -(-max_length // cut.key_tile) + -(-reading.num_sink_tokens // cut.key_tile)
        num_tiles = max_places * -(-few_queries // self.tokens_of_tile) * key_tiles
        num_items = max_places + -(-max_tokens // self.tokens_of_item)
        slots = cut.most_spans
        if self.shares:
            num_items, slots = num_items * MOST_COMMON, slots + MOST_COMMON
        if self.by_items:
            num_items *= cut.most_spans
        most = CHUNK_PARTIAL_NBYTES // (4 * max_places * num_heads * (value_dim + 1))
        partials = min(most, cut.chunk_partials, cut.chunk_queries * cut.most_chunk_spans)
        chunk_queries = min(cut.chunk_queries, partials // 2)
        is_split = sees_all and chunk_queries > few_queries
        self.chunk_queries, self.chunk_partials = (chunk_queries, partials) if is_split else (0, 0)
        self.few_rows, self.chunk_base = rows, slots * rows
        if is_split:
            num_items += max_places * max(cut.most_chunk_spans, 2 * -(-partials // self.tokens_of_item))
        num_rows = self.chunk_base + max_places * self.chunk_partials

        columns = num_heads // reading.heads_of_key * -(-reading.heads_of_key // max(1, self.head_tile))
        self.num_shares = max(1, num_processors(torch.device(device)) * cut.programs // columns)

        def integers(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.int32, device=device)

        try:
            self.tiles = integers(num_tiles, TILE_WORDS)
            self.items = integers(num_items, ITEM_WORDS)
            num_merges = rows * self.by_items + min(max_tokens, max_places * self.chunk_queries)
            self.merges = integers(1 + num_merges, MERGE_WORDS)
            self.counts = integers(NUM_COUNTS)
            self.finished = integers(rows, num_heads)
            self.shares_begin = integers(self.num_shares + 1)
            self.cut = integers(rows, 2)
            self.shared = integers(max_places, 2)
            self.common = integers(max_places if self.shares else 1)
            self.partials = torch.zeros(num_rows, num_heads, value_dim, device=device)
            self.sums = torch.zeros(num_rows, num_heads, device=device)
        except torch.OutOfMemoryError as problem:
            nbytes = 4 * (TILE_WORDS * (num_tiles + num_items) + num_rows * num_heads * (value_dim + 1))
            raise ConfigurationError(
                f"lists and partial answers of {max_places} rows of {max_length} tokens take {nbytes / 2**30:.1f} GiB, "
                "more than the device has free: lower max_places or most_spans"
            ) from problem

    @property
    def head_tile(self) -> int:
        """Heads of a key head that a program of tiles computes."""
        return min(self.reading.heads_of_key, self.tiling.head_tile)

    @property
    def chunk_tiles(self) -> int:
        """Tiles of keys in a span of a chunk, or a multiple if there would be too many spans."""
        return max(1, self.tiling.chunk_span // self.tiling.key_tile)

    @property
    def tokens_of_tile(self) -> int:
        """Most queries of a tile."""
        if self.by_items:
            return self.tokens_of_item
        return max(1, 16 // self.reading.heads_of_key)

    @property
    def tokens_of_item(self) -> int:
        """Most queries of an item."""
        return max(1, self.tiling.query_rows // self.reading.heads_of_key)


@lru_cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; on a CPU a small number, for tests."""
    if device.type == "cpu":
        return ASSUMED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def tiling_for(  # noqa: PLR0911 - one return for each kind of layer
    layer: PagedLayer, reading: Reading, query_nbytes: int = 2
) -> AttentionTiling:
    """Choose the tiling of a layer, from measurements on an H200 (docs/decisions/0036-paged-attention.md).

    Args:
        layer: the layer's memory.
        reading: which positions its queries see.
        query_nbytes: bytes of an element of the queries.
    """
    widest = max(layer.keys.shape[3], layer.values.shape[3])
    if layer.values.shape[3] > WIDEST_POWER:
        return AttentionTiling(
            key_tile=16,
            span_tiles=32,
            query_rows=32,
            query_keys=16,
            query_warps=4,
            query_stages=2,
            query_programs=1,
            query_registers=0,
        )
    if query_nbytes > HALF_NBYTES:
        return AttentionTiling(
            key_tile=32, span_tiles=16, query_rows=32, query_keys=16, query_warps=4, query_registers=0
        )
    if widest <= MIDDLE:
        if layer.keys.dtype.itemsize == 1:
            return AttentionTiling(span_tiles=8, warps=2, programs=4)
        return AttentionTiling()
    if layer.is_read_once and reading.heads_of_key <= FEW_HEADS:
        return AttentionTiling(
            key_tile=64,
            span_tiles=16,
            head_tile=0,
            query_rows=max(16, 1 << (reading.heads_of_key - 1).bit_length()),
            query_keys=32,
            query_warps=4,
            query_stages=5,
            query_registers=0,
            chunk_queries=0,
        )
    if layer.is_read_once:
        return AttentionTiling(
            key_tile=64,
            span_tiles=32,
            head_tile=0,
            query_rows=64,
            query_stages=2,
            query_programs=1,
            query_registers=0,
            chunk_queries=0,
        )
    if widest <= WIDE:
        return AttentionTiling(
            key_tile=64, span_tiles=8, query_rows=64, query_stages=3, query_programs=1, query_registers=0
        )
    return AttentionTiling(
        key_tile=32, span_tiles=16, query_rows=64, query_keys=16, query_stages=3, query_programs=1, query_registers=0
    )


class TokenSide(NamedTuple):
    """Tokens, and the blocks that they are written to.

    Args:
        tokens: float ``[n, heads, dim]``, of any strides.
        blocks: ``[num_blocks, block_size, heads, dim]``, of any strides, of one layer.
        scales: float32 ``[heads or 1]`` if ``blocks`` has eight bits: the value divided by its scale is stored.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor | None = None


class StateSide(NamedTuple):
    """States in blocks, and in rows.

    Args:
        blocks: ``[num_blocks, layers, *shape]``.
        rows: ``[layers, n, *shape]``, of the same type. The elements of one state are contiguous in both.
    """

    blocks: torch.Tensor
    rows: torch.Tensor


GAMMA: Final = 0x9E3779B97F4A7C15
FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS: Final = (30, 27, 31)
"""The constants of SplitMix64."""
UNUSED_BITS: Final = 12
NO_TOKEN: Final = -1
"""Token of a row whose largest score is not finite: it is NaN, or no token may be drawn."""


class Draws(NamedTuple):
    """Sampling parameters of each row of scores, ``[rows]`` each, on the scores' device; a replayed graph reads them.

    Args:
        temperatures: float32; 0: the largest score is taken, the first of equal ones.
        least: float32, the smallest score that may be drawn; -inf: all scores.
        seeds, samples, positions: int64, on which the noise depends, besides the token.
    """

    temperatures: torch.Tensor
    least: torch.Tensor
    seeds: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor


class Filters(NamedTuple):
    """Filters of each row's scores, ``[rows]`` each, on the scores' device.

    Args:
        temperatures: float32; 0: no filters apply, since the largest score is taken.
        top_k: int64, number of largest scores that may be drawn, with those equal to the last; 0: all.
        top_p: float64, only the fewest largest scores whose probabilities, after top-k, sum to at least this; 1: all.
        min_p: float32, the least probability, as a fraction of the largest one; 0: any.
    """

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
