"""The content of a block, its layout and bytes, how many blocks fit, and the pages of kernels with smaller blocks.

A pool's layout is given in the field's letters and turned into offsets and strides. It names its axes from the
outermost to the innermost::

    B  blocks of the pool     L  layers of the group    K  keys, then values
    N  tokens of a block      H  heads                  C  content: one head's dimensions

    BLKNHC   [num_blocks, layers, 2, block_size, heads, dim]: block-major, the default; a block is contiguous
    BLHNC    block-major, key and value of a token and head adjacent: K is left out, which means before C
    LBKNHC   layer-major: a block has one contiguous piece for each layer
    BLNC     latents: without heads, and without separate values

If keys and values have different dimensions, all axes inside K have a size for each.

*Companions* are bytes of the same blocks and tokens: keys of an indexer, scales, sidecars of any kind. They lie behind
the keys of each block of a block-major pool, so what moves a block moves them, and what names it means them too::

    block      | layer 0: keys, values | layer 1 ... || companion: layer 0 [block_size, dim] | layer 1 ... || another |

Compressed latents, and companions, may have one entry for several tokens, their ratio: a block of 128 tokens then has
32 entries of 4 tokens each.

A group's block contains keys and values, compressed latents, or a recurrent state. Its shape describes one shard, so
its heads are those on this device. Its bytes equal those of :mod:`pagedkv.models`: without padding, so that a device
uses exactly the memory that a replay counts.

*Pages* are the blocks of an attention kernel whose block size divides the manager's. A kernel needs ``keys[page]`` to
be ``page_size`` consecutive tokens, and the address of a page to be its number times one stride. In a block-major pool
the next part of a block is one stride away, but the next block is many strides away::

    block 0                                  block 1
    | layer 0            | layer 1         | | layer 0 ...
    | page 0 | page 1    | ...               | page 6 | page 7       here 2 pages per block, and 6 strides from block
                                                                     to block

So a page's number is ``block * block_step + part * part_step``, and the numbers in between belong to other layers. The
kernel gets a tensor with a first extent larger than the number of its pages; all of them view the same memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import gcd, prod
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

import torch

from pagedkv.contract.arguments import as_count, as_number
from pagedkv.contract.space_config import blocks_that_fit
from pagedkv.contract.spec import GroupSpec, keeps_state
from pagedkv.device.tensors import as_device
from pagedkv.errors import ConfigurationError, DeviceUnavailableError

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


def place(layout: str, sizes: Mapping[str, int], dims: tuple[int, ...], behind: int = 0) -> Placement:
    """Compute the placement of a group.

    Args:
        layout: as :func:`parse_layout` returns it.
        sizes: extent of every axis except C and K.
        dims: extent of C for each part: for keys and values, or for latents alone.
        behind: elements behind the parts of each block; only in block-major layouts.
    """
    extents, offsets = [1] * len(dims), [0] * len(dims)
    strides: list[dict[str, int]] = [{} for _ in dims]
    for letter in reversed(layout):
        if letter == BLOCKS:
            extents = [extent + behind for extent in extents]
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


FP8_TYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16, *FP8_TYPES)


def _require_dtype(dtype: torch.dtype, what: str) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in STORED_TYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in STORED_TYPES)
        raise ConfigurationError(f"{what} are stored as {names}, not as {dtype}")


@dataclass(frozen=True, slots=True)
class Companion:
    """What blocks hold of each token beside keys, values or latents; see :mod:`pagedkv.device.shapes`.

    Args:
        name: one of its own in a group.
        num_layers: layers that have it, which may be fewer than the group's.
        dim: elements of a token in a layer.
        dtype: of these elements; ``torch.uint8`` for bytes without a type.
        ratio: tokens for which there is one entry of ``dim`` elements.
    """

    name: str
    num_layers: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    ratio: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.dtype, torch.dtype):
            raise ConfigurationError(f"a companion has a name and a type, got {self.name!r} and {self.dtype!r}")
        for name in ("num_layers", "dim", "ratio"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, least=1))

    @property
    def entry_nbytes(self) -> int:
        """Bytes of an entry, in all layers."""
        return self.num_layers * self.dim * self.dtype.itemsize


def _require_companions(given: object, layout: str) -> None:
    if not isinstance(given, tuple) or not all(isinstance(each, Companion) for each in given):
        raise ConfigurationError(f"companions must be a tuple of Companion values, got {given!r}")
    names = [each.name for each in given]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"companions of a group have different names, got {names}")
    if given and not layout.startswith(BLOCKS):
        raise ConfigurationError(
            f"layout {layout!r} has blocks of several pieces: companions need one that begins with B"
        )


def _num_entries(size: int, ratio: int) -> int:
    """Return the entries of a block of ``size`` tokens. Raises ConfigurationError if the last one would be a part."""
    if size % ratio:
        raise ConfigurationError(f"a block of {size} tokens has no whole number of entries of {ratio} tokens each")
    return size // ratio


def _companion_offsets(own_nbytes: int, dtype: torch.dtype, companions: Sequence[Companion], size: int) -> list[int]:
    """Return where each companion begins in a block of ``size`` tokens, and where the block ends, in bytes.

    Raises ConfigurationError where elements would lie across their own width: there is no padding.
    """
    offsets = [own_nbytes]
    for each in companions:
        offsets.append(offsets[-1] + _num_entries(size, each.ratio) * each.entry_nbytes)
    widths = [*(each.dtype.itemsize for each in companions), dtype.itemsize]
    for offset, width in zip(offsets, widths, strict=True):
        if offset % width or offsets[-1] % width:
            raise ConfigurationError(
                f"companions of blocks of {size} tokens begin at {offsets[:-1]} of {offsets[-1]} bytes, which must be "
                f"multiples of an element's bytes ({width}): name companions with wider types first, or use another "
                "block size"
            )
    return offsets


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """Keys and values of layers with attention.

    Args:
        num_layers: layers that store keys; layers that share an earlier layer's keys are not counted.
        num_heads: heads of keys and values, on this device.
        key_dim: dimensions of a head's key.
        value_dim: dimensions of a head's value; None: as for keys.
        dtype: the stored type. With eight bits, a value divided by its scale is stored.
        scaling: with eight bits: "tensor": one scale per layer for keys and one for values; "head": one for each head.
        layout: the axes of the pool, see :mod:`pagedkv.device.shapes`.
        companions: what blocks hold beside, in this order.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    scaling: Literal["tensor", "head"] = "tensor"
    layout: str = "BLKNHC"
    companions: tuple[Companion, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.key_dim)
        for name in ("num_layers", "num_heads", "key_dim", "value_dim"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, least=1))
        if not isinstance(self.scaling, str) or self.scaling not in {"tensor", "head"}:
            raise ConfigurationError(f"scaling must be 'tensor' or 'head', got {self.scaling!r}")
        _require_dtype(self.dtype, "keys and values")
        object.__setattr__(self, "layout", parse_layout(self.layout, "BLKNHC"))
        _require_companions(self.companions, self.layout)

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions of a head's key and value."""
        return self.key_dim, self.value_dim or self.key_dim

    def companion_offsets(self, block_size: int) -> list[int]:
        """Return where each companion begins in a block, and the block's end, in bytes. Raises ConfigurationError."""
        own = self.num_layers * block_size * self.num_heads * sum(self.dims) * self.dtype.itemsize
        return _companion_offsets(own, self.dtype, self.companions, block_size)

    def block_nbytes(self, block_size: int) -> int:
        """Bytes of a block of this many tokens."""
        return self.companion_offsets(block_size)[-1]

    def placement(self, num_blocks: int, block_size: int) -> Placement:
        """Return the layout of a pool, in elements."""
        sizes = {"B": num_blocks, "L": self.num_layers, "N": block_size, "H": self.num_heads}
        begins = self.companion_offsets(block_size)
        return place(self.layout, sizes, self.dims, (begins[-1] - begins[0]) // self.dtype.itemsize)

    def pieces(self, num_blocks: int, block_size: int) -> Pieces:
        """Return the pieces of a block, in bytes."""
        return self.placement(num_blocks, block_size).pieces.times(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Compressed latents (MLA): one vector for each token and layer, for all heads, as key and as value.

    Args:
        num_layers: layers that store latents.
        dim: dimensions of the vector, its rotary part included.
        dtype: the stored type.
        layout: the axes of the pool.
        companions: what blocks hold beside, in this order.
        ratio: tokens for which there is one vector (DeepSeek-V4, 2026).
    """

    num_layers: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "BLNC"
    companions: tuple[Companion, ...] = field(default=(), repr=False)
    ratio: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "dim", "ratio"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, least=1))
        _require_dtype(self.dtype, "latents")
        object.__setattr__(self, "layout", parse_layout(self.layout, "BLNC"))
        _require_companions(self.companions, self.layout)

    def companion_offsets(self, block_size: int) -> list[int]:
        """Return where each companion begins in a block, and the block's end, in bytes. Raises ConfigurationError."""
        own = self.num_layers * _num_entries(block_size, self.ratio) * self.dim * self.dtype.itemsize
        return _companion_offsets(own, self.dtype, self.companions, block_size)

    def block_nbytes(self, block_size: int) -> int:
        """Bytes of a block of this many tokens."""
        return self.companion_offsets(block_size)[-1]

    def placement(self, num_blocks: int, block_size: int) -> Placement:
        """Return the layout of a pool, in elements."""
        sizes = {"B": num_blocks, "L": self.num_layers, "N": block_size // self.ratio}
        begins = self.companion_offsets(block_size)
        return place(self.layout, sizes, (self.dim,), (begins[-1] - begins[0]) // self.dtype.itemsize)

    def pieces(self, num_blocks: int, block_size: int) -> Pieces:
        """Return the pieces of a block, in bytes."""
        return self.placement(num_blocks, block_size).pieces.times(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state: the state of the scan, or the last inputs of a short convolution."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.dtype, torch.dtype):
            raise ConfigurationError(f"a state tensor has a name and a type, got {self.name!r} and {self.dtype!r}")
        if not isinstance(self.shape, tuple):
            raise ConfigurationError(f"the shape of state tensor {self.name!r} must be a tuple, got {self.shape!r}")
        for extent in self.shape:
            as_count(extent, f"extent of state tensor {self.name!r}", least=1)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in one layer."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateShape:
    """Recurrent state: a block stores every tensor of every layer, of one sequence at one position.

    Args:
        num_layers: recurrent layers.
        tensors: the tensors of one layer. In a block each tensor has all layers together, the widest type first.
    """

    num_layers: int
    tensors: tuple[StateTensor, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", as_count(self.num_layers, "num_layers", least=1))
        is_known = isinstance(self.tensors, tuple) and all(isinstance(each, StateTensor) for each in self.tensors)
        if not is_known:
            raise ConfigurationError(f"tensors must be a tuple of StateTensor values, got {self.tensors!r}")
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) < len(names):
            raise ConfigurationError(f"a state has tensors with different names, got {names}")
        widest = max(tensor.dtype.itemsize for tensor in self.tensors)
        if self.block_nbytes() % widest:
            raise ConfigurationError(
                f"a state has {self.block_nbytes():,} bytes, which must be a multiple of its widest type's {widest}"
            )

    def block_nbytes(self, _: int = 1) -> int:
        """Bytes of a state, for any checkpoint interval."""
        return self.num_layers * sum(tensor.nbytes for tensor in self.tensors)

    def offsets(self) -> Mapping[str, int]:
        """Return where each tensor's first layer begins in a block, in bytes."""
        offsets, end = {}, 0
        for tensor in sorted(self.tensors, key=lambda tensor: -tensor.dtype.itemsize):
            offsets[tensor.name] = end
            end += self.num_layers * tensor.nbytes
        return MappingProxyType(offsets)

    def pieces(self, _: int, __: int) -> Pieces:
        """Return the pieces of a block, in bytes: one."""
        nbytes = self.block_nbytes()
        return Pieces((0,), (nbytes,), (nbytes,))


GroupShape: TypeAlias = KeyValueShape | LatentShape | StateShape
MOST_NBYTES: Final = 2**63 - 1


def pair_groups(groups: Sequence[GroupSpec], shapes: Sequence[GroupShape]) -> tuple[tuple[GroupSpec, GroupShape], ...]:
    """Pair each group with its shape.

    Raises:
        ConfigurationError: not as many shapes as groups, or a state's shape for tokens, or the other way round.
    """
    for what, given, kinds in (("groups", groups, get_args(GroupSpec)), ("shapes", shapes, get_args(GroupShape))):
        if not isinstance(given, Sequence) or not all(isinstance(each, kinds) for each in given):
            raise ConfigurationError(f"{what} must be a sequence of pagedkv's {what}, got {given!r}")
    if len(groups) != len(shapes):
        raise ConfigurationError(f"{len(groups)} groups need as many shapes, got {len(shapes)}")
    for index, (group, shape) in enumerate(zip(groups, shapes, strict=True)):
        if keeps_state(group) != isinstance(shape, StateShape):
            raise ConfigurationError(f"group {index} is {group!r}, but its shape is a {type(shape).__name__}")
    return tuple(zip(groups, shapes, strict=True))


def block_nbytes_of(groups: Sequence[GroupSpec], shapes: Sequence[GroupShape]) -> dict[str, int]:
    """Return the bytes of a block of each pool.

    Raises:
        ConfigurationError: groups that share a pool, with blocks of different bytes.
    """
    nbytes: dict[str, int] = {}
    for index, (group, shape) in enumerate(pair_groups(groups, shapes)):
        mine = shape.block_nbytes(group.block_size)
        if nbytes.setdefault(group.pool, mine) != mine:
            raise ConfigurationError(
                f"a block of group {index} has {mine:,} bytes, but pool {group.pool!r} has blocks of "
                f"{nbytes[group.pool]:,}: give the group a pool of its own, or another block size"
            )
    return nbytes


def free_nbytes(device: "torch.device | str", fraction: float = 0.9) -> int:
    """Return a fraction of a GPU's memory that is free now. Call it after the model was loaded and run once.

    Raises:
        ConfigurationError: the fraction is not in (0, 1].
        DeviceUnavailableError: there is no such GPU, or the device is a CPU, for which free memory is not meaningful.
    """
    if not 0 < as_number(fraction, "the fraction of free memory") <= 1:
        raise ConfigurationError(f"the fraction of free memory must be in (0, 1], got {fraction!r}")
    where = as_device(device)
    if where.type != "cuda":
        raise DeviceUnavailableError("free memory is measured on a GPU alone: for a CPU, give the number of bytes")
    free, _ = torch.cuda.mem_get_info(where)
    return int(free * fraction)


def num_blocks_that_fit(
    groups: Sequence[GroupSpec], shapes: Sequence[GroupShape], nbytes: int, *, mean_tokens: float, step_tokens: int
) -> dict[str, int]:
    """Split bytes among the pools, as ``pagedkv replay --model`` does.

    Args:
        groups: the groups, each in a pool of its own, as from :mod:`pagedkv.models`.
        shapes: the shapes of their blocks.
        nbytes: bytes of all pools together, as from :func:`free_nbytes`.
        mean_tokens: mean tokens of a request, prompt and output.
        step_tokens: most tokens that a step computes, or that are admitted at once.

    Returns:
        blocks of each pool, the null block included: ``SpaceConfig.num_blocks``.

    Raises:
        ConfigurationError: a pool would have no block besides the null block, two groups share a pool, or the shapes
            do not fit the groups.
    """
    block_nbytes = block_nbytes_of(groups, shapes)
    if len(block_nbytes) < len(groups):
        raise ConfigurationError(
            f"{len(groups)} groups share {len(block_nbytes)} pools, so the blocks of each cannot be computed: give "
            "each group a pool of its own, or give the numbers of blocks"
        )
    all_nbytes, most_new = as_count(nbytes, "nbytes", most=MOST_NBYTES), as_count(step_tokens, "step_tokens")
    mean = as_number(mean_tokens, "mean_tokens")
    if mean <= 0:
        raise ConfigurationError(f"mean_tokens must be positive, got {mean_tokens!r}")
    return blocks_that_fit(groups, block_nbytes, all_nbytes, mean, most_new)


@dataclass(frozen=True, slots=True)
class PageNumbers:
    """The numbering of pages.

    Args:
        page_size: tokens of a page.
        per_block: pages of a block.
        block_step: difference of the numbers of the first pages of consecutive blocks.
        part_step: difference of the numbers of consecutive pages of one block.
        stride: elements from page number n to n + 1.
    """

    page_size: int
    per_block: int
    block_step: int
    part_step: int
    stride: int

    def extent(self, num_blocks: int) -> int:
        """Return the last page's number plus 1."""
        return (num_blocks - 1) * self.block_step + (self.per_block - 1) * self.part_step + 1


def number_pages(block_size: int, page_size: int, block_stride: int, token_stride: int) -> PageNumbers:
    """Number the pages of one tensor.

    Args:
        block_size: tokens of a block.
        page_size: tokens of a page.
        block_stride, token_stride: elements from a block, and from a token, to the next one.

    Raises:
        ConfigurationError: the block size is not a multiple of the page size.
    """
    if page_size < 1 or block_size % page_size:
        raise ConfigurationError(f"blocks of {block_size} tokens cannot be divided into pages of {page_size}")
    per_block = block_size // page_size
    if per_block == 1:
        return PageNumbers(page_size, 1, 1, 1, block_stride)
    stride = gcd(block_stride, page_size * token_stride)
    return PageNumbers(page_size, per_block, block_stride // stride, page_size * token_stride // stride, stride)
