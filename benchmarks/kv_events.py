"""KV events on the wire: what a step costs the engine's thread, what the publisher's thread costs it, and a snapshot.

    python -m benchmarks.kv_events [--blocks N] [--json FILE]

The engine's thread drains the events of a step, copies what the stored blocks hold, and queues them. Encoding, sending
and answering are the publisher's. Both share the interpreter, so a loop of steps is timed with and without a publisher,
in seconds of the wall; all else is processor time of a thread. First a follower's index is compared with the space.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from typing import Final

import numpy as np

from benchmarks.machine import describe
from pagedkv import Allocation, BlockSpace, FullAttention, GroupSpec, Row, SpaceConfig
from pagedkv.events import EventFollower, EventPublisher, Snapshot, follow
from pagedkv.routing import IndexState, ReplicaIndex
from pagedkv.wire import BatchEncoder, changes_of, listed_pools

BLOCK_SIZE: Final = 16
GROUPS: Final[tuple[GroupSpec, ...]] = (FullAttention(BLOCK_SIZE),)
STORED: Final = (0, 1, 4, 64, 1024)
NUM_ROWS: Final = 256
NUM_STEPS: Final = 400
FORWARD_S: Final = 0.002
LOCAL: Final = "tcp://127.0.0.1:*"
MICROSECONDS: Final = 1e6
MILLISECONDS: Final = 1e3
PATIENCE_S: Final = 120.0
LONG: Final = 131_072


def new_space(num_blocks: int, *, events: bool = True) -> BlockSpace:
    """Build a space without a watermark."""
    return BlockSpace(SpaceConfig(GROUPS, num_blocks, max_sequences=1024, watermark=0.0, events=events))


def serve(space: BlockSpace, rng: np.random.Generator, num_tokens: int) -> None:
    """Compute a prompt of random tokens, and free it."""
    answer = space.allocate(rng.integers(0, 100_000, num_tokens, dtype=np.int32))
    assert isinstance(answer, Allocation)
    space.acknowledge(space.plan_step().step_id)
    space.free([answer.row])


@contextmanager
def new_publisher() -> Iterator[EventPublisher]:
    """Publish at any free ports."""
    with EventPublisher(LOCAL, LOCAL, groups=GROUPS) as publisher:
        yield publisher


def check() -> None:
    """Compare a follower's index with the space."""
    space, rng, index = new_space(3000), np.random.default_rng(1), ReplicaIndex(GROUPS)
    index.add_replica("a")
    with new_publisher() as publisher:
        publisher.serve_snapshots(lambda: publisher.snapshot(space))
        with EventFollower(publisher.endpoint, publisher.replay_endpoint, GROUPS) as follower:
            ends_at = perf_counter() + PATIENCE_S
            num_served = 0
            while num_served < 100 or index.view("a").num_blocks != len(space.stored_blocks()):
                assert perf_counter() < ends_at, index.view("a")
                if num_served < 100:
                    serve(space, rng, 1000)
                    publisher.publish(space.drain_events(), space)
                    num_served += 1
                for message in follower.poll(0.01):
                    follow(index, "a", message, 0.0)
    assert index.state("a") is IndexState.EXACT


def cost_of_a_step(num_stored: int) -> float:
    """Measure the engine's thread, in microseconds of processor time, for a step that stored so many blocks.

    As many were evicted.
    """
    space, rng, seconds = new_space(4096), np.random.default_rng(2), []
    with new_publisher() as publisher:
        for _ in range(200 if num_stored < 100 else 40):
            if num_stored:
                serve(space, rng, num_stored * BLOCK_SIZE + 1)
            begun = thread_time()
            if space.has_events:
                publisher.publish(space.drain_events(), space)
            seconds.append(thread_time() - begun)
            time.sleep(0.001)  # as an engine's thread that waits for its device
    return MICROSECONDS * float(np.median(seconds))


def seconds_of_steps(hand_over: Callable[[BlockSpace], None], *, events: bool) -> float:
    """Measure a step of 256 decoding rows: bookkeeping, and a wait for the device in which others may run."""
    space, rng = new_space(40_000, events=events), np.random.default_rng(3)
    rows: list[Row] = []
    for _ in range(NUM_ROWS):
        answer = space.allocate(rng.integers(0, 100_000, 64, dtype=np.int32))
        assert isinstance(answer, Allocation)
        rows.append(answer.row)
    space.acknowledge(space.plan_step().step_id)
    seconds = []
    for _ in range(NUM_STEPS):
        tokens = rng.integers(0, 100_000, NUM_ROWS, dtype=np.int32)
        begun = perf_counter()
        space.append(rows, tokens)
        plan = space.plan_step()
        time.sleep(FORWARD_S)
        space.acknowledge(plan.step_id)
        hand_over(space)
        seconds.append(perf_counter() - begun)
    return float(np.median(seconds))


