"""Our storage of SGLang's hierarchical cache, behind SGLang's own factory, controller, pools and failure injector."""

import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from tests.peers.absent import stand_in

stand_in()

from sglang.srt.environ import envs  # noqa: E402 - behind what is absent
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from pagedkv.errors import ConfigurationError  # noqa: E402
from pagedkv.plugins.sglang import PagedKVStorage  # noqa: E402

PAGE_SIZE: Final = 4
NUM_PAGES: Final = 32
WEIGHTS: Final = "ab" * 16
PATIENCE_S: Final = 30
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")
ALONE: Final = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}


def device_pool(num_layers: int = 3) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=PAGE_SIZE * NUM_PAGES,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        layer_num=num_layers,
        device="cpu",
        enable_memory_saver=False,
    )


def host_pool(layout: str = "page_first", num_layers: int = 3, device: MHATokenToKVPool | None = None) -> Any:  # noqa: ANN401 - SGLang's
    pool = device_pool(num_layers) if device is None else device
    return MHATokenToKVPoolHost(
        pool._mha_buffer_info(),
        2.0,
        0,
        PAGE_SIZE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=PAGE_SIZE * NUM_PAGES,
        start_layer=0,
        end_layer=num_layers,
    )


def options_of(folder: Path, **more: object) -> dict[str, Any]:
    named = {"backend_name": "pagedkv", "module_path": "pagedkv.plugins.sglang", "class_name": "PagedKVStorage"}
    return {**named, "interface_v1": 1, "root": str(folder), "cap": "64MiB", "weights": WEIGHTS, **more}


def config_of(folder: Path, *, tp_rank: int = 0, is_mla: bool = False, model: str = "m", **more: object) -> Any:  # noqa: ANN401 - SGLang's
    return HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model,
        extra_config=options_of(folder, **more),
    )


@contextmanager
def storage_of(folder: Path, pool: object = None, **more: Any) -> Iterator[PagedKVStorage]:  # noqa: ANN401 - as above
    storage = PagedKVStorage(config_of(folder, **more), {})
    with closing(storage):
        storage.register_mem_pool_host(host_pool() if pool is None else pool)
        yield storage


def fill(pool: Any, seed: int = 0) -> None:  # noqa: ANN401 - SGLang's
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))


def places(pages: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])


def page_of(pool: Any, page: int) -> torch.Tensor:  # noqa: ANN401 - SGLang's
    found: torch.Tensor = pool.get_data_page(page * PAGE_SIZE, flat=True).clone()
    return found


def hashes(num: int, seed: int = 0) -> list[str]:
    key = RadixKey(array("q", (1000 * seed + token for token in range(num * PAGE_SIZE))))
    found: list[str] = get_storage_hash_str(key, None, page_size=PAGE_SIZE)
    return found


@contextmanager
def controller_of(root: Path, layout: str, **more: object) -> Iterator[Any]:
    device = device_pool()
    with get_parallel().override(**ALONE):
        controller = HiCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            host_pool(layout, device=device),
            PAGE_SIZE,
            None,
            None,
            storage_backend="dynamic",
            prefetch_threshold=PAGE_SIZE,
            model_name="m",
            storage_backend_extra_config=options_of(root, **more),
            io_backend="direct",
        )
        try:
            yield controller
        finally:
            controller.detach_storage_backend()


def taken(queue: "Queue[Any]") -> Any:  # noqa: ANN401 - SGLang's operations
    return queue.get(timeout=PATIENCE_S)


