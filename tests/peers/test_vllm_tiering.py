"""Our tier below vLLM's real tiering manager: whatever happens to what it stored, no answer is wrong.

Stock vLLM 0.33 is driven through the same faults, which shows that they are such that wrong answers are possible.
"""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from vllm.v1.kv_offload.base import OffloadKey

from pagedkv.errors import ConfigurationError
from tests.peers import vllm_tiers
from tests.peers.vllm_tiers import CHUNK_NBYTES, STEPS, Tiers, keys_of, ours, stock
from tests.tiers.bodies import redis_server

NUM: Final = 8
FLIPS: Final = 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder


def files_of(root: Path) -> list[Path]:
    """All files of chunks, of either tier."""
    return sorted(each for each in root.rglob("*") if each.suffix in {".frame", ".bin"})


def flip(file: Path, place: int) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    file.write_bytes(content)


def stored(tier: dict[str, object], numbers: range = range(NUM)) -> None:
    """Store chunks, and end the engine."""
    with Tiers(tier) as tiers:
        assert tiers.store(keys_of(numbers)) == len(numbers)


def loaded(tier: dict[str, object], numbers: range = range(NUM)) -> list[bool | None]:
    """Start an engine, and ask for chunks."""
    with Tiers(tier) as tiers:
        return tiers.load(keys_of(numbers))


@pytest.mark.parametrize("configure", [ours, stock])
def test_what_was_stored_is_right_after_a_restart(root: Path, configure: Callable[[Path], dict[str, object]]) -> None:
    stored(configure(root))
    assert loaded(configure(root), range(NUM + 2)) == [True] * NUM + [None, None]


def test_stock_vllm_serves_a_flipped_bit_and_ours_does_not(root: Path) -> None:
    for configure, found in ((stock, False), (ours, None)):
        tier = configure(root / configure.__name__)
        stored(tier, range(4))
        file = next(each for each in files_of(root / configure.__name__) if number_in(each, 2))
        flip(file, 8 * (file.stat().st_size - 100))
        judged = loaded(tier, range(4))
        assert judged[2] is found, "one of four"
        assert False not in (*judged[:2], judged[3])


def number_in(file: Path, number: int) -> bool:
    """Whether a file is of this chunk, by the key in its name or in its header."""
    (key,) = keys_of([number])
    return key[:-4].hex() in file.name or key in file.read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_no_bit_that_flips_is_served(root: Path, seed: int) -> None:
    draw, tier = Random(seed), ours(root)
    stored(tier)
    found: list[bool | None] = []
    with Tiers(tier) as tiers:
        for _ in range(FLIPS):
            file = draw.choice(files_of(root))
            flip(file, draw.randrange(8 * file.stat().st_size))
            found += tiers.load(keys_of(range(NUM)))
            tiers.manager.primary_tier.reset_cache()
            tiers.store(keys_of(range(NUM)))
            tiers.manager.primary_tier.reset_cache()
    assert False not in found
    assert found.count(None) >= FLIPS // 2, "misses, since all that follows in a promotion is one"
    assert found.count(True) >= FLIPS


def become_a_folder(file: Path, _: Random) -> None:
    file.unlink()
    file.mkdir()


def become_a_link(file: Path, _: Random) -> None:
    file.unlink()
    file.symlink_to("/etc/hostname")


