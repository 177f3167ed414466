"""Layouts of a pool in the field's letters, turned into offsets and strides.

A layout names its axes from the outermost to the innermost::

    B  blocks of the pool     L  layers of the group    K  keys, then values
    N  tokens of a block      H  heads                  C  content: one head's dimensions

    BLKNHC   [num_blocks, layers, 2, block_size, heads, dim]: block-major, the default; a block is contiguous
    BLHNC    block-major, key and value of a token and head adjacent: K is left out, which means before C
    LBKNHC   layer-major: a block has one contiguous piece for each layer
    BLNC     latents: without heads, and without separate values

If keys and values have different dimensions, all axes inside K have a size for each. This module uses no tensors: it
computes numbers of elements from sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from pagedkv.errors import ConfigurationError

__all__ = ["Part", "Pieces", "Placement", "parse_layout", "place"]

BLOCKS: Final = "B"
PARTS: Final = "K"
CONTENT: Final = "C"


@dataclass(frozen=True, slots=True)
class Part:
    """The location of the keys, or the values, of a group, in elements.

    Args:
        offset: offset of the first element.
        strides: stride of each axis, by its letter.
    """

    offset: int
    strides: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The contiguous pieces of memory that form one block.

    Args:
        offsets: offset of each piece of block 0.
        sizes: size of each piece.
        strides: distance from a block's piece to the next block's.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_block_major(self) -> bool:
        """Whether a block is one piece."""
        return len(self.offsets) == 1

    def times(self, factor: int) -> "Pieces":
        """Return the same in a unit that is ``factor`` times smaller: bytes instead of elements."""
        return Pieces(
            tuple(factor * offset for offset in self.offsets),
            tuple(factor * size for size in self.sizes),
            tuple(factor * stride for stride in self.strides),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A whole group in memory: its parts, and the pieces that form its blocks."""

    parts: tuple[Part, ...]
    pieces: Pieces


def parse_layout(layout: str, axes: str) -> str:
    """Check a layout's letters, and insert K if it is left out.

    Args:
        layout: the letters, outermost first.
        axes: the letters that it must have; K may be left out.

    Raises:
        ConfigurationError: a letter is unknown, missing or repeated, or K is inside C.
    """
    if not isinstance(layout, str):
        raise ConfigurationError(f"a layout names each of the axes {'/'.join(axes)} once, got {layout!r}")
    whole = layout if PARTS in layout or PARTS not in axes else layout.replace(CONTENT, PARTS + CONTENT)
    if sorted(whole) != sorted(axes):
        raise ConfigurationError(f"a layout names each of the axes {'/'.join(axes)} once, got {layout!r}")
    if PARTS in whole and whole.index(PARTS) > whole.index(CONTENT):
        raise ConfigurationError(f"layout {layout!r} has K inside the dimensions of a head: put K before C")
    return whole


def place(layout: str, sizes: Mapping[str, int], dims: tuple[int, ...]) -> Placement:
    """Compute the placement of a group.

    Args:
        layout: as :func:`parse_layout` returns it.
        sizes: extent of every axis except C and K.
        dims: extent of C for each part: for keys and values, or for latents alone.
    """
    extents, offsets = [1] * len(dims), [0] * len(dims)
    strides: list[dict[str, int]] = [{} for _ in dims]
    for letter in reversed(layout):
        if letter == PARTS:
            offsets = [sum(extents[:part]) for part in range(len(dims))]
            extents = [sum(extents)] * len(dims)
            continue
        for part, dim in enumerate(dims):
            strides[part][letter] = extents[part]
            extents[part] *= dim if letter == CONTENT else sizes[letter]
    parts = tuple(Part(offset, stride) for offset, stride in zip(offsets, strides, strict=True))
    return Placement(parts, _pieces(layout, sizes, parts))


def _pieces(layout: str, sizes: Mapping[str, int], parts: tuple[Part, ...]) -> Pieces:
    outside, inside = layout.split(BLOCKS)
    apart = parts if PARTS in outside else (Part(0, parts[0].strides),)
    axes = [letter for letter in outside if letter != PARTS]
    if CONTENT in axes or not inside:
        raise ConfigurationError(f"layout {layout!r} has B inside the dimensions of a head: put B before C")
    offsets, lengths = [], []
    for part in apart:
        for place_ in product(*(range(sizes[letter]) for letter in axes)):
            steps = zip(axes, place_, strict=True)
            offsets.append(part.offset + sum(part.strides[letter] * index for letter, index in steps))
            lengths.append(part.strides[BLOCKS])
    return Pieces(tuple(offsets), tuple(lengths), tuple(lengths))
