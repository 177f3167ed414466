"""A layer's keys, or values, for compiled loops: the pool's elements in one flat array, and strides.

The flat array is contiguous for every layout of the pool, and so are the elements of one key, so loops are vectorised.
Element c of head h of the token at offset t of block b is at ``base + b * block + t * token + h * head + c``.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pagedkv.contract.arrays import Int64Array
from pagedkv.device import KVStorage
from pagedkv.errors import ConfigurationError

__all__ = ["LayerMemory"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerMemory:
    """Location of a layer's keys or values.

    Args:
        blocks: the view of the storage, ``[num_blocks, block_size, heads, dim]``.
        strides: int64 ``[4]``, in elements: base, block, token, head.
        pool: the pool's bytes.
    """

    blocks: torch.Tensor
    strides: Int64Array
    pool: torch.Tensor

    @classmethod
    def of(cls, storage: KVStorage, group: int, blocks: torch.Tensor) -> "LayerMemory":
        """Describe a view of the storage. Raises ConfigurationError if the elements of a key are not contiguous."""
        if blocks.stride(3) != 1:
            raise ConfigurationError(
                f"group {group} is laid out with {blocks.stride(3)} elements between those of one key: put C last"
            )
        strides = np.array([blocks.storage_offset(), *blocks.stride()[:3]], np.int64)
        return cls(blocks, strides, storage.pool_of(group).device_bytes)

    def flat(self) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        """Return the pool's elements. Do not keep the result, since a storage's memory moves when it sleeps."""
        elements: np.ndarray[tuple[int], np.dtype[np.float32]] = self.pool.view(torch.float32).numpy()
        return elements
