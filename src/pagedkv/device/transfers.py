"""Transfers: copying, zeroing and swapping blocks, and writing a step's tokens to their slots.

Many copies between host and device are one call to the driver, executed by the copy engine. ``cuMemcpyBatchAsync``
(CUDA 12.8) takes arrays of addresses, so that blocks of 2 MiB are copied as fast as one long range. With one call for
each block the bus would be idle between the copies. Torch does not offer the call, so it is made directly to the
driver's library, which every working GPU has. With an older driver, each copy is a call of its own.

Copies on write and zeroing are kernels in the current stream. Swaps use the copy engine, in a stream of their own that
first waits for earlier work in the current stream; a :class:`CopyTicket` shows when they have ended. Blocks of a pool
that is not block-major are copied through a block-major buffer on the device, since the engine is slow with small
pieces.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contract.arguments import as_array, as_flag, require_instance
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.device.kernels.inputs import StateSide, TokenSide
from pagedkv.device.kernels.selection import KernelChoice, kernels_for
from pagedkv.device.memory import LIBRARY, Location, PoolMemory
from pagedkv.device.shapes import FP8_TYPES, Pieces
from pagedkv.device.storage import KVStorage
from pagedkv.device.tensors import require_numbers, require_slots, require_tensor
from pagedkv.errors import BlockError, ConfigurationError, DeviceUnavailableError, NoHostPoolError, TensorError

IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_COMPUTE: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", Location),
        ("dst_location", Location),
        ("flags", ctypes.c_uint),
    )


def copy_batch(destinations: Int64Array, sources: Int64Array, sizes: Int64Array, stream: torch.cuda.Stream) -> None:
    """Enqueue in a stream the copies of ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``, in any order.

    Args:
        destinations, sources: int64 ``[n]``, addresses; host memory must be pinned.
        sizes: int64 ``[n]``, positive.
        stream: not the default one.

    Raises:
        DeviceUnavailableError: the driver refuses the copies; the message has its error.
    """
    if len(sizes) == 0:
        return
    entry = _entry_point()
    if entry is None:
        _copy_one_by_one(destinations, sources, sizes, stream)
        return
    function, has_fail_index = entry
    attributes = _Attributes(IN_STREAM_ORDER, Location(), Location(), BESIDE_COMPUTE)
    first = ctypes.c_size_t(0)
    fail_index = ctypes.c_size_t(0)
    arrays = [np.ascontiguousarray(values, np.uint64) for values in (destinations, sources, sizes)]
    arguments: list[Any] = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    arguments += [ctypes.c_size_t(len(sizes)), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]
    if has_fail_index:
        arguments.append(ctypes.byref(fail_index))
    status = function(*arguments, ctypes.c_void_p(stream.cuda_stream))
    if status:
        raise DeviceUnavailableError(f"the driver refused {len(sizes)} copies: CUDA error {status}")


def _copy_one_by_one(
    destinations: Int64Array, sources: Int64Array, sizes: Int64Array, stream: torch.cuda.Stream
) -> None:
    copy = ctypes.CDLL(LIBRARY).cuMemcpyAsync
    for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        status = copy(
            ctypes.c_void_p(destination), ctypes.c_void_p(source), ctypes.c_size_t(size),
            ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        if status:
            raise DeviceUnavailableError(f"the driver refused to copy {size:,} bytes: CUDA error {status}")


@lru_cache(maxsize=1)
def _entry_point() -> "tuple[Any, bool] | None":
    """Return the driver's function, and whether it has an argument for the index of a failed copy (before CUDA 13)."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    for name, has_fail_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(library, name, None)
        if function is not None:
            return function, has_fail_index
    return None


STAGED_NBYTES: Final = 2**26
"""Bytes of the buffer for blocks that are not block-major."""
COMPUTED_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


@final
class CopyTicket:
    """Copies that were begun.

    Args:
        what: name of the copies in messages.
        event: recorded after the copies in their stream; None if they have already ended.
    """

    def __init__(self, what: str, event: "torch.cuda.Event | None") -> None:
        self._what = what
        self.event = event

    def is_done(self) -> bool:
        """Return whether the copies have ended, without waiting."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait on the host until they have ended."""
        if self.event is not None:
            self.event.synchronize()

    def __repr__(self) -> str:
        return f"CopyTicket({self._what})"


