"""Real replicas on Ray Serve, the same requests by three routers: ours, Ray's own prefix router, and Ray's default.

    python -m benchmarks.cluster [--replicas 2] [--conversations 24] [--turns 6] [--json FILE]

Conversations of the demonstration's model take turns; each turn has the prompt and the answer of the turn before it.
Conversations of one kind share a beginning. The caches of all replicas together hold about two thirds of what is asked
again, so that it matters that evicted content is known to be gone. Ray's prefix router (``PrefixCacheAffinityRouter``
of ``ray.serve.llm``) keeps a tree of characters, whatever was evicted.
"""

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from benchmarks.machine import describe
from pagedkv.cluster import ClusterSpec, ReplicaSpec, ReplicatedEngine, deploy, shut_down
from pagedkv.engine import EngineConfig, Intent, SamplingParams

RAYS_PREFIX: Final = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
)
RAYS_DEFAULT: Final = "ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter"
ROUTERS: Final[dict[str, str | None]] = {"pagedkv": None, "ray, prefix": RAYS_PREFIX, "ray, default": RAYS_DEFAULT}
BLOCK_SIZE: Final = 8
NUM_KINDS: Final = 4
SHARED_TOKENS: Final = 160
TURN_TOKENS: Final = 64
ANSWER_TOKENS: Final = 16
PAUSE_S: Final = 2.0
LEAST_TOKEN, NUM_TOKENS = 5, 280


@dataclass(frozen=True)
class Row:
    """What one router came to."""

    router: str
    hit_ratio: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    num_requests: int
    seconds: float


@dataclass(frozen=True)
class Answered:
    """One request: tokens of its prompt and those of them that were hits, and seconds to its first token."""

    num_tokens: int
    num_hit: int
    first_s: float


async def _converse(engine: ReplicatedEngine, number: int, turns: int) -> list[Answered]:
    """Hold one conversation; its tokens depend on its number alone."""
    random = Random(number)
    shared = Random(number % NUM_KINDS)
    prompt = [LEAST_TOKEN + shared.randrange(NUM_TOKENS - LEAST_TOKEN) for _ in range(SHARED_TOKENS)]
    answered = []
    await asyncio.sleep(random.uniform(0, PAUSE_S))
    for _ in range(turns):
        prompt += [LEAST_TOKEN + random.randrange(NUM_TOKENS - LEAST_TOKEN) for _ in range(TURN_TOKENS)]
        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        began_s = time.perf_counter()
        stream = engine.generate(prompt, params, intent=Intent(), deadline_s=None)
        await stream.take()
        first_s = time.perf_counter() - began_s
        output = await stream.output()
        answered.append(Answered(len(prompt), output.num_cached_tokens, first_s))
        prompt += output.token_ids
        await asyncio.sleep(random.expovariate(1 / PAUSE_S))
    return answered


async def _converse_all(engine: ReplicatedEngine, conversations: int, turns: int) -> list[Answered]:
    engine.start(1000, lambda _: None)
    by_conversation = await asyncio.gather(*(_converse(engine, number, turns) for number in range(conversations)))
    return [each for one in by_conversation for each in one]


def measure(name: str, replicas: int, conversations: int, turns: int) -> Row:
    """Start replicas behind a router, and serve all conversations."""
    asked = conversations * (TURN_TOKENS + ANSWER_TOKENS) * turns + NUM_KINDS * SHARED_TOKENS
    num_blocks = 1 + asked * 2 // 3 // replicas // BLOCK_SIZE
    engine = EngineConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, self_test=False, max_sequences=32)
    try:
        cluster = deploy(ClusterSpec(ReplicaSpec(None, "float32", engine), replicas, router=ROUTERS[name]))
        began_s = time.perf_counter()
        answered = asyncio.run(_converse_all(cluster, conversations, turns))
        seconds = time.perf_counter() - began_s
    finally:
        shut_down()
    first_ms = np.array([1000 * each.first_s for each in answered])
    hits = sum(each.num_hit for each in answered) / sum(each.num_tokens for each in answered)
    p50, p99 = np.percentile(first_ms, [50, 99]).tolist()
    return Row(name, hits, p50, p99, len(answered), seconds)


def main() -> None:
    """Measure all routers, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(name, arguments.replicas, arguments.conversations, arguments.turns) for name in arguments.routers]
    print(f"{'router':14} {'hits':>7} {'first token p50':>16} {'p99':>9} {'requests':>9} {'seconds':>8}")
    for row in rows:
        print(
            f"{row.router:14} {100 * row.hit_ratio:6.1f}% {row.first_token_p50_ms:13.0f} ms "
            f"{row.first_token_p99_ms:6.0f} ms {row.num_requests:9} {row.seconds:8.1f}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
