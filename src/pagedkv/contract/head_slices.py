"""Which slice of which block goes where, between engines whose heads lie on different numbers of ranks.

Blocks of the same tokens have the same id on all ranks of an engine; each rank stores its own heads of them. A block
that goes from an engine of one size to an engine of another is cut along its heads::

    8 heads, 2 ranks -> 4 ranks    rank 0: heads 0..3        rank 0: 0 1 | rank 1: 2 3
                                   rank 1: heads 4..7        rank 2: 4 5 | rank 3: 6 7
    2 heads, 4 ranks (repeated)    ranks 0 and 1 have head 0, ranks 2 and 3 head 1

A repeated head is read from the first rank that has it. What has no heads, such as the latents of MLA, lies whole on
every rank, and is read from one, by turns. The arithmetic is that of vLLM's connectors (0.33, ``tp_mapping``); there a
decoder with fewer ranks drops the copies of repeated heads, as here.

Pure functions of numbers: nothing here depends on processes or storage.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Consecutive heads of a model: ``first`` to ``first + count``, without the last."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Heads that one rank of the target gets from one rank of the source.

    Args:
        source_rank: the rank that has them.
        source_head: the first of them, among the heads of that rank.
        target_head: the first of them, among the heads of the target's rank.
        count: how many they are.
    """

    source_rank: int
    source_head: int
    target_head: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of one rank as bytes, its dimensions from the outermost: planes, tokens, heads, bytes of a head.

    Args:
        num_planes: layers times two, for keys and values.
        block_size: tokens.
        head_nbytes: bytes of one head of one token.
    """

    num_planes: int
    block_size: int
    head_nbytes: int

    def nbytes(self, num_heads: int) -> int:
        """Return the bytes of a block with so many heads."""
        return self.num_planes * self.block_size * num_heads * self.head_nbytes


@dataclass(frozen=True, slots=True)
class CopiedBytes:
    """Consecutive bytes of a block: from an offset in the source's block to an offset in the target's."""

    source_rank: int
    source: int
    target: int
    nbytes: int


def heads_of_rank(num_heads: int, num_ranks: int, rank: int) -> HeadRange:
    """Return the heads that a rank stores.

    Raises:
        ConfigurationError: the heads cannot be shared out: neither number divides the other, or there is no such rank.
    """
    as_count(num_heads, "num_heads", least=1)
    as_count(num_ranks, "num_ranks", least=1)
    as_count(rank, "rank", most=num_ranks - 1)
    if num_heads % num_ranks == 0:
        count = num_heads // num_ranks
        return HeadRange(rank * count, count)
    if num_ranks % num_heads:
        raise ConfigurationError(
            f"{num_heads} heads cannot be shared out to {num_ranks} ranks: one number must divide the other"
        )
    return HeadRange(rank * num_heads // num_ranks, 1)


def head_slices(num_heads: int | None, num_sources: int, num_targets: int, target_rank: int) -> list[HeadSlice]:
    """Return which heads a rank gets from which ranks, in the order of its heads. O(heads of the rank).

    Args:
        num_heads: KV heads of the model; None: what is stored has no heads, and is whole on every rank.
        num_sources: ranks of the engine that has the blocks.
        num_targets: ranks of the engine that gets them.
        target_rank: the rank.

    Raises:
        ConfigurationError: as :func:`heads_of_rank`.
    """
    if num_heads is None:
        as_count(num_sources, "num_sources", least=1)
        as_count(target_rank, "target_rank", most=as_count(num_targets, "num_targets", least=1) - 1)
        return [HeadSlice(target_rank % num_sources, 0, 0, 1)]
    wanted = heads_of_rank(num_heads, num_targets, target_rank)
    slices: list[HeadSlice] = []
    head = wanted.first
    while head < wanted.first + wanted.count:
        source = head * num_sources // num_heads  # the first rank that has it
        stored = heads_of_rank(num_heads, num_sources, source)
        count = min(stored.first + stored.count, wanted.first + wanted.count) - head
        slices.append(HeadSlice(source, head - stored.first, head - wanted.first, count))
        head += count
    return slices


def byte_slices(
    shape: BlockShape, num_heads: int | None, num_sources: int, num_targets: int, target_rank: int
) -> Iterator[CopiedBytes]:
    """Yield the bytes of one block that a rank gets, by source and then by offset. Neighbouring runs are joined.

    Args:
        shape: of a block, the same on both sides but for the number of heads.
        num_heads, num_sources, num_targets, target_rank: as of :func:`head_slices`.

    Raises:
        ConfigurationError: as :func:`heads_of_rank`.
    """
    if num_heads is None:
        whole = head_slices(None, num_sources, num_targets, target_rank)[0]
        yield CopiedBytes(whole.source_rank, 0, 0, shape.nbytes(1))
        return
    target_width = heads_of_rank(num_heads, num_targets, target_rank).count
    for each in head_slices(num_heads, num_sources, num_targets, target_rank):
        source_width = heads_of_rank(num_heads, num_sources, each.source_rank).count
        if each.count == source_width == target_width:
            yield CopiedBytes(each.source_rank, 0, 0, shape.nbytes(each.count))
            continue
        for token in range(shape.num_planes * shape.block_size):
            yield CopiedBytes(
                each.source_rank,
                (token * source_width + each.source_head) * shape.head_nbytes,
                (token * target_width + each.target_head) * shape.head_nbytes,
                each.count * shape.head_nbytes,
            )