@final
class Transfers:
    """Moves and writes in one storage.

    Args:
        storage: the memory of blocks.
        kernels: as for :class:`~pagedkv.device.block_tables.BlockTables`.

    Attributes:
        stream: the stream of the swaps; None on a CPU, where they end at once.
    """

    def __init__(self, storage: KVStorage, *, kernels: KernelChoice = "auto") -> None:
        require_instance(storage, KVStorage, "storage")
        self.storage = storage
        self._kernels = kernels_for(storage.device, kernels)
        self.stream = torch.cuda.Stream(storage.device) if storage.device.type == "cuda" else None
        self._staging: torch.Tensor | None = None

    # Blocks

    def copy(self, pool: str, src_ids: "npt.ArrayLike | torch.Tensor", dst_ids: "npt.ArrayLike | torch.Tensor") -> None:
        """Copy blocks of a device pool, in the current stream: one kernel for all layers.

        Args:
            pool: name of the pool.
            src_ids, dst_ids: int32 ``[n]``: arrays, or tensors on the device.

        Raises:
            BlockError: ids outside the pool, a repeated destination, or a destination that is also a source. Of
                tensors, only the number of ids is checked, and on a CPU also whether they are in the pool.
            TensorError: tensors of another type or device.
            ConfigurationError: no such pool.
            StorageError: the storage is asleep.
        """
        memory = self._pool(pool)
        if isinstance(src_ids, torch.Tensor) and isinstance(dst_ids, torch.Tensor):
            source, destination = (self._checked_ids(each, pool, memory.num_blocks) for each in (src_ids, dst_ids))
            if len(source) != len(destination):
                raise BlockError(f"pool {pool!r}: {len(source)} sources and {len(destination)} destinations")
        else:
            sources = block_array(src_ids, f"copied blocks of pool {pool!r}", memory.num_blocks)
            destinations = block_array(dst_ids, f"destinations in pool {pool!r}", memory.num_blocks)
            require_pairs(sources, destinations, pool)
            if np.intersect1d(sources, destinations).size:
                raise BlockError(
                    f"pool {pool!r}: a block is source and destination in one call, whose copies are unordered"
                )
            source, destination = self._on_device(sources), self._on_device(destinations)
        self._kernels.copy_blocks(
            memory.device_bytes, memory.pieces, source, memory.device_bytes, memory.pieces, destination
        )

    def zero(self, pool: str, block_ids: "npt.ArrayLike | torch.Tensor") -> None:
        """Fill blocks of a device pool with zeros, in the current stream. Raises as :meth:`copy`."""
        memory = self._pool(pool)
        if isinstance(block_ids, torch.Tensor):
            block_ids = self._checked_ids(block_ids, pool, memory.num_blocks)
        else:
            ids = block_array(block_ids, f"blocks of pool {pool!r}", memory.num_blocks)
            block_ids = self._on_device(ids)
        self._kernels.zero_blocks(memory.device_bytes, memory.pieces, block_ids)

    def swap_out(self, pool: str, src_ids: npt.ArrayLike, dst_ids: npt.ArrayLike) -> CopyTicket:
        """Begin to copy blocks of a device pool to its host pool, after earlier work in the current stream.

        Args:
            pool: name of the pool.
            src_ids: int32 ``[n]``, device blocks.
            dst_ids: int32 ``[n]``, host blocks.

        Raises:
            BlockError: ids outside the pools, or a repeated destination.
            NoHostPoolError: there is no host pool.
            ConfigurationError: no such pool.
            StorageError: the storage is asleep.
        """
        return self._swap(pool, src_ids, dst_ids, is_out=True)

    def swap_in(self, pool: str, src_ids: npt.ArrayLike, dst_ids: npt.ArrayLike) -> CopyTicket:
        """Begin to copy blocks of a host pool to their device pool. As :meth:`swap_out`, with the sides exchanged."""
        return self._swap(pool, src_ids, dst_ids, is_out=False)

    # Tokens and states

    def reshape_and_cache(  # noqa: PLR0913 - layer, tokens, and their slots
        self,
        group: int,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        check_slots: bool | None = None,
    ) -> None:
        """Write this step's keys and values to their slots, in the current stream; slots of -1 are skipped.

        Eight-bit groups store the value divided by its scale; values too large for the type become its largest number.

        Args:
            group: the layer's group.
            layer: number of the layer in the group.
            key: float ``[tokens, heads, key_dim]``, of any strides.
            value: float ``[tokens, heads, value_dim]``, of any strides.
            slot_mapping: int64 ``[tokens or more]``, as in :class:`~pagedkv.device.block_tables.StepInputs`.
            check_slots: whether to check that the slots exist. None: only if the device is a CPU, since on a GPU the
                host would have to wait for the device. Slots that do not exist are never written.

        Raises:
            TensorError: another type, shape or device, fewer slots than tokens, or a slot that does not exist.
            ConfigurationError: the group has no keys.
            StorageError: the storage is asleep.
        """
        keys, values = self.storage.keys(group, layer), self.storage.values(group, layer)
        for what, tensor in (("key", key), ("value", value)):
            require_instance(tensor, torch.Tensor, what, TensorError)
        scales = self.storage.scales(group)[layer] if keys.dtype in FP8_TYPES else (None, None)
        sides = [TokenSide(key, keys, scales[0]), TokenSide(value, values, scales[1])]
        self._write(group, sides, slot_mapping, ("key", "value"), check_slots=check_slots)

    def write_latents(
        self,
        group: int,
        layer: int,
        latent: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        check_slots: bool | None = None,
    ) -> None:
        """Write this step's latents (MLA) to their slots: float ``[tokens, dim]``. As :meth:`reshape_and_cache`."""
        blocks = self.storage.latents(group, layer)[:, :, None, :]
        require_instance(latent, torch.Tensor, "latent", TensorError)
        if latent.ndim != 2:  # noqa: PLR2004 - tokens, dimensions
            raise TensorError(f"latent must have the shape ['any', {blocks.shape[3]}], got {list(latent.shape)}")
        scales = self.storage.scales(group)[layer, 0] if blocks.dtype in FP8_TYPES else None
        sides = [TokenSide(latent[:, None, :], blocks, scales)]
        self._write(group, sides, slot_mapping, ("latent",), check_slots=check_slots)

    def write_companion(  # noqa: PLR0913 - companion, layer, tokens, and their slots
        self,
        group: int,
        name: str,
        layer: int,
        tokens: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        check_slots: bool | None = None,
    ) -> None:
        """Write this step's part of a companion of floats: ``[tokens, dim]``. As :meth:`reshape_and_cache`.

        Companions of other types are written through their view, :meth:`~pagedkv.device.KVStorage.companion`.
        """
        blocks = self.storage.companion(group, name, layer)[:, :, None, :]
        require_instance(tokens, torch.Tensor, name, TensorError)
        if tokens.ndim != 2:  # noqa: PLR2004 - tokens, dimensions
            raise TensorError(f"{name} must have the shape ['any', {blocks.shape[3]}], got {list(tokens.shape)}")
        sides = [TokenSide(tokens[:, None, :], blocks, None)]
        self._write(group, sides, slot_mapping, (name,), check_slots=check_slots)

    def gather_states(self, group: int, layer: int, block_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return copies of the states of some blocks: each tensor ``[n, *shape]``, zeros for the null block.

        Args:
            block_ids: int32 ``[n]`` on the device, as from ``BlockTables.state_blocks``.

        Raises:
            TensorError: another type or device.
            ConfigurationError: the group has no states.
        """
        self._require_state_blocks(group, block_ids)
        return self._read({name: view[:, None] for name, view in self.storage.states(group, layer).items()}, block_ids)[
            0
        ]

    def gather_states_of_layers(self, group: int, block_ids: torch.Tensor) -> Sequence[Mapping[str, torch.Tensor]]:
        """Return :meth:`gather_states` for each layer, by one kernel for each tensor."""
        self._require_state_blocks(group, block_ids)
        return self._read(self.storage.states_of_layers(group), block_ids)

    def scatter_states(
        self, group: int, layer: int, block_ids: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        """Write states to some blocks; those for the null block are dropped.

        Raises:
            TensorError: another type, shape or device, or tensors of other names.
            ConfigurationError: the group keeps no states.
        """
        self._require_state_blocks(group, block_ids)
        views = self.storage.states(group, layer)
        require_instance(states, Mapping, "states", TensorError)
        if set(views) != set(states):
            raise TensorError(
                f"a state of group {group} has the tensors {sorted(views)}, got {sorted(states, key=repr)}"
            )
        for name, state in views.items():
            shape = (len(block_ids), *state.shape[1:])
            require_tensor(states[name], name, dtype=state.dtype, shape=shape, device=self.storage.device)
        sides = [StateSide(view[:, None], states[name].contiguous()[None]) for name, view in views.items()]
        self._kernels.write_states(sides, block_ids)

    # Inside

    def _write(
        self,
        group: int,
        sides: Sequence[TokenSide],
        slots: torch.Tensor,
        names: Sequence[str],
        *,
        check_slots: bool | None,
    ) -> None:
        device = self.storage.device
        num_tokens = sides[0].tokens.shape[0] if sides[0].tokens.ndim else 0
        for side, name in zip(sides, names, strict=True):
            shape = (num_tokens, *side.blocks.shape[2:])
            require_tensor(side.tokens, name, dtype=COMPUTED_TYPES, shape=shape, device=device)
        require_tensor(slots, "slot_mapping", dtype=torch.int64, shape=(None,), device=device)
        if len(slots) < num_tokens:
            raise TensorError(f"{num_tokens} tokens need as many slots, got {len(slots)}")
        self.storage.require_awake()
        is_checked = device.type == "cpu" if check_slots is None else as_flag(check_slots, "check_slots", TensorError)
        if is_checked:
            num_slots = sides[0].blocks.shape[0] * sides[0].blocks.shape[1]
            require_slots(slots[:num_tokens], f"slot_mapping of group {group}", num_slots)
        self._kernels.write_tokens(sides, slots)

    def _read(self, views: Mapping[str, torch.Tensor], block_ids: torch.Tensor) -> Sequence[Mapping[str, torch.Tensor]]:
        """Read tensors of ``[num_blocks, layers, *shape]`` for some rows; by layer."""
        sides = {
            name: StateSide(view, view.new_empty(view.shape[1], len(block_ids), *view.shape[2:]))
            for name, view in views.items()
        }
        self._kernels.read_states(list(sides.values()), block_ids)
        num_layers = next(iter(views.values())).shape[1]
        return [{name: side.rows[layer] for name, side in sides.items()} for layer in range(num_layers)]

    def _require_state_blocks(self, group: int, block_ids: torch.Tensor) -> None:
        where = self.storage.device
        ids = require_tensor(block_ids, "block_ids", dtype=torch.int32, shape=(None,), device=where)
        require_numbers(ids, "block_ids", self.storage.pool_of(group).num_blocks)

    def _checked_ids(self, ids: torch.Tensor, pool: str, num_blocks: int) -> torch.Tensor:
        what = f"blocks of pool {pool!r}"
        taken = (torch.int32, torch.int64)
        checked = require_tensor(ids, what, dtype=taken, shape=(None,), device=self.storage.device)
        require_numbers(checked, what, num_blocks)
        return checked

    def _pool(self, pool: str) -> PoolMemory:
        if not isinstance(pool, str) or pool not in self.storage.pools:
            raise ConfigurationError(f"there is no pool {pool!r}: there are {list(self.storage.pools)}")
        self.storage.require_awake()
        return self.storage.pools[pool]

    def _on_device(self, ids: Int32Array) -> torch.Tensor:
        tensor = torch.from_numpy(ids.copy())
        if self.storage.device.type == "cuda":
            return tensor.pin_memory().to(self.storage.device, non_blocking=True)
        return tensor

    def _swap(self, pool: str, src_ids: npt.ArrayLike, dst_ids: npt.ArrayLike, *, is_out: bool) -> CopyTicket:
        memory = self._pool(pool)
        if not memory.num_host_blocks:
            raise NoHostPoolError(f"pool {pool!r} has no host pool to swap with")
        limits = (memory.num_blocks, memory.num_host_blocks)
        most_src, most_dst = limits if is_out else limits[::-1]
        sources = block_array(src_ids, f"swapped blocks of pool {pool!r}", most_src)
        destinations = block_array(dst_ids, f"destinations of pool {pool!r}", most_dst)
        require_pairs(sources, destinations, pool)
        event = self._begin(memory, sources, destinations, is_out=is_out)
        ticket = CopyTicket(f"{len(sources)} blocks of pool {pool!r} {'out' if is_out else 'in'}", event)
        self.storage.began(ticket)
        return ticket

    def _begin(
        self, memory: PoolMemory, sources: Int32Array, destinations: Int32Array, *, is_out: bool
    ) -> "torch.cuda.Event | None":
        on_device, on_host = (sources, destinations) if is_out else (destinations, sources)
        if self.stream is None:
            sides = [
                (memory.device_bytes, memory.pieces, self._on_device(on_device)),
                (memory.host_bytes, _whole(memory.block_nbytes), self._on_device(on_host)),
            ]
            first, second = sides if is_out else reversed(sides)
            self._kernels.copy_blocks(*first, *second)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.storage.device))
        with torch.cuda.stream(self.stream):
            if memory.pieces.is_block_major:
                self._engine_copy(memory, memory.device_bytes, on_device, on_host, is_out=is_out)
            else:
                self._staged_copy(memory, on_device, on_host, is_out=is_out)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event

    def _engine_copy(
        self,
        memory: PoolMemory,
        device_bytes: torch.Tensor,
        on_device: Int32Array,
        on_host: Int32Array,
        *,
        is_out: bool,
    ) -> None:
        assert self.stream is not None
        first, counts = _runs(on_device, on_host)
        nbytes = memory.block_nbytes
        here = device_bytes.data_ptr() + on_device[first].astype(np.int64) * nbytes
        there = memory.host_bytes.data_ptr() + on_host[first].astype(np.int64) * nbytes
        copy_batch(*((there, here) if is_out else (here, there)), counts * nbytes, self.stream)

    def _staged_copy(self, memory: PoolMemory, on_device: Int32Array, on_host: Int32Array, *, is_out: bool) -> None:
        most = max(1, STAGED_NBYTES // memory.block_nbytes)
        if self._staging is None or self._staging.numel() < most * memory.block_nbytes:
            self._staging = torch.empty(most * memory.block_nbytes, dtype=torch.uint8, device=self.storage.device)
        whole = _whole(memory.block_nbytes)
        for begin in range(0, len(on_device), most):
            blocks, hosts = on_device[begin : begin + most], on_host[begin : begin + most]
            staged: Int32Array = np.arange(len(blocks), dtype=np.int32)
            pool = (memory.device_bytes, memory.pieces, self._on_device(blocks))
            staging = (self._staging, whole, self._on_device(staged))
            if is_out:
                self._kernels.copy_blocks(*pool, *staging)
                self._engine_copy(memory, self._staging, staged, hosts, is_out=True)
            else:
                self._engine_copy(memory, self._staging, staged, hosts, is_out=False)
                self._kernels.copy_blocks(*staging, *pool)


def block_array(ids: npt.ArrayLike, what: str, num_blocks: int) -> Int32Array:
    """Check block ids and return them as int32. Raises BlockError."""
    array = as_array(ids, what, BlockError)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BlockError(f"{what} must be a flat array of integers, got {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() >= num_blocks:
        raise BlockError(f"{what} must be from 0 to {num_blocks - 1}, got {array.min()} to {array.max()}")
    return array.astype(np.int32)


def require_pairs(sources: Int32Array, destinations: Int32Array, pool: str) -> None:
    """Raise BlockError unless each source has its own destination."""
    if len(sources) != len(destinations):
        raise BlockError(f"pool {pool!r}: {len(sources)} sources and {len(destinations)} destinations")
    if len(np.unique(destinations)) < len(destinations):
        raise BlockError(f"pool {pool!r}: two blocks have the same destination, among {destinations.tolist()[:8]}")


def _whole(block_nbytes: int) -> Pieces:
    return Pieces((0,), (block_nbytes,), (block_nbytes,))


def _runs(left: Int32Array, right: Int32Array) -> tuple[Int64Array, Int64Array]:
    """Find runs that are consecutive on both sides; return their first indices and lengths."""
    breaks = np.flatnonzero((np.diff(left) != 1) | (np.diff(right) != 1)) + 1
    first = np.concatenate([[0], breaks]).astype(np.int64) if len(left) else np.zeros(0, np.int64)
    return first, np.diff(np.append(first, len(left)))
