"""The content of a group's block: keys and values, compressed latents, or a recurrent state; and its size in bytes.

A shape describes one shard, so its heads are those on this device. Its bytes equal those of
:mod:`pagedkv.models`: without padding, so that a device uses exactly the memory that a replay counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import torch

from pagedkv.contract.arguments import as_count
from pagedkv.device.layout import Pieces, Placement, parse_layout, place
from pagedkv.errors import ConfigurationError

__all__ = ["FP8_TYPES", "GroupShape", "KeyValueShape", "LatentShape", "StateShape", "StateTensor"]

FP8_TYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
STORED_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16, *FP8_TYPES)


def _require_dtype(dtype: torch.dtype, what: str) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in STORED_TYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in STORED_TYPES)
        raise ConfigurationError(f"{what} are stored as {names}, not as {dtype}")


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
        layout: the axes of the pool, see :mod:`pagedkv.device.layout`.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    scaling: Literal["tensor", "head"] = "tensor"
    layout: str = "BLKNHC"

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.key_dim)
        for name in ("num_layers", "num_heads", "key_dim", "value_dim"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, least=1))
        if not isinstance(self.scaling, str) or self.scaling not in {"tensor", "head"}:
            raise ConfigurationError(f"scaling must be 'tensor' or 'head', got {self.scaling!r}")
        _require_dtype(self.dtype, "keys and values")
        object.__setattr__(self, "layout", parse_layout(self.layout, "BLKNHC"))

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions of a head's key and value."""
        return self.key_dim, self.value_dim or self.key_dim

    def block_nbytes(self, block_size: int) -> int:
        """Bytes of a block of this many tokens."""
        return self.num_layers * block_size * self.num_heads * sum(self.dims) * self.dtype.itemsize

    def placement(self, num_blocks: int, block_size: int) -> Placement:
        """Return the layout of a pool, in elements."""
        sizes = {"B": num_blocks, "L": self.num_layers, "N": block_size, "H": self.num_heads}
        return place(self.layout, sizes, self.dims)

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
    """

    num_layers: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "BLNC"

    def __post_init__(self) -> None:
        for name in ("num_layers", "dim"):
            object.__setattr__(self, name, as_count(getattr(self, name), name, least=1))
        _require_dtype(self.dtype, "latents")
        object.__setattr__(self, "layout", parse_layout(self.layout, "BLNC"))

    def block_nbytes(self, block_size: int) -> int:
        """Bytes of a block of this many tokens."""
        return self.num_layers * block_size * self.dim * self.dtype.itemsize

    def placement(self, num_blocks: int, block_size: int) -> Placement:
        """Return the layout of a pool, in elements."""
        return place(self.layout, {"B": num_blocks, "L": self.num_layers, "N": block_size}, (self.dim,))

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