def back_up(controller: Any, tokens: range) -> tuple[list[str], torch.Tensor]:  # noqa: ANN401 - SGLang's
    """Store a prompt by SGLang's own threads; return its hashes, and its pages."""
    pool, key = controller.mem_pool_host, RadixKey(array("q", tokens))
    names = get_storage_hash_str(key, None, page_size=PAGE_SIZE)
    where = pool.alloc(len(tokens))
    pages = torch.stack([page_of(pool, int(place) // PAGE_SIZE) for place in where[::PAGE_SIZE]])
    controller.write_storage(where, key, names)
    assert taken(controller.ack_backup_queue).completed_tokens == len(tokens)
    return names, pages


def prefetch(controller: Any, tokens: range) -> torch.Tensor:  # noqa: ANN401 - SGLang's
    """Load a prompt by SGLang's own threads; return the pages that came."""
    pool = controller.mem_pool_host
    controller.prefetch("a", RadixKey(array("q", tokens)))
    operation = taken(controller.prefetch_hit_queue)
    if not operation.storage_hit_count:
        return torch.empty(0)
    operation.host_indices = pool.alloc(operation.storage_hit_count)
    controller.prefetch_buffer.put(operation)
    num_tokens = 0
    while not (ack := taken(controller.ack_prefetch_queue)).completed_req:
        num_tokens = ack.completed_tokens
    where = operation.host_indices[:num_tokens:PAGE_SIZE].tolist()
    return torch.stack([page_of(pool, place // PAGE_SIZE) for place in where]) if where else torch.empty(0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_sglangs_controller_gets_back_what_it_stored_also_after_a_restart(
    tmp_path: Path, layout: str, interface_v1: int
) -> None:
    with controller_of(tmp_path / "root", layout, interface_v1=interface_v1) as controller:
        fill(controller.mem_pool_host)
        _, pages = back_up(controller, range(40))
        controller.mem_pool_host.kv_buffer.zero_()
        assert torch.equal(prefetch(controller, range(60)), pages)
    with controller_of(tmp_path / "root", layout, interface_v1=interface_v1) as controller:
        assert torch.equal(prefetch(controller, range(40)), pages)
        assert not len(prefetch(controller, range(1, 41)))


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "exchange"])
def test_what_is_damaged_is_a_miss_and_what_stands_before_it_a_hit(tmp_path: Path, damage: str) -> None:
    pool = host_pool()
    fill(pool)
    with storage_of(tmp_path / "root", pool) as storage:
        names = hashes(8)
        assert storage.batch_set_v1(names, places(range(8))) == [True] * 8
        third = storage._run(PoolName.KV, names[3]).key.hex()
        files = {path.stem: path for path in (tmp_path / "root").rglob("*.frame")}
        file, other = files[third], next(path for name, path in files.items() if name != third)
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[-100] ^= 1
            file.write_bytes(content)
        elif damage == "truncate":
            file.write_bytes(content[:-1])
        elif damage == "delete":
            file.unlink()
        else:
            file.write_bytes(other.read_bytes())
        expected = [page_of(pool, page) for page in range(8)]
        assert storage.batch_get_v1(names, places(range(8, 16))) == [True] * 3 + [False] * 5
        assert all(torch.equal(page_of(pool, 8 + page), expected[page]) for page in range(3))
        assert storage._pages[PoolName.KV].store.wait_until_quiet(PATIENCE_S)  # what is damaged is deleted
        assert storage.batch_set_v1(names[3:4], places([3])) == [True]
        assert storage.batch_get_v1(names, places(range(8, 16))) == [True] * 8
        assert all(torch.equal(page_of(pool, 8 + page), expected[page]) for page in range(8))


def test_sglangs_own_file_back_end_serves_a_flipped_bit(tmp_path: Path) -> None:
    pool = host_pool()
    fill(pool)
    theirs = HiCacheFile(config_of(tmp_path, file_storage_path=str(tmp_path)))
    theirs.register_mem_pool_host(pool)
    name = hashes(1)[0]
    assert theirs.set(name, page_of(pool, 0))
    (file,) = tmp_path.glob("*.bin")
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    served = theirs.get(name, pool.get_dummy_flat_data_page())
    assert served is not None
    assert not torch.equal(served, page_of(pool, 0))


@pytest.mark.parametrize(
    "other",
    [{"weights": "cd" * 16}, {"tp_rank": 1}, {"model": "n"}, {"layout": "layer_first"}, {"num_layers": 2}],
    ids=str,
)
def test_pages_of_others_are_not_found(tmp_path: Path, other: dict[str, Any]) -> None:
    pool, names = host_pool(), hashes(3)
    fill(pool)
    with storage_of(tmp_path / "root", pool) as storage:
        storage.batch_set_v1(names, places(range(3)))
    shape = {key: other.pop(key) for key in ("layout", "num_layers") if key in other}
    with storage_of(tmp_path / "root", host_pool(**shape), **other) as storage:
        assert storage.batch_exists(names) == 0
    with storage_of(tmp_path / "root") as storage:
        assert storage.batch_exists(names) == 3


def test_ranks_of_latents_share_their_pages(tmp_path: Path) -> None:
    names = hashes(3)
    with storage_of(tmp_path / "root", is_mla=True) as storage:
        storage.batch_set_v1(names, places(range(3)))
    with storage_of(tmp_path / "root", is_mla=True, tp_rank=1) as storage:
        assert storage.batch_exists(names) == 3


def test_without_known_weights_nothing_outlives_the_process_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = hashes(3)
    with caplog.at_level(logging.WARNING), storage_of(tmp_path / "root", weights=None) as storage:
        storage.batch_set_v1(names, places(range(3)))
        assert storage.batch_exists(names) == 3
    assert 'the option "weights" keeps it' in caplog.text
    with storage_of(tmp_path / "root", weights=None) as storage:
        assert storage.batch_exists(names) == 0


def test_after_a_clear_nothing_old_is_found_and_nothing_new_outlives_the_process(tmp_path: Path) -> None:
    names, pool = hashes(3), host_pool()
    fill(pool)
    with storage_of(tmp_path / "root", pool) as storage:
        storage.batch_set_v1(names, places(range(3)))
        storage.clear()
        assert storage.batch_exists(names) == 0
        assert storage.batch_get_v1(names, places(range(4, 7))) == [False] * 3
        assert storage.batch_set_v1(names, places(range(3))) == [True] * 3
        assert storage.batch_exists(names) == 3
    with storage_of(tmp_path / "root") as storage:
        assert storage.batch_exists(names) == 0


def test_the_cap_holds_and_the_last_prompt_stays(tmp_path: Path) -> None:
    pool = host_pool()
    with storage_of(tmp_path / "root", pool, cap="20KB") as storage:
        for seed in range(20):
            storage.batch_set_v1(hashes(4, seed), places(range(4)))
        assert storage.batch_exists(hashes(4, 19)) == 4
    assert 0 < sum(path.stat().st_size for path in (tmp_path / "root").rglob("*.frame")) <= 20_000


@pytest.mark.parametrize("seed", range(20))
def test_hits_of_several_pools_are_those_of_sglangs_own_back_end(tmp_path: Path, seed: int) -> None:
    draw, names = random.Random(seed), hashes(10)
    kv, windows, indexer = host_pool(), host_pool(num_layers=2), host_pool(num_layers=1)
    theirs = HiCacheFile(config_of(tmp_path, file_storage_path=str(tmp_path / "theirs")))
    theirs.register_mem_pool_host(kv)
    with storage_of(tmp_path / "root", kv) as ours:
        for each in (ours, theirs):
            each.register_mem_host_pool_v2(kv, PoolName.KV)
            each.register_mem_host_pool_v2(windows, PoolName.SWA)
            each.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
        for name in (PoolName.KV, PoolName.SWA, PoolName.INDEXER):
            pages = sorted(
                draw.sample(range(10), draw.randint(5, 10)) if name is not PoolName.KV else range(draw.randint(4, 10))
            )
            keys = [names[page] for page in pages]
            transfer = PoolTransfer(name, host_indices=places(pages), keys=keys)
            assert ours.batch_set_v2([transfer]) == theirs.batch_set_v2([transfer]) == {name: [True] * len(pages)}
        asked = [
            PoolTransfer(PoolName.SWA, keys=names[: draw.randint(1, 3)], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
        ][: draw.randint(0, 2)]
        assert ours.batch_exists_v2(names, asked) == theirs.batch_exists_v2(names, asked)


def test_pages_of_several_pools_come_back(tmp_path: Path) -> None:
    names, pools = hashes(3), {PoolName.KV: host_pool(), PoolName.SWA: host_pool(num_layers=2)}
    with storage_of(tmp_path / "root", pools[PoolName.KV]) as storage:
        for name, pool in pools.items():
            fill(pool)
            storage.register_mem_host_pool_v2(pool, name)
        assert storage.batch_set_v2([PoolTransfer(name, places(range(3)), keys=names) for name in pools]) == {
            name: [True] * 3 for name in pools
        }
        loads = [PoolTransfer(name, places(range(5, 8)), keys=names) for name in pools]
        assert storage.batch_get_v2(loads) == {name: [True] * 3 for name in pools}
    for pool in pools.values():
        assert all(torch.equal(page_of(pool, 5 + page), page_of(pool, page)) for page in range(3))


def test_no_answer_is_wrong_where_sglang_lets_calls_fail(tmp_path: Path) -> None:
    pool, draw = host_pool(), random.Random(0)
    fill(pool)
    kept = [page_of(pool, page) for page in range(8)]
    config = config_of(tmp_path / "root")
    num_served = num_failed = 0
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        assert isinstance(storage, HiCacheStorageFailureInjector)
        with closing(storage):
            storage.register_mem_pool_host(pool)
            for _ in range(200):
                pages = range(draw.randint(1, 8))
                names = hashes(len(pages))
                storage.batch_set_v1(names, places(pages))
                num_there = storage.batch_exists(names)
                came = storage.batch_get_v1(names, places(range(8, 8 + len(pages))))
                num_failed += num_there < len(pages)
                for page in range(came.index(False) if False in came else len(came)):
                    assert torch.equal(page_of(pool, 8 + page), kept[page])
                    num_served += 1
    assert num_served > 100
    assert num_failed > 10


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"redis": "redis://127.0.0.1:1/0"}, "a tier needs one of root, redis, object, got root, redis"),
        ({"root": None}, "a tier needs one of root, redis, object, got none"),
        ({"cap": None}, "a tier with a root needs a cap"),
        ({"file_path": "x"}, "an option that a tier does not have: .*file_path"),
        ({"weights": "/there/is/none"}, "no file ends with|there are no weights"),
    ],
)
def test_wrong_options_are_told_before_anything_is_stored(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told), storage_of(tmp_path / "root", **options):
        pass


def test_places_that_are_not_of_the_pages_are_refused(tmp_path: Path) -> None:
    with (
        storage_of(tmp_path / "root") as storage,
        pytest.raises(ConfigurationError, match="2 pages of 4 tokens of pool kv need 8 places, got 4"),
    ):
        storage.batch_get_v1(hashes(2), places([0]))