DAMAGE: Final[dict[str, Callable[[Path, Random], object]]] = {
    "truncated": lambda file, draw: os.truncate(file, draw.randrange(file.stat().st_size)),
    "empty": lambda file, _: os.truncate(file, 0),
    "longer": lambda file, _: os.truncate(file, file.stat().st_size + CHUNK_NBYTES),
    "zeros": lambda file, _: file.write_bytes(bytes(file.stat().st_size)),
    "another": lambda file, draw: shutil.copyfile(
        draw.choice([x for x in files_of(file.parents[2]) if x != file]), file
    ),
    "gone": lambda file, _: file.unlink(),
    "a folder": become_a_folder,
    "a link": become_a_link,
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("is_running", [False, True], ids=["before the start", "while it runs"])
def test_no_damaged_file_is_served(root: Path, kind: str, *, is_running: bool) -> None:
    draw, tier = Random(1), ours(root)
    stored(tier)
    victims = draw.sample(files_of(root), NUM // 2)
    wounded = {number for number in range(NUM) if any(number_in(each, number) for each in victims)}
    if is_running:
        with Tiers(tier) as tiers:
            for each in victims:
                DAMAGE[kind](each, draw)
            found = [tiers.load(keys_of([number]))[0] for number in range(NUM)]
    else:
        for each in victims:
            DAMAGE[kind](each, draw)
        with Tiers(tier) as tiers:
            found = [tiers.load(keys_of([number]))[0] for number in range(NUM)]
    assert found == [None if number in wounded else True for number in range(NUM)]


def test_a_damaged_entry_is_told_in_the_log_and_stored_anew(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = ours(root)
    stored(tier)
    flip(files_of(root)[0], 80_000)
    with Tiers(tier) as tiers:
        assert tiers.load(keys_of(range(NUM))).count(None) >= 1
        assert "refused what the medium returned: read: Refusal" in caplog.text
        assert tiers.tier._store.wait_until_quiet(60), "it is deleted first"
        tiers.store(keys_of(range(NUM)))
    assert loaded(tier) == [True] * NUM


@pytest.mark.parametrize("seed", range(2))
def test_no_engine_that_was_killed_leaves_a_wrong_chunk(root: Path, seed: int) -> None:
    draw, tier, first, told = Random(seed), ours(root, "64MiB"), 0, 0
    for _ in range(2):
        command = [sys.executable, vllm_tiers.__file__, json.dumps(tier), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, 20)):
                told = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        first = told + 4
        with Tiers(tier, num_chunks=2 * first + 64) as tiers:
            found = tiers.load(keys_of(range(first + 40)))
        assert False not in found
        assert found[:first] == [True] * first, "what was told to be stored is there"


def test_a_full_disk_loses_stores_and_no_answer_is_wrong(root: Path) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tier = ours(root)
    try:
        stored(tier, range(4))
        with Tiers(tier) as tiers:
            resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_NBYTES // 2, limits[1]))
            tiers.store(keys_of(range(4, NUM)))
            tiers.manager.primary_tier.reset_cache()
            found = tiers.load(keys_of(range(NUM)))
            assert False not in found
            assert found[4:] == [None] * 4
            assert found[:4].count(True) >= 2, "room for one write was made at most"
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        stored(tier)
        assert loaded(tier) == [True] * NUM
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_its_bytes_stay_within_the_cap_and_the_least_used_go_first(root: Path) -> None:
    cap = 20 * CHUNK_NBYTES
    with Tiers(ours(root, cap)) as tiers:
        for first in range(0, 80, 4):
            tiers.store(keys_of(range(first, first + 4)))
            tiers.manager.primary_tier.reset_cache()
            assert sum(each.stat().st_size for each in root.rglob("*") if each.is_file()) <= cap
        found = tiers.load(keys_of(range(80)))
    assert False not in found
    assert found[:40] == [None] * 40
    assert found[-4:] == [True] * 4


def test_what_vllm_touches_is_used(root: Path) -> None:
    with Tiers(ours(root, 20 * CHUNK_NBYTES)) as tiers:
        for first in range(0, 60, 4):
            tiers.store(keys_of(range(first, first + 4)))
            tiers.tier.touch(keys_of(range(4)), tiers.request())
        tiers.manager.primary_tier.reset_cache()
        assert tiers.load(keys_of(range(4))) == [True] * 4


def test_other_weights_and_other_layouts_are_misses(root: Path) -> None:
    stored(ours(root))
    assert loaded(ours(root, weights="cd" * 32)) == [None] * NUM
    changes: tuple[dict[str, Any], ...] = ({"model": "another"}, {"dtype": "bfloat16"})
    for changed in changes:
        with Tiers(ours(root), **changed) as tiers:
            assert tiers.load(keys_of(range(NUM))) == [None] * NUM
    assert loaded(ours(root)) == [True] * NUM


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_without_an_option_the_files_of_the_model_name_its_weights(root: Path, model: Path) -> None:
    tier = ours(root, weights=None)
    for weights, found in ((b"weights", None), (b"weights", True), (b"changed", None), (b"weights", True)):
        (model / "model.safetensors").write_bytes(weights)
        with Tiers(tier, model=str(model)) as tiers:
            assert tiers.load(keys_of(range(NUM))) == [found] * NUM
            if found is None:
                tiers.store(keys_of(range(NUM)))


@pytest.mark.parametrize("changed", [{}, {"dtype": "fp8_e4m3"}], ids=["no files", "fp8"])
def test_without_a_digest_nothing_outlives_the_process(
    root: Path, model: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    name = str(model) if changed else "owner/name"
    tier = ours(root, weights=None)
    for _ in range(2):
        with Tiers(tier, model=name, **changed) as tiers:
            assert tiers.load(keys_of(range(NUM))) == [None] * NUM
            tiers.store(keys_of(range(NUM)))
            tiers.manager.primary_tier.reset_cache()
            assert tiers.load(keys_of(range(NUM))) == [True] * NUM
    assert 'what this process stores ends with it: the option "weights" keeps it' in caplog.text


@pytest.mark.parametrize("forgets", [True, False])
def test_a_reset_ends_all_hits_on_what_was_before_it(root: Path, *, forgets: bool) -> None:
    tier = ours(root, forget_on_reset=forgets)
    with Tiers(tier) as tiers:
        tiers.store(keys_of(range(NUM)))
        tiers.manager.reset_cache()
        tiers.manager.on_reset_flushed()
        assert tiers.load(keys_of(range(NUM))) == [None if forgets else True] * NUM
        tiers.store(keys_of(range(100, 104)))
        tiers.manager.primary_tier.reset_cache()
        assert tiers.load(keys_of(range(100, 104))) == [True] * 4
    assert loaded(tier, range(100, 104)) == [None if forgets else True] * 4


def test_removals_are_told(root: Path) -> None:
    there: set[OffloadKey] = set()

    def follow() -> None:
        for event in tiers.events():
            there.difference_update(event.keys) if event.removed else there.update(event.keys)

    with Tiers(ours(root, 20 * CHUNK_NBYTES, enable_kv_events=True), has_events=True) as tiers:
        for first in range(0, 60, 4):
            tiers.store(keys_of(range(first, first + 4)))
            follow()
        assert tiers.tier._store.wait_until_quiet(60)
        is_there = tiers.tier._contains(keys_of(range(60)))
        assert 0 < sum(is_there) < 20
        right = {key for key, is_one in zip(keys_of(range(60)), is_there, strict=True) if is_one}
        for _ in range(STEPS):
            follow()
            if there == right:
                break
            tiers.step()
        assert there == right
        tiers.manager.reset_cache()
        follow()
        assert there == set()


def test_a_job_that_was_not_kept_whole_has_failed_and_is_no_event(root: Path) -> None:
    tier = ours(root, floor_nbytes=2**60, enable_kv_events=True)
    with Tiers(tier, has_events=True) as tiers:
        tiers.store(keys_of(range(4)))
        assert tiers.events() == []
        assert "cascade_job_failures" in str(tiers.manager.get_stats().data)


def test_a_hung_medium_costs_hits_and_no_step_waits(root: Path) -> None:
    """Another process holds the folder's lock: jobs end by their deadlines, as failures."""
    tier = ours(root, deadline_s=0.2, settings={"write_timeout_s": 0.2})
    stored(tier, range(4))
    with Tiers(tier) as tiers, (root / "usage").open("rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        tiers.store(keys_of(range(4, 8)))
        fcntl.flock(usage, fcntl.LOCK_UN)
        tiers.manager.primary_tier.reset_cache()
        found = tiers.load(keys_of(range(8)))
    assert found == [True] * 4 + [None] * 4


def test_it_stores_in_redis_and_in_object_stores(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    media = [{"object": f"file://{tmp_path}/objects"}]
    with redis_server(tmp_path) as url:
        media.append({"redis": url})
        for medium in media:
            tier = {**ours("", None), **medium}
            del tier["root"], tier["cap"]
            stored(tier)
            assert loaded(tier) == [True] * NUM


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"redis": "redis://localhost"}, "needs one of root, redis, object, got root, redis"),
        ({"root": None}, "needs one of root, redis, object, got none"),
        ({"cap": None}, "with a root needs a cap"),
        ({"cap": "many"}, "must be a size such as 16GiB"),
        ({"n_read_threads": 3}, "an option that a tier does not have: .*n_read_threads"),
        ({"weights": "/nowhere"}, "there are no weights in /nowhere"),
        ({"settings": {"colour": 1}}, "settings of a tier must be those of a StoreConfig"),
    ],
)
def test_bad_options_are_refused(root: Path, options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Tiers({**ours(root), **options})
