"""Faults on real media: a store on threads over a folder or a Redis server; content is damaged and calls fail.

``python -m tests.tiers.real_faults --operations 10000``
"""

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from pagedkv.memory.tiers.body import Body
from pagedkv.memory.tiers.config import StoreConfig
from pagedkv.memory.tiers.frame import write_frame
from pagedkv.memory.tiers.store import TierStore
from tests.tiers.bodies import TroubledBody, make_body, redis_server
from tests.tiers.examples import IDENTITY, other_identities, parts_of, some_runs

CAP: Final = 40_000
NUM_SEEDS: Final = 12
SECONDS: Final = 60.0


def damage(body: Body, rng: random.Random) -> str:
    """Change one entry at rest; return how."""
    entries = sorted(body.scan(), key=lambda each: each.key)
    if not entries:
        return "nothing to damage"
    chosen = rng.choice(entries)
    frame = bytearray(body.read(chosen.key, chosen.nbytes, 1.0) or b"")
    kind = rng.choice(["flipped", "cut", "swapped", "deleted", "other weights"])
    body.delete(chosen.key, 1.0)
    if kind == "flipped" and frame:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del frame[rng.randrange(len(frame) + 1) :]
    elif kind == "swapped":
        other = rng.choice(entries)
        frame = bytearray(body.read(other.key, other.nbytes, 1.0) or b"")
    elif kind == "other weights":
        run = some_runs(1, seed=99)[0]
        frame = bytearray(write_frame(other_identities()["model weights"], run, parts_of(run)))
    if kind != "deleted" and frame:
        body.write(chosen.key, [bytes(frame)], 1.0)
    return kind


def run_faults(kind: str, folder: Path, url: str, num_operations: int, seed: int = 0) -> Counter[str]:
    """Store, load, damage, fail and restart at random. Raises AssertionError at a wrong answer or one that is late."""
    rng, seen = random.Random(seed), Counter[str]()
    config = StoreConfig(CAP, 200, admission="always", breaker_failures=3, breaker_pause_s=0.01)
    body = TroubledBody(make_body(kind, folder, url, IDENTITY.fingerprint, CAP))
    store = TierStore(body, IDENTITY, config)
    for _ in range(num_operations):
        operation = rng.choices(["offer", "load", "damage", "fail", "recover", "restart"], [30, 50, 8, 3, 8, 1])[0]
        seen[operation] += 1
        runs = some_runs(rng.randint(1, 6), seed=rng.randrange(NUM_SEEDS))
        if operation == "offer":
            store.offer(runs, [parts_of(run) for run in runs])
        elif operation == "load":
            result = store.load(runs, rng.choice([0.001, 0.05, 1.0])).wait(SECONDS)
            for run, parts in zip(runs, result.parts, strict=False):
                assert tuple(map(bytes, parts)) == parts_of(run), "a wrong answer"
            seen[f"load: {result.cause}"] += 1
            seen["runs served"] += result.num_runs
        elif operation == "damage":
            seen[damage(body.body, rng)] += 1
        elif operation == "fail":
            body.error = rng.choice([OSError("failed"), TimeoutError("slow")])
        elif operation == "recover":
            body.error = None
        else:
            body.error = None
            store.close()
            seen.update({f"refused: {reason}": count for reason, count in store.refusals.items()})
            body = TroubledBody(make_body(kind, folder, url, IDENTITY.fingerprint, CAP))
            store = TierStore(body, IDENTITY, config)
    body.error = None
    store.wait_until_quiet(SECONDS)
    store._core.check()
    assert store.statistics().num_waiting == 0, "a load is stuck"
    store.close()
    return seen


def main() -> None:
    """Run on a folder and on a Redis server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as url:
        for kind in ("folder", "redis"):
            seen = run_faults(kind, Path(folder), url, given.operations)
            print(f"{kind}: {given.operations} operations, no wrong answer, none late: {dict(sorted(seen.items()))}")  # noqa: T201


if __name__ == "__main__":
    main()
