"""Figures of tiers: a folder against its disk, verification, Redis against a bare client, the index.

``python -m benchmarks.tiers --folder FOLDER --json out/tiers.json``. Variants take turns in one run, and the ratios of
their shortest times are the figures: other work on the machine only adds to them. What is read is compared with what
was written before anything is timed.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from pagedkv.tiers.body import Body
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import OpenFrame, frame_pieces, open_frame
from pagedkv.tiers.identity import GroupLayout, Identity, ModelIdentity, runs_of
from pagedkv.tiers.index import StoreIndex
from pagedkv.tiers.redis_body import RedisBody
from pagedkv.tiers.store import TierStore
from pagedkv.tiers.words import StoreConfig, words_of

NBYTES: Final = 2 * 2**20
BLOCK_SIZE: Final = 16
IDENTITY: Final = Identity(
    (GroupLayout("full", BLOCK_SIZE, "uint8", "NC", (BLOCK_SIZE, NBYTES // BLOCK_SIZE), (NBYTES // BLOCK_SIZE, 1)),),
    ModelIdentity("benchmark", bytes(32)),
)
NUM_FRAMES: Final = 16
NUM_ENTRIES: Final = 1_000_000
NUM_KEYS: Final = 8192


def shortest(variants: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, float]:
    """Time variants in turns; return the shortest seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(num_rounds):
        for name, variant in variants.items():
            begun = time.perf_counter()
            variant()
            seconds[name].append(time.perf_counter() - begun)
    return {name: min(each) for name, each in seconds.items()}


def measure_body(body: Body, raw: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, float]:
    """Time writes and reads of frames through a body, with and without verification, and its raw counterparts."""
    runs = runs_of(range(BLOCK_SIZE * NUM_FRAMES), BLOCK_SIZE, 1)
    parts = [[np.random.default_rng(number).bytes(NBYTES)] for number in range(NUM_FRAMES)]
    pieces = [frame_pieces(IDENTITY, run, own) for run, own in zip(runs, parts, strict=True)]
    nbytes = sum(len(piece) for piece in pieces[0])

    def write() -> None:
        for run, own in zip(runs, parts, strict=True):
            body.write(run.key, frame_pieces(IDENTITY, run, own), 60.0)

    def write_unchecked() -> None:
        for run, own in zip(runs, pieces, strict=True):
            body.write(run.key, own, 60.0)

    def read_unchecked() -> None:
        for run in runs:
            assert body.read(run.key, nbytes, 60.0) is not None

    def read() -> None:
        for run, own in zip(runs, parts, strict=True):
            frame = body.read(run.key, nbytes, 60.0)
            assert frame is not None
            opened = open_frame(frame)
            assert isinstance(opened, OpenFrame)
            assert opened.compare(IDENTITY, run) is None
            assert opened.parts[0].nbytes == len(own[0])

    write()
    for run, own in zip(runs, parts, strict=True):
        opened = open_frame(body.read(run.key, nbytes, 60.0) or b"")
        assert isinstance(opened, OpenFrame)
        assert opened.parts[0] == own[0], "a wrong answer"
    timed = {"write": write, "write unchecked": write_unchecked, "read": read, "read unchecked": read_unchecked}
    return shortest({**timed, **raw}, num_rounds)


def measure_store(body: Body, num_rounds: int, what: str = "") -> dict[str, float]:
    """Time writes and reads of frames through a store and its threads."""
    runs = runs_of(range(BLOCK_SIZE * NUM_FRAMES), BLOCK_SIZE, 1)
    parts = [[np.random.default_rng(number).bytes(NBYTES)] for number in range(NUM_FRAMES)]
    config = StoreConfig(2**40, 1000, admission="always")
    with TierStore(body, IDENTITY, config) as store:

        def write() -> None:
            store.offer(runs, parts)
            assert store.wait_until_quiet(60.0)

        def read() -> None:
            assert store.load(runs, 60.0).wait(60.0).num_runs == NUM_FRAMES

        names = f"store write{what}", f"store read{what}"
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(num_rounds):
            store.reset()
            assert store.wait_until_quiet(60.0)
            for name, call in zip(names, (write, read), strict=True):
                begun = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - begun)
        loaded = store.load(runs, 60.0).wait(60.0)
        assert all(bytes(found[0]) == own[0] for found, own in zip(loaded.parts, parts, strict=True)), "a wrong answer"
    return {name: min(each) for name, each in seconds.items()}


