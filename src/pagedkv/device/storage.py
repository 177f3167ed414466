"""KVStorage: the memory of blocks, and its views for attention and recurrent layers.

Each pool has one :class:`~pagedkv.device.memory.PoolMemory`. Groups that share a pool view the same bytes,
each in its own shape. The storage owns memory and scales. The core decides on the content of blocks, and
:mod:`pagedkv.device.executor` executes its plans.

Stale memory: the former content of a block may be NaN or infinite, and zero times NaN is NaN in a masked product. So
blocks are zeroed when a plan allocates them (``StepPlan.new_blocks``), and the null block is zero from the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, assert_never, final

import torch

from pagedkv.contract.arguments import as_count, require_instance
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import GroupSpec
from pagedkv.device.memory import PoolMemory, run_of
from pagedkv.device.shapes import (
    FP8_TYPES,
    GroupShape,
    KeyValueShape,
    LatentShape,
    PageNumbers,
    Part,
    Pieces,
    StateShape,
    block_nbytes_of,
    number_pages,
    pair_groups,
)
from pagedkv.device.tensors import as_device
from pagedkv.errors import ConfigurationError, StorageError

NOTHING: Final[Mapping[str, torch.Tensor]] = MappingProxyType({})
NOWHERE: Final[Mapping[str, Int32Array]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class KernelPages:
    """Keys and values of a layer in a kernel's own block size; see :mod:`pagedkv.device.shapes`.

    Args:
        keys: ``[extent, page_size, heads, key_dim]``, a view.
        values: ``[extent, page_size, heads, value_dim]``, a view.
        numbers: the numbering of pages along the first axis.
    """

    keys: torch.Tensor
    values: torch.Tensor
    numbers: PageNumbers


class MemoryUser(Protocol):
    """A copy or a step that uses the memory until it has ended."""

    def is_done(self) -> bool:
        """Return whether it has ended."""


@final
class KVStorage:
    """Device and host memory of all pools of a space.

    Args:
        config: the space's configuration: groups, pools, numbers of blocks.
        shapes: the shape of each group's blocks, in the order of the groups.
        device: the device of the blocks.
        host_memory: the caller's memory for the host blocks of some pools, for example memory shared with other
            processes or bound to a socket: uint8 ``[num_host_blocks * block_nbytes]``, pinned if the device is a GPU.
        absent: for pools that change their size, by name, the blocks without memory at first, int32 ``[n]``, in whole
            runs (:func:`runs_of_pools`), as :meth:`BlockSpace.shrink <pagedkv.BlockSpace.shrink>` returned them. Other
            pools keep their size.

    Attributes:
        pools: the memory of each pool, by name.
        device: its device.
        is_awake: whether device memory is mapped.

    Raises:
        ConfigurationError: shapes that do not fit the groups, groups in one pool whose blocks differ in bytes or in
            pieces, host memory of an unknown pool, or not enough memory.
        TensorError: host memory of another type or size, or that is not pinned.
        DeviceUnavailableError: there is no such device.

    Cost: one allocation for each pool and side; only the null blocks are initialised.
    """

    def __init__(
        self,
        config: SpaceConfig,
        shapes: Sequence[GroupShape],
        device: "torch.device | str" = "cpu",
        *,
        host_memory: Mapping[str, torch.Tensor] = NOTHING,
        absent: Mapping[str, Int32Array] = NOWHERE,
    ) -> None:
        require_instance(config, SpaceConfig, "config")
        require_instance(host_memory, Mapping, "host_memory")
        require_instance(absent, Mapping, "absent")
        for what, by_pool in (("host_memory", host_memory), ("absent", absent)):
            unknown = sorted(set(by_pool) - set(config.pool_names), key=repr)
            if unknown:
                raise ConfigurationError(f"{what} names pools {unknown}, but the pools are {list(config.pool_names)}")
        self.config = config
        self.device = as_device(device)
        block_nbytes = block_nbytes_of(config.groups, shapes)
        self.shapes = tuple(shapes)
        num_blocks, num_host_blocks = config.blocks_by_pool(), config.host_blocks_by_pool()
        pieces: dict[str, Pieces] = {}
        for index, (group, shape) in enumerate(pair_groups(config.groups, shapes)):
            mine = shape.pieces(num_blocks[group.pool], group.block_size)
            if pieces.setdefault(group.pool, mine) != mine:
                raise ConfigurationError(
                    f"group {index} has another layout of blocks than earlier groups of pool {group.pool!r}: use "
                    "block-major layouts, or give the group a pool of its own"
                )
        self.pools: Mapping[str, PoolMemory] = MappingProxyType(
            {
                name: PoolMemory(
                    name,
                    num_blocks=num_blocks[name],
                    num_host_blocks=num_host_blocks[name],
                    block_nbytes=block_nbytes[name],
                    pieces=pieces[name],
                    device=self.device,
                    host_bytes=host_memory.get(name),
                    absent=absent.get(name),
                )
                for name in config.pool_names
            }
        )
        self._scales = {
            index: torch.ones(shape.num_layers, *_scales_of_layer(shape), device=self.device)
            for index, shape in enumerate(self.shapes)
            if not isinstance(shape, StateShape) and shape.dtype in FP8_TYPES
        }
        self._users: list[MemoryUser] = []
        self.is_awake = True

    # Views

    @property
    def device_nbytes(self) -> int:
        """Bytes of all pools on the device, while awake."""
        return sum(pool.device_nbytes for pool in self.pools.values())

    def pool_of(self, group: int) -> PoolMemory:
        """The pool memory of a group's blocks. Raises ConfigurationError for an unknown group."""
        return self.pools[self._group(group)[0].pool]

    def keys(self, group: int, layer: int) -> torch.Tensor:
        """View the keys of a layer: ``[num_blocks, block_size, heads, key_dim]``.

        Transposed to ``[num_blocks, heads, block_size, key_dim]``, it has the layout called HND by kernels.

        Args:
            layer: index among the group's layers.

        Raises:
            ConfigurationError: no such group or layer, or the group has no keys.
        """
        return self._tokens(group, layer, 0)

    def values(self, group: int, layer: int) -> torch.Tensor:
        """View the values of a layer: ``[num_blocks, block_size, heads, value_dim]``. Raises as :meth:`keys`."""
        return self._tokens(group, layer, 1)

    def keys_and_values(self, group: int, layer: int) -> torch.Tensor:
        """View both as FlashInfer takes them: ``[num_blocks, 2, block_size, heads, dim]``.

        Raises:
            ConfigurationError: as :meth:`keys`, or keys and values have different dimensions.
        """
        keys, values = self.keys(group, layer), self.values(group, layer)
        if keys.shape != values.shape:
            raise ConfigurationError(
                f"keys {list(keys.shape)} and values {list(values.shape)} cannot be viewed as one tensor"
            )
        apart = values.storage_offset() - keys.storage_offset()
        return keys.as_strided(
            (keys.shape[0], 2, *keys.shape[1:]), (keys.stride(0), apart, *keys.stride()[1:]), keys.storage_offset()
        )

    def latents(self, group: int, layer: int) -> torch.Tensor:
        """View the latents of a layer: ``[num_blocks, block_size / ratio, dim]``. Raises ConfigurationError."""
        spec, shape = self._group(group)
        if not isinstance(shape, LatentShape):
            raise ConfigurationError(f"group {group} has no latents: it is a {type(shape).__name__}")
        _require_layer(shape, layer)
        pool = self.pools[spec.pool]
        (part,) = shape.placement(pool.num_blocks, spec.block_size).parts
        sizes = {"B": pool.num_blocks, "N": spec.block_size // shape.ratio, "C": shape.dim}
        return _view(pool, shape.dtype, part, sizes, layer)

    def companion(self, group: int, name: str, layer: int) -> torch.Tensor:
        """View a companion of a group's blocks: ``[num_blocks, block_size / ratio, dim]``.

        Args:
            name: the companion's name; layer: index among its layers.

        Raises:
            ConfigurationError: no such group, companion or layer.
        """
        spec, shape = self._group(group)
        companions = () if isinstance(shape, StateShape) else shape.companions
        names = [each.name for each in companions]
        if not isinstance(name, str) or name not in names:
            raise ConfigurationError(f"group {group} has the companions {names}, and no {name!r}")
        assert not isinstance(shape, StateShape)
        index = names.index(name)
        found, begin = companions[index], shape.companion_offsets(spec.block_size)[index]
        as_count(layer, f"layer of companion {name!r}", most=found.num_layers - 1)
        pool, size, num_entries = self.pools[spec.pool], found.dtype.itemsize, spec.block_size // found.ratio
        sizes = (pool.num_blocks, num_entries, found.dim)
        offset = begin // size + layer * num_entries * found.dim
        return pool.device_bytes.view(found.dtype).as_strided(sizes, (pool.block_nbytes // size, found.dim, 1), offset)

    def states(self, group: int, layer: int) -> Mapping[str, torch.Tensor]:
        """View each tensor of a recurrent layer's states: ``[num_blocks, *shape]``, by name.

        Raises:
            ConfigurationError: no such group or layer, or the group keeps no state.
        """
        views = self.states_of_layers(group)
        _require_layer(self.shapes[group], layer)
        return MappingProxyType({name: states[:, layer] for name, states in views.items()})

    def states_of_layers(self, group: int) -> Mapping[str, torch.Tensor]:
        """View tensors of the states of all layers: ``[num_blocks, layers, *shape]``, by name; as :meth:`states`."""
        spec, shape = self._group(group)
        if not isinstance(shape, StateShape):
            raise ConfigurationError(f"group {group} has no states: it is a {type(shape).__name__}")
        pool, offsets = self.pools[spec.pool], shape.offsets()
        views = {}
        for tensor in shape.tensors:
            itemsize = tensor.dtype.itemsize
            typed = pool.device_bytes.view(tensor.dtype)
            inner = torch.empty(tensor.shape, device="meta").stride()
            strides = (pool.block_nbytes // itemsize, tensor.nbytes // itemsize, *inner)
            sizes = (pool.num_blocks, shape.num_layers, *tensor.shape)
            views[tensor.name] = typed.as_strided(sizes, strides, offsets[tensor.name] // itemsize)
        return MappingProxyType(views)

    def pages(self, group: int, layer: int, page_size: int) -> KernelPages:
        """View a layer in a kernel's block size, if that divides the manager's.

        Raises:
            ConfigurationError: as :meth:`keys`; or the block size is not a multiple of ``page_size``, or pages of keys
                and values would be numbered differently.
        """
        spec, _ = self._group(group)
        size = as_count(page_size, "page_size", least=1)
        views, numbers = [], []
        for tensor in (self.keys(group, layer), self.values(group, layer)):
            mine = number_pages(spec.block_size, size, tensor.stride(0), tensor.stride(1))
            extent = mine.extent(tensor.shape[0])
            shape = (extent, size, *tensor.shape[2:])
            views.append(tensor.as_strided(shape, (mine.stride, *tensor.stride()[1:]), tensor.storage_offset()))
            numbers.append((mine.block_step, mine.part_step))
        if numbers[0] != numbers[1]:
            raise ConfigurationError(
                f"pages of {size} tokens have the steps {numbers[0]} among keys and {numbers[1]} among values, so one "
                "table cannot refer to both: use pages as long as blocks"
            )
        return KernelPages(views[0], views[1], mine)

    def scales(self, group: int) -> torch.Tensor:
        """Return the scales of an eight-bit group, to be read and written: float32 ``[layers, 2, heads or 1]``.

        The value divided by its scale is stored. Index 0 is for keys, 1 for values; latents have ``[layers, 1, 1]``.
        Scales are 1 until they are set, and :meth:`sleep` keeps them.

        Raises:
            ConfigurationError: the group is not stored in eight bits.
        """
        self._group(group)
        if group not in self._scales:
            raise ConfigurationError(f"group {group} has no scales: it is not stored in eight bits")
        return self._scales[group]

    # The size of pools

    def release(self, pool: str, block_ids: Int32Array) -> None:
        """Release the memory of blocks that became absent, after waiting for the device. Addresses stay reserved.

        Args:
            pool: name of a pool that changes its size.
            block_ids: int32 ``[n]``, whole runs, what :meth:`BlockSpace.shrink <pagedkv.BlockSpace.shrink>` returned.

        Raises:
            ConfigurationError: no such pool, one that keeps its size, or no whole runs; nothing is changed.
            StorageError: copies or steps are in flight, or the storage is asleep; nothing is changed.
        """
        self._require_unused("made smaller")
        self._resizable(pool).release(block_ids)

    def take(self, pool: str, block_ids: Int32Array) -> None:
        """Map the memory of absent blocks, with undefined content, before a plan uses them.

        Args:
            pool, block_ids: as for :meth:`release`, what :meth:`BlockSpace.grow <pagedkv.BlockSpace.grow>` returned.

        Raises:
            ConfigurationError: as :meth:`release`, or there is not enough memory now: shrink the pool of the space by
                as many, which takes the same blocks.
            StorageError: the storage is asleep.
        """
        self._resizable(pool).take(block_ids)

    def _resizable(self, pool: str) -> PoolMemory:
        known = self.pools.get(pool)
        if known is None or not known.run:
            raise ConfigurationError(f"{pool!r} is no pool that changes its size: give the storage its absent blocks")
        self.require_awake()
        return known

    # Sleeping

    def sleep(self) -> None:
        """Release the device's memory; the host pool stays. Call ``invalidate_memory()`` of the space as well.

        Views, and CUDA graphs that use them, are valid again after :meth:`wake`, at the same addresses. Waits for the
        device.

        Raises:
            StorageError: copies are in flight, or the storage is already asleep.
        """
        self._require_unused("put to sleep")
        if not self.is_awake:
            raise StorageError("the storage is already asleep")
        self.is_awake = False
        for pool in self.pools.values():
            pool.sleep()

    def wake(self) -> None:
        """Map the memory again, with undefined content.

        Raises:
            StorageError: it is awake.
            ConfigurationError: there is not enough memory now; the storage stays asleep.
        """
        if self.is_awake:
            raise StorageError("the storage is awake")
        woken = []
        try:
            for pool in self.pools.values():
                pool.wake()
                woken.append(pool)
        except ConfigurationError:
            for pool in woken:
                pool.sleep()
            raise
        self.is_awake = True

    def close(self) -> None:
        """Release device and host memory for good; the host pool is no longer pinned. Raises StorageError."""
        self._require_unused("closed")
        self.is_awake = False
        for pool in self.pools.values():
            pool.close()

    def require_awake(self) -> None:
        """Raise StorageError if device memory is released."""
        if not self.is_awake:
            raise StorageError("the storage is asleep: wake it before it is used")

    def began(self, user: MemoryUser) -> None:
        """Record a copy or a step, so that its memory is not released before it ends.

        Raises ConfigurationError for an object without ``is_done()``.
        """
        if not callable(getattr(user, "is_done", None)):
            raise ConfigurationError(f"a copy or a step must have a method is_done(), got {user!r}")
        self._users = [other for other in self._users if not other.is_done()]
        if not user.is_done():
            self._users.append(user)

    @property
    def num_users(self) -> int:
        """Copies and steps that are in flight. O(users)."""
        self._users = [user for user in self._users if not user.is_done()]
        return len(self._users)

    def _require_unused(self, what: str) -> None:
        if num_users := self.num_users:
            raise StorageError(
                f"the storage cannot be {what}: {num_users} copies or steps are in flight, the first is "
                f"{self._users[0]}; wait for them first"
            )

    # Inside

    def _group(self, group: int) -> tuple[GroupSpec, GroupShape]:
        index = as_count(group, "group", most=len(self.shapes) - 1)
        return self.config.groups[index], self.shapes[index]

    def _tokens(self, group: int, layer: int, part: int) -> torch.Tensor:
        spec, shape = self._group(group)
        if not isinstance(shape, KeyValueShape):
            raise ConfigurationError(f"group {group} has no keys and values: it is a {type(shape).__name__}")
        _require_layer(shape, layer)
        pool = self.pools[spec.pool]
        place = shape.placement(pool.num_blocks, spec.block_size).parts[part]
        sizes = {"B": pool.num_blocks, "N": spec.block_size, "H": shape.num_heads, "C": shape.dims[part]}
        return _view(pool, shape.dtype, place, sizes, layer)


def runs_of_pools(
    config: SpaceConfig, shapes: Sequence[GroupShape], device: "torch.device | str" = "cpu"
) -> dict[str, int]:
    """Return by pool how many blocks a piece of memory has that a pool can give back by itself.

    Raises:
        ConfigurationError: shapes that do not fit the groups, or whose blocks have several pieces.
        DeviceUnavailableError: there is no such device, or its driver cannot reserve addresses.
    """
    where, nbytes, num_blocks = as_device(device), block_nbytes_of(config.groups, shapes), config.blocks_by_pool()
    return {
        group.pool: run_of(nbytes[group.pool], shape.pieces(num_blocks[group.pool], group.block_size), where)
        for group, shape in pair_groups(config.groups, shapes)
    }


def _scales_of_layer(shape: KeyValueShape | LatentShape) -> tuple[int, int]:
    match shape:
        case LatentShape():
            return 1, 1
        case KeyValueShape():
            return 2, shape.num_heads if shape.scaling == "head" else 1
        case _:
            assert_never(shape)


def _require_layer(shape: GroupShape, layer: int) -> None:
    as_count(layer, "layer of the group", most=shape.num_layers - 1)


def _view(pool: PoolMemory, dtype: torch.dtype, part: Part, sizes: Mapping[str, int], layer: int) -> torch.Tensor:
    strides = [part.strides[axis] for axis in sizes]
    offset = part.offset + layer * part.strides["L"]
    return pool.device_bytes.view(dtype).as_strided(list(sizes.values()), strides, offset)
