"""SGLang 0.5.23: a storage of its hierarchical cache (HiCache) that verifies what it serves, within its bytes.

``sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic``, with
``--hicache-storage-backend-extra-config``::

    {
        "backend_name": "pagedkv",
        "module_path": "pagedkv.plugins.sglang",
        "class_name": "PagedKVStorage",
        "interface_v1": 1,
        "root": "/var/cache/kv",
        "cap": "200GiB",
    }

A page of SGLang is an entry of a :class:`~pagedkv.tiers.SharedStore`, under the SHA-256 of its hash. Its frame has the
hash, the layout, the digest of the checkpoint, the rank, and a check of every byte. Each pool of SGLang (keys and
values, states of recurrent layers, windows...) has a store of its own, all of them within one root and its cap::

    SGLang's threads    batch_exists        batch_get_v1, batch_get_v2        batch_set_v1, batch_set_v2
                             |                 load, wait, copy                   copy, offer, wait
    a pool's store       contains            read, verify                       write

SGLang calls from threads of its own, so these calls wait for the medium; the waits are bounded.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from secrets import token_bytes
from typing import Any, Final, TypeAlias

import sglang
import torch

from pagedkv.errors import ConfigurationError
from pagedkv.tiers import (
    GroupLayout,
    Identity,
    ModelIdentity,
    Run,
    SharedStore,
    StoreOutcome,
    Tier,
    digest_of_weights,
    tier_of_options,
)
from pagedkv.warming import make_ready, of_stores

try:
    from sglang.srt.mem_cache.hicache_storage import (
        STORAGE_BATCH_SIZE,
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.pool_host import HostKVCache
except ImportError as problem:
    known = "pagedkv.plugins.sglang is for SGLang 0.5.23"
    raise ImportError(f"{known}; {sglang.__version__} has not what it is made of: {problem}") from problem

__all__ = ["PagedKVStorage"]

LOGGER: Final = logging.getLogger("pagedkv.plugins.sglang")
UNKNOWN_WEIGHTS: Final = bytes(32)
KEPT: Final = {StoreOutcome.STORED, StoreOutcome.PRESENT, StoreOutcome.NOT_ADMITTED}
"""Outcomes that SGLang need not hear of: what second-offer admission leaves out is no failure."""
THEIR_OPTIONS: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
RESCAN_S: Final = 30.0
LONGEST_STORE_S: Final = 60.0
GRACE_S: Final = 1.0
"""By which a load's answer may be later than its deadline."""
Keys: TypeAlias = Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The pages of one pool of SGLang, and where they are kept.

    Args:
        pool: SGLang's, in host memory.
        store: their store.
        dtype: of a page in one row; nbytes: of a page.
    """

    pool: HostKVCache
    store: SharedStore
    dtype: torch.dtype
    nbytes: int


class PagedKVStorage(HiCacheStorage):
    """A storage back end in a folder, a Redis server or an object store; SGLang's interfaces v1 and v2.

    Args:
        storage_config: SGLang's. Its ``extra_config`` has the options:

            - ``root``, ``redis``, ``object``: exactly one of them, and ``cap``, as of
              :func:`~pagedkv.tiers.tier_of_options`;
            - ``weights``: what names the weights: at least 32 hexadecimal digits, or the path of the checkpoint. None:
              the model's folder, or its only revision in the cache of Hugging Face. Where there is none, and for caches
              in fp8, what this process stores is served by this process alone;
            - further ones of the tier: ``admission``, ``eviction``, ``floor_nbytes``, ``deadline_s`` of a batch that is
              loaded, ``rescan_s`` (30 s), ``settings``.
        kwargs: SGLang's, unused.

    Raises:
        ConfigurationError: not one medium, an option that there is not, tensor ranks that share split pages.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        del kwargs
        if storage_config.should_split_heads:
            raise ConfigurationError("pages split by heads (tp_lcm_size) are not known here: leave tp_lcm_size out")
        options = {key: value for key, value in (storage_config.extra_config or {}).items() if key not in THEIR_OPTIONS}
        self._weights: str | None = options.pop("weights", None)
        self._tier: Tier = tier_of_options(**options)
        self._config = storage_config
        self._life = b""
        self._pages: dict[str, Pages] = {}
        make_ready(of_stores(self._tier.eviction))

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Open the store of keys and values. Raises ConfigurationError: the medium does not answer."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """Open the store of a further pool. Raises ConfigurationError: the medium does not answer."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._open(host_pool_name, host_pool)

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Keys, extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Count the pages that are there, from the first on. O(keys); the medium is not asked."""
        del extra_info
        return _leading(self._there(PoolName.KV, keys))

    def batch_exists_v2(
        self,
        keys: Keys,
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Tell at which lengths a prompt can be continued: its pages are there, and those of every further pool.

        A pool of groups of blocks is a second form of the same pages: no hit depends on it, and none of it is reported.
        """
        num_pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: num_pages} if num_pages else {}
        lengths = set(range(1, num_pages + 1))
        for transfer in pool_transfers or ():
            if not lengths or transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue
            there = self._there(transfer.name, keys[:num_pages])
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                own = set(range(1, _leading(there) + 1))
            else:
                num_last = max(1, len(transfer.keys or ()))
                own = {end for end in range(1, num_pages + 1) if all(there[max(0, end - num_last) : end])}
            if own:
                hits[transfer.name] = max(own)
            lengths &= own
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def batch_get_v1(
        self, keys: Keys, host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into SGLang's pool of keys and values, up to the first that does not come.

        Args:
            keys: hashes, the head of a prompt first.
            host_indices: int64 ``[pages * page_size]``: places of their tokens in the pool.
            extra_info: unused.

        Returns:
            For each page whether it was loaded.
        """
        del extra_info
        return self._load(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: Keys, host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of SGLang's pool of keys and values; for each whether it is there. Arguments as of a load."""
        del extra_info
        return self._store(PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into several pools; for each pool and page whether it was loaded."""
        del extra_info
        return {each.name: self._load(each.name, each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; for each pool and page whether it is there."""
        del extra_info
        stored: dict[str, list[bool]] = {}
        for each in transfers:  # a pool may have several
            stored.setdefault(each.name, []).extend(self._store(each.name, each.keys or [], each.host_indices))
        return stored

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Load a page of keys and values in one row, into ``target_location`` if it is given. None: it did not come."""
        del target_sizes
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: Keys, target_locations: Sequence[torch.Tensor] | None = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Load pages as :meth:`get` does, up to the first that does not come."""
        del target_sizes
        pages = self._pages[PoolName.KV]
        found: list[torch.Tensor | None] = [None] * len(keys)

        def take(place: int, page: torch.Tensor) -> None:
            found[place] = page.clone() if target_locations is None else target_locations[place].copy_(page)

        self._read(pages, PoolName.KV, keys, take)
        return found

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: torch.Tensor | None = None,
        target_sizes: object = None,
    ) -> bool:
        """Store a page of keys and values; whether it is there."""
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Keys,
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store pages of keys and values; whether all are there."""
        del target_locations, target_sizes
        given = [value for value in values or () if value is not None]
        return len(given) == len(keys) and all(self._write(self._pages[PoolName.KV], PoolName.KV, keys, given))

    def clear(self) -> None:
        """Remove all pages. What is stored from now on may be of other weights: it is served by this process alone."""
        self._life = token_bytes(32)
        for pages in self._pages.values():
            pages.store.reset()

    def close(self) -> None:
        """End all threads. What is queued is dropped; calls of the medium under way have some seconds."""
        for pages in self._pages.values():
            pages.store.close()
        self._pages.clear()

    def _open(self, name: str, pool: HostKVCache) -> None:
        """Open a pool's store; SGLang may name a pool twice."""
        opened = self._pages.get(name)
        if opened is not None and opened.pool is pool:
            return
        if opened is not None:
            opened.store.close()
        page = pool.get_dummy_flat_data_page()
        identity = _identity(self._config, name, pool, page, self._digest(page.dtype))
        config = self._tier.store_config(page.nbytes)
        at_once = 2 * STORAGE_BATCH_SIZE * page.nbytes
        store = SharedStore(
            self._tier.open_body(self._tier.coding.identity_of(identity).fingerprint),
            identity,
            replace(config, max_queued_nbytes=max(config.max_queued_nbytes, at_once)),
            codec=self._tier.coding,
            rescan_s=RESCAN_S if self._tier.rescan_s is None else self._tier.rescan_s or None,
        )
        self._pages[name] = Pages(pool, store, page.dtype, page.nbytes)

    def _digest(self, dtype: torch.dtype) -> bytes:
        """Return what names the weights; where nothing does, this process's content gets names of its own."""
        try:
            return digest_of_weights(self._config.model_name or "", str(dtype), self._weights)
        except ConfigurationError as problem:
            if self._weights is not None:
                raise
            self._life = self._life or token_bytes(32)
            why = 'so what this process stores ends with it: the option "weights" keeps it'
            LOGGER.warning("%s, %s", problem, why)
            return UNKNOWN_WEIGHTS

    def _run(self, name: str, key: str) -> Run:
        """Identify a page by its pool and SGLang's hash."""
        return Run.named(self._life + f"{name}.{key}".encode())

    def _there(self, name: str, keys: Keys) -> list[bool]:
        if not keys:
            return []
        found: list[bool] = self._pages[name].store.contains([self._run(name, key).key for key in keys]).tolist()
        return found

    def _load(self, name: str, keys: Keys, host_indices: torch.Tensor | None) -> list[bool]:
        pages = self._pages[name]
        places = _places(pages, name, keys, host_indices)
        loaded = self._read(
            pages, name, keys, lambda place, page: pages.pool.set_from_flat_data_page(places[place], page)
        )
        return [place < loaded for place in range(len(keys))]

    def _store(self, name: str, keys: Keys, host_indices: torch.Tensor | None) -> list[bool]:
        pages = self._pages[name]
        places = _places(pages, name, keys, host_indices)
        return self._write(pages, name, keys, [pages.pool.get_data_page(place, flat=True) for place in places])

    def _read(self, pages: Pages, name: str, keys: Keys, take: Callable[[int, torch.Tensor], object]) -> int:
        """Load pages and pass each on as one row, in order; return how many came."""
        if not keys:
            return 0
        load = pages.store.load([self._run(name, key) for key in keys], self._tier.deadline_s)
        loaded = load.wait(self._tier.deadline_s + GRACE_S)
        for place, (part,) in enumerate(loaded.parts):
            if memoryview(part).nbytes != pages.nbytes:
                return place
            take(place, torch.frombuffer(part, dtype=pages.dtype))
        return len(loaded.parts)

    def _write(self, pages: Pages, name: str, keys: Keys, rows: Sequence[torch.Tensor]) -> list[bool]:
        """Offer pages, and wait for their outcomes; for each whether it need not be offered again."""
        parts = [[row.contiguous().view(torch.uint8).numpy().data] for row in rows]
        stored, num_open, changed = [False] * len(keys), len(keys), threading.Condition()

        def answered(place: int, outcome: StoreOutcome) -> None:
            nonlocal num_open
            with changed:
                stored[place] = outcome in KEPT
                num_open -= 1
                changed.notify()

        if keys:
            pages.store.offer([self._run(name, key) for key in keys], parts, answered)
        with changed:
            changed.wait_for(lambda: not num_open, LONGEST_STORE_S)
            return list(stored)


def _leading(there: Sequence[bool]) -> int:
    return next((place for place, is_there in enumerate(there) if not is_there), len(there))


def _places(pages: Pages, name: str, keys: Keys, host_indices: torch.Tensor | None) -> list[int]:
    """Return where each page begins in its pool. Raises ConfigurationError: not a page of places for each key."""
    size = pages.pool.page_size
    num_given = 0 if host_indices is None else host_indices.numel()
    if host_indices is None or num_given != len(keys) * size:
        raise ConfigurationError(
            f"{len(keys)} pages of {size} tokens of pool {name} need {len(keys) * size} places, got {num_given}"
        )
    places: list[int] = host_indices[::size].tolist()
    return places


def _identity(
    config: HiCacheStorageConfig, name: str, pool: HostKVCache, page: torch.Tensor, weights: bytes
) -> Identity:
    """Identify the bytes of a page: its pool, layout and type, the model, and the rank where ranks differ."""
    is_replicated = config.is_mla_model and name != PoolName.MAMBA
    layout = GroupLayout(
        str(name),
        pool.page_size,
        str(page.dtype).removeprefix("torch."),
        "C",
        (page.numel(),),
        (1,),
    )
    shape = [getattr(pool, each, None) for each in ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim")]
    versions = (
        ("sglang", sglang.__version__),
        ("pool", f"{type(pool).__name__} {pool.layout} {shape}"),
        ("rank", "all" if is_replicated else f"{config.tp_rank} of {config.tp_size}"),
        ("stage", f"{config.pp_rank} of {config.pp_size}"),
        ("context", f"{config.attn_cp_rank} of {config.attn_cp_size}"),
        ("decode context", f"{config.dcp_rank} of {config.dcp_size}"),
    )
    return Identity((layout,), ModelIdentity(config.model_name or "", weights, versions=versions))