def raw_folder(folder: Path, *, direct: bool) -> dict[str, Callable[[], None]]:
    """Write and read as many bytes in one aligned buffer, with nothing else."""
    import mmap  # noqa: PLC0415

    aligned = mmap.mmap(-1, NBYTES)
    aligned.write(np.random.default_rng(9).bytes(NBYTES))
    flags = os.O_DIRECT if direct else 0

    def write() -> None:
        for number in range(NUM_FRAMES):
            descriptor = os.open(folder / f"raw{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
            os.write(descriptor, aligned)
            os.close(descriptor)

    def read() -> None:
        for number in range(NUM_FRAMES):
            descriptor = os.open(folder / f"raw{number}", os.O_RDONLY | flags)
            os.readv(descriptor, [aligned])
            os.close(descriptor)

    return {"raw write": write, "raw read": read}


def raw_redis(url: str) -> dict[str, Callable[[], None]]:
    """Set and get as many bytes by a bare client, one call each and all in one pipeline."""
    import redis  # noqa: PLC0415

    client: Any = redis.Redis.from_url(url)
    content = np.random.default_rng(9).bytes(NBYTES)

    def write() -> None:
        pipe = client.pipeline(transaction=False)
        for number in range(NUM_FRAMES):
            pipe.set(f"raw{number}", content)
        pipe.execute()

    def read() -> None:
        pipe = client.pipeline(transaction=False)
        for number in range(NUM_FRAMES):
            pipe.get(f"raw{number}")
        pipe.execute()

    return {"raw write": write, "raw read": read}


def measure_index(num_rounds: int) -> dict[str, float]:
    """Time lookups of keys in an index that is half full; all are found."""
    index = StoreIndex(NUM_ENTRIES, "lru")
    keys = np.random.default_rng(0).integers(0, 256, (NUM_ENTRIES // 2, 32), np.uint8)
    for number in range(len(keys)):
        index.let_go(_published(index, keys[number].tobytes()))
    asked = [keys[np.random.default_rng(number).permutation(len(keys))[:NUM_KEYS]] for number in range(num_rounds)]
    rounds = iter(asked)

    def look_up() -> None:
        _, num_leading = index.look_up(words_of(next(rounds)))
        assert num_leading == NUM_KEYS

    return shortest({"look up 8,192 keys": look_up}, num_rounds) | {"bytes an entry": index.nbytes / NUM_ENTRIES}


def _published(index: StoreIndex, key: bytes) -> int:
    entry = index.take(key, 1)
    index.publish(entry, 0)
    return entry


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one if left out")
    parser.add_argument("--redis", help="URL of a server; left out: Redis is not measured")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pagedkv-tiers-", dir=given.folder))
    figures: dict[str, dict[str, float]] = {}
    try:
        for direct in (True, False):
            body = FolderBody(folder / f"root{direct}", IDENTITY.fingerprint, 2**40, direct=direct)
            name = "folder past the page cache" if body._direct else "folder through the page cache"  # noqa: SLF001
            figures[name] = measure_body(body, raw_folder(folder, direct=body._direct), given.rounds)  # noqa: SLF001
            stored = FolderBody(folder / f"store{direct}", IDENTITY.fingerprint, 2**40, direct=direct)
            figures[name] |= measure_store(stored, given.rounds)
            unchecked = FolderBody(folder / f"unchecked{direct}", IDENTITY.fingerprint, 2**40, direct=direct)
            unchecked.is_trusted = True  # its frames carry no check
            figures[name] |= measure_store(unchecked, given.rounds, " unchecked")
        if given.redis:
            figures["redis"] = measure_body(
                RedisBody(given.redis, IDENTITY.fingerprint), raw_redis(given.redis), given.rounds
            )
            body_of_store = RedisBody(given.redis, IDENTITY.fingerprint, prefix="store")
            figures["redis"] |= measure_store(body_of_store, given.rounds)
        figures["index"] = measure_index(max(9, given.rounds))
    finally:
        shutil.rmtree(folder)
    _print(figures)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"machine": describe(), **figures}, indent=1) + "\n")


def _print(figures: dict[str, dict[str, float]]) -> None:
    table = Table("what", "ms", "GB/s", "of raw", "of unchecked")
    for name, seconds in figures.items():
        for what, each in seconds.items():
            if name == "index":
                table.add_row(what, f"{each * 1e3:.2f}" if "key" in what else f"{each:.1f} bytes", "", "", "")
                continue
            verb = "write" if "write" in what else "read"
            ratios = _ratios(seconds, what, verb)
            table.add_row(f"{name}: {what}", f"{each * 1e3:.1f}", f"{NUM_FRAMES * NBYTES / each / 1e9:.2f}", *ratios)
    Console().print(table)


def _ratios(seconds: dict[str, float], what: str, verb: str) -> Sequence[str]:
    of_raw = f"{seconds[f'raw {verb}'] / seconds[what]:.2f}"
    unchecked = seconds.get(f"{what} unchecked")
    return of_raw, "" if unchecked is None else f"{unchecked / seconds[what]:.2f}"


if __name__ == "__main__":
    main()
