"""LMCache's own tests of its L2 adapters, with ours in place of its mock and of its folder; and faults of a medium."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Final

import lmcache
import pytest
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from pagedkv.errors import ConfigurationError
from pagedkv.plugins.lmcache import PagedKVAdapter
from tests.peers.borrowed_server_tests import leave_out

SOURCE: Final = Path(lmcache.__file__).parents[2] / "lmcache-0.5.6" / "tests" / "v1" / "distributed"
PATIENCE_S: Final = 60.0
NUM_FLOATS: Final = 1024
LEFT_OUT: Final = {
    "test_store_completion_is_delayed_by_bandwidth": "is about the mock's bandwidth",
}


def borrowed(name: str) -> ModuleType:
    """Execute a module of their tests."""
    file = SOURCE / name
    if not file.exists():
        pytest.skip(f"there is no {file}: unpack LMCache's source distribution", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(f"borrowed_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MOCK: Final = borrowed("test_mock_l2_adapter.py")
FOLDER: Final = borrowed("test_fs_l2_adapter_delete.py")


def of_folder(folder: Path, **options: Any) -> PagedKVAdapter:  # noqa: ANN401 - of the adapter
    return PagedKVAdapter({"root": str(folder), "cap": "64MiB", "weights": "ab" * 16, **options})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    leave_out(request, LEFT_OUT)
    monkeypatch.setattr(MOCK, "MockL2Adapter", lambda _: of_folder(root))


@pytest.fixture
def adapter(request: pytest.FixtureRequest, root: Path) -> Iterator[Any]:
    adapter = of_folder(root)
    if request.cls is not None and request.cls.__name__.startswith("Folder"):
        listener = FOLDER._RecordingListener()
        adapter.register_listener(listener)
        yield adapter, listener
    else:
        yield adapter
    adapter.close()


@pytest.fixture
def slow_adapter(adapter: PagedKVAdapter) -> PagedKVAdapter:
    return adapter


globals().update(
    {
        f"Test{prefix}{name.removeprefix('Test')}": type(f"{prefix}{name}", (theirs,), {})
        for prefix, module in (("Mock", MOCK), ("Folder", FOLDER))
        for name, theirs in vars(module).items()
        if name.startswith("Test") and isinstance(theirs, type)
    }
)


def key_of(number: int, salt: str = "", model: str = "m", group: int = 0) -> ObjectKey:
    return ObjectKey(number.to_bytes(4, "big"), model, 7, group, salt)


def buffer(value: float = 0.0, num: int = NUM_FLOATS) -> TensorMemoryObj:
    raw = torch.full((num,), value, dtype=torch.float32)
    shape = torch.Size([num])
    return TensorMemoryObj(raw, MemoryObjMetadata(shape, torch.float32, 0, 4 * num, 1, fmt=MemoryFormat.KV_2LTD), None)


def awaited(ask: Callable[[], Any]) -> Any:  # noqa: ANN401 - a result
    ends_s = time.monotonic() + PATIENCE_S
    while (found := ask()) is None:
        assert time.monotonic() < ends_s, "a task never ended"
        time.sleep(0.001)
    return found


def store(adapter: Any, values: dict[ObjectKey, float]) -> bool:  # noqa: ANN401 - ours or theirs
    number = adapter.submit_store_task(list(values), [buffer(value) for value in values.values()])
    result = awaited(lambda: adapter.pop_completed_store_tasks().get(number))
    return bool(result.is_successful())


def load(adapter: Any, keys: list[ObjectKey], num: int = NUM_FLOATS) -> list[float | None]:  # noqa: ANN401 - as above
    """Load objects; return of each its value, None for a miss, and NaN where it has several."""
    objects = [buffer(-1.0, num) for _ in keys]
    number = adapter.submit_load_task(keys, objects)
    bits = awaited(lambda: adapter.query_load_result(number))
    found: list[float | None] = []
    for place, each in enumerate(objects):
        values = each.raw_data.unique()
        found.append((float(values) if len(values) == 1 else float("nan")) if bits.test(place) else None)
    return found


def there(adapter: Any, keys: list[ObjectKey]) -> list[bool]:  # noqa: ANN401 - as above
    number = adapter.submit_lookup_and_lock_task(keys, {})
    bits = awaited(lambda: adapter.query_lookup_and_lock_result(number))
    return [bits.test(place) for place in range(len(keys))]


def frames(root: Path) -> list[Path]:
    return sorted(each for each in root.rglob("*") if each.suffix in {".frame", ".data"})


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    file.write_bytes(content)


def test_its_own_factory_makes_it_and_a_restart_keeps_what_was_stored(root: Path) -> None:
    params = {"root": str(root), "cap": "64MiB", "weights": "ab" * 16}
    named = {"module_path": "pagedkv.plugins.lmcache", "class_name": "PagedKVAdapter", "adapter_params": params}
    values = {key_of(number): float(number) for number in range(8)}
    adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(named))
    assert store(adapter, values)
    adapter.close()
    again = create_l2_adapter(PluginL2AdapterConfig.from_dict(named))
    keys = [*values, key_of(99)]
    assert there(again, keys) == [True] * 8 + [False]
    assert load(again, keys) == [*values.values(), None]
    assert load(again, [key_of(3)], num=NUM_FLOATS // 2) == [None], "of another size"
    again.close()


@pytest.mark.parametrize("other", [{"salt": "x"}, {"model": "n"}, {"group": 1}], ids=str)
def test_no_part_of_a_key_is_ignored(root: Path, other: dict[str, Any]) -> None:
    adapter = of_folder(root)
    store(adapter, {key_of(1): 1.0})
    assert load(adapter, [key_of(1), key_of(1, **other)]) == [1.0, None]
    adapter.close()


def test_stock_lmcache_serves_a_flipped_bit_and_ours_does_not(root: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    for folder, opened in ((theirs, lambda: FSL2Adapter(FSL2AdapterConfig(base_path=str(theirs)))),
                           (root, lambda: of_folder(root))):  # fmt: skip
        adapter = opened()
        store(adapter, {key_of(number): float(number) for number in range(4)})
        file = next(each for each in frames(folder) if b"\0\0\0@" * 16 in each.read_bytes())  # of twos
        flip(file, 8 * (file.stat().st_size - 100))
        found = load(adapter, [key_of(number) for number in range(4)])
        assert (found[0], found[1], found[3]) == (0.0, 1.0, 3.0)
        assert found[2] is None if folder is root else found[2] not in {2.0, None}
        adapter.close()


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_to_files_no_answer_is_wrong(root: Path, seed: int) -> None:
    draw, num_misses = Random(seed), 0
    values = {key_of(number): float(number) for number in range(8)}
    adapter = of_folder(root)
    for _ in range(40):
        assert adapter._store.wait_until_quiet(PATIENCE_S), "what was refused is deleted first"
        assert store(adapter, values)
        file = draw.choice(frames(root))
        match draw.randrange(4):
            case 0:
                flip(file, draw.randrange(8 * file.stat().st_size))
            case 1:
                file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])
            case 2:
                file.unlink()
            case _:
                file.write_bytes(draw.choice(frames(root)).read_bytes())
        found = load(adapter, list(values))
        assert all(each in {None, right} for each, right in zip(found, values.values(), strict=True))
        assert found.count(None) <= 1, "one object was damaged"
        num_misses += found.count(None)
    assert num_misses > 20, "they were damaged"
    adapter.close()


def test_it_is_bounded_and_tells_what_it_evicts(root: Path) -> None:
    adapter = of_folder(root, cap="100KiB")
    listener = MOCK._RecordingListener()
    adapter.register_listener(listener)
    for number in range(60):
        store(adapter, {key_of(number): float(number)})
    assert sum(each.stat().st_size for each in frames(root)) <= 100 * 1024
    adapter._store.wait_until_quiet(PATIENCE_S)
    adapter._look()
    keys = [key_of(number) for number in range(60)]
    told = {key for each in listener.stored for key in each} - {key for each in listener.deleted for key in each}
    assert told == {key for key, is_there in zip(keys, there(adapter, keys), strict=True) if is_there}
    assert 0 < adapter.get_usage().total_bytes_used == 4 * NUM_FLOATS * len(told) <= 100 * 1024
    adapter.close()


def test_without_weights_another_process_finds_nothing(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        adapter = PagedKVAdapter({"root": str(root), "cap": "1MiB"})
        assert load(adapter, [key_of(1)]) == [None]
        store(adapter, {key_of(1): 1.0})
        assert load(adapter, [key_of(1)]) == [1.0]
        adapter.close()
    assert 'no "weights"' in caplog.text


def test_wrong_parameters_are_refused(root: Path) -> None:
    for params in ({}, {"root": str(root)}, {"root": str(root), "cap": "1MiB", "unknown": 1}):
        with pytest.raises(ConfigurationError):
            PagedKVAdapter(params)