def slowdown() -> dict[str, float]:
    """Measure a step without events, and with a publisher, in milliseconds."""
    plain = seconds_of_steps(lambda _: None, events=False)
    with new_publisher() as publisher:

        def hand_over(space: BlockSpace) -> None:
            if space.has_events:
                publisher.publish(space.drain_events(), space)

        published = seconds_of_steps(hand_over, events=True)
    return {"without": MILLISECONDS * plain, "with": MILLISECONDS * published}


def filled(num_blocks: int) -> BlockSpace:
    """Fill a space with prompts of 131,072 tokens."""
    space, rng = new_space(num_blocks + 1), np.random.default_rng(4)
    for _ in range(num_blocks * BLOCK_SIZE // LONG):
        serve(space, rng, LONG)
    space.drain_events()
    return space


def snapshot(num_blocks: int) -> dict[str, float]:
    """Measure a snapshot of so many blocks: copied, encoded, sent, and in an index."""
    space = filled(num_blocks)
    begun = thread_time()
    listed = listed_pools(space)
    copied = thread_time()
    parts = list(BatchEncoder(GROUPS, "life").snapshot(0.0, listed))
    encoded = thread_time()
    figures = {
        "num_blocks": float(len(listed[0].blocks)),
        "copy_ms": MILLISECONDS * (copied - begun),
        "encode_s": encoded - copied,
        "mib": sum(map(len, parts)) / 2**20,
    }
    del parts
    index = ReplicaIndex(GROUPS, num_expected=num_blocks)
    index.add_replica("a")
    with new_publisher() as publisher:
        publisher.serve_snapshots(lambda: publisher.snapshot(space))
        with EventFollower(publisher.endpoint, publisher.replay_endpoint, GROUPS) as follower:
            begun, is_there = perf_counter(), False
            while not is_there:
                assert perf_counter() < begun + PATIENCE_S
                for message in follower.poll(1.0):
                    follow(index, "a", message, 0.0)
                    is_there |= isinstance(message, Snapshot)
            figures["until_indexed_s"] = perf_counter() - begun
    assert index.view("a").num_blocks == figures["num_blocks"]
    return figures


def encoding_rate() -> dict[str, float]:
    """Measure the publisher's thread: microseconds to encode the events of a step by stored blocks, one chain each."""
    encoder, rng, us = BatchEncoder(GROUPS, "life"), np.random.default_rng(5), {}
    for num_stored in STORED[1:]:
        space, seconds = new_space(4096), []
        for _ in range(50):
            serve(space, rng, num_stored * BLOCK_SIZE + 1)
            changes = changes_of(space, space.drain_events())
            begun = thread_time()
            encoder.batch(0.0, changes)
            seconds.append(thread_time() - begun)
        us[str(num_stored)] = MICROSECONDS * float(np.median(seconds))
    return us


def main() -> None:
    """Check, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of the snapshot (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    check()
    engine = {str(num_stored): cost_of_a_step(num_stored) for num_stored in STORED}
    for number, us in engine.items():
        print(f"engine's thread, a step that stored {number} blocks: {us:,.1f} us")
    encoding = encoding_rate()
    for number, us in encoding.items():
        print(f"publisher's thread, the same: {us:,.0f} us of encoding ({number} blocks)")
    steps = slowdown()
    print(f"256 rows, 2 ms of waiting: {steps['without']:.3f} ms a step without events, {steps['with']:.3f} with")
    whole = snapshot(given.blocks)
    print(
        f"snapshot of {whole['num_blocks']:,.0f} blocks: {whole['copy_ms']:.0f} ms of the engine's thread, "
        f"{whole['encode_s']:.1f} s of encoding, {whole['mib']:.0f} MiB, indexed after {whole['until_indexed_s']:.1f} s"
    )
    if given.json is not None:
        found = {"engine_us": engine, "encoding_us": encoding, "step_ms": steps, "snapshot": whole}
        given.json.write_text(json.dumps({"machine": describe(), **found}, indent=1))


if __name__ == "__main__":
    main()
