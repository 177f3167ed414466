"""Hits of a policy by a production pool, several points side by side.

Hits of an eviction policy at one capacity, through the production pool, its eviction and its prefix index.

The loop does not depend on the policy. It looks up the leading blocks of each request by their digests and references
them; it acquires and names the rest; then it releases all of them, tail first. The production code
(:mod:`pagedkv.blocks`) decides which blocks are evicted, and in which order.

Points of a curve, measured in parallel by threads of one process.

The compiled loops release Python's lock. Threads share the references of the trace, so only the caches take additional
memory. Points run in parallel while their caches together are no larger than the largest alone, so a curve takes as
much memory with many threads as with one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from pagedkv.blocks import (
    DIGEST_WORDS,
    FETCHED_AHEAD,
    NULL_BLOCK,
    BlockPool,
    EvictionPolicy,
    PoolArrays,
    add_to_path,
    expect,
    find_child,
    note_request,
    policy_named,
    release,
    reuse,
    set_clock,
)
from pagedkv.compilation.compiled import compiled, compiled_aside, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array, Uint32Array
from pagedkv.contract.space_config import DEFAULT_EVICTION
from pagedkv.planner.capacity.references import BlockReferences, write_path

__all__ = [
    "NAME",
    "Pause",
    "Point",
    "PromptScratch",
    "go_on",
    "hits_by_request",
    "measure_side_by_side",
    "new_scratch",
    "pool_hits",
    "serve_prompt",
    "serve_trace",
    "write_digest",
]
DEFAULT: Final = policy_named(DEFAULT_EVICTION)
NAME: Final = 1  # name of the only group
REQUESTS_A_CALL: Final = 4096
"""Requests served by one call of the loop: some 10 ms, so that Ctrl-C takes effect soon."""
MICROSECONDS: Final = 10**6
WORD: Final = 2**32 - 1
SPREAD: Final = 0x9E3779B1  # odd, so that the product, a 32-bit word, is distinct for each content


class PromptScratch(NamedTuple):
    """Buffers for one prompt, since compiled loops do not allocate.

    Args:
        contents: int32 ``[longest prompt]``, its blocks by their numbers in the tree.
        block_ids: int32 ``[longest prompt]``, its blocks in the pool.
        digest: uint32 ``[8]``, the digest to look up.
    """

    contents: Int32Array
    block_ids: Int32Array
    digest: Uint32Array


class Prompts(NamedTuple):
    """All prompts of a trace, for a compiled loop.

    Args:
        parents: int32 ``[1 + blocks]``, the tree of blocks.
        last_blocks: int32 ``[requests]``, the last block of each prompt and of the kept blocks of its answer.
        num_blocks: int32 ``[requests]``, blocks of each prompt and of its answer's kept blocks.
        arrivals_us: int64 ``[requests]``, arrival of each; 0 in traces without times.
        output_lengths: int64 ``[requests]``, tokens generated for each.
    """

    parents: Int32Array
    last_blocks: Int32Array
    num_blocks: Int32Array
    arrivals_us: Int64Array
    output_lengths: Int64Array


Pause: TypeAlias = Callable[[], None]
"""Called by a measurement every few milliseconds; raises an exception to end the measurement."""


def go_on() -> None:
    """Never stop a measurement; used by measurements that run alone."""


def pool_hits(
    references: BlockReferences, capacity: int, policy: EvictionPolicy = DEFAULT, pause: Pause = go_on
) -> int:
    """Count the hits of a pool of ``capacity`` blocks and the null block. O(references), 15 to 100 ns each.

    Args:
        references: the trace.
        capacity: blocks of the cache, at least 1. Blocks beyond the number of distinct ones would stay unused, so they
            are not allocated.
        policy: eviction policy.
        pause: called every few milliseconds; its exception ends the count.
    """
    return int(hits_by_request(references, capacity, policy, pause).sum(dtype=np.int64))


def hits_by_request(
    references: BlockReferences, capacity: int, policy: EvictionPolicy = DEFAULT, pause: Pause = go_on
) -> Int32Array:
    """Count as :func:`pool_hits` does, request by request: int32 ``[num_requests]``."""
    num_usable = min(capacity, references.num_unique_blocks)
    return serve_trace(BlockPool("cache", num_usable + 1, block_size=1, policy=policy), references, pause)


def serve_trace(pool: BlockPool, references: BlockReferences, pause: Pause = go_on) -> Int32Array:
    """Serve a trace with an empty pool of one-token blocks; return the hits of each request. O(references)."""
    scratch = new_scratch(references)
    hits = np.zeros(references.num_requests, np.int32)
    prompts = Prompts(
        references.parents,
        references.last_blocks,
        references.num_blocks,
        np.rint(references.arrivals_s * MICROSECONDS).astype(np.int64),
        references.output_lengths,
    )
    for first in range(0, references.num_requests, REQUESTS_A_CALL):
        pause()
        stop = min(first + REQUESTS_A_CALL, references.num_requests)
        _serve_prompts(pool.arrays, scratch, prompts, pool.num_usable, hits[:stop], first)
    return hits


def new_scratch(references: BlockReferences) -> PromptScratch:
    """Allocate buffers for the longest prompt of a trace."""
    return PromptScratch(
        contents=np.zeros(references.longest_prompt, np.int32),
        block_ids=np.zeros(references.longest_prompt, np.int32),
        digest=np.zeros(DIGEST_WORDS, np.uint32),
    )


@compiled_aside
def _serve_prompts(  # noqa: PLR0913, PLR0917 - a compiled loop takes arrays and numbers separately
    pool: PoolArrays, scratch: PromptScratch, prompts: Prompts, num_usable: int, hits: Int32Array, first: int
) -> None:
    """Serve requests from ``first`` on, one after the other, as far as ``hits`` has room; write their hits."""
    for request in range(first, len(hits)):
        num_blocks = prompts.num_blocks[request]
        if prompts.arrivals_us[request] > 0:
            set_clock(pool.counts, prompts.arrivals_us[request])
        write_path(prompts.parents, prompts.last_blocks[request], scratch.contents[:num_blocks])
        num_outputs = prompts.output_lengths[request]
        hits[request] = serve_prompt(pool, scratch, min(num_blocks, num_usable), num_outputs)


@compiled
def serve_prompt(pool: PoolArrays, scratch: PromptScratch, num_blocks: int, num_outputs: int) -> int:
    """Serve the first blocks of a prompt, at most those that fit the pool; return the number of hits."""
    num_hits = _reuse_leading(pool, scratch, num_blocks)
    for index in range(num_hits, num_blocks):
        expect(pool, _first_word(scratch.contents[min(index + FETCHED_AHEAD, num_blocks - 1)]))
        write_digest(scratch.digest, scratch.contents[index])
        add_to_path(pool, NAME, scratch.digest, scratch.block_ids, index)
    note_request(pool, scratch.block_ids[:num_blocks], num_outputs)
    for index in range(num_blocks - 1, -1, -1):
        release(pool, scratch.block_ids[index], 0)
    return num_hits


@compiled
def _reuse_leading(pool: PoolArrays, scratch: PromptScratch, num_blocks: int) -> int:
    """Take a reference to each leading block that is cached; return their number."""
    parent = NULL_BLOCK
    for index in range(num_blocks):
        write_digest(scratch.digest, scratch.contents[index])
        block = find_child(pool, NAME, scratch.digest, parent)
        if block == NULL_BLOCK:
            return index
        reuse(pool, block)
        scratch.block_ids[index] = parent = block
    return num_blocks


@compiled
def write_digest(digest: Uint32Array, content: int) -> None:
    """Write a unique substitute for the SHA-256 of a chain: the number of its last block, spread over the words."""
    digest[0] = _first_word(content)
    digest[1] = content


@inlined
def _first_word(content: int) -> int:
    return int(content) * SPREAD & WORD


class StoppedError(Exception):
    """Ends a measurement whose result is no longer needed."""


class Point(NamedTuple):
    """One measurement.

    Args:
        num_blocks: blocks of its cache.
        measure: counts the hits, in all and by parts; calls its argument every few milliseconds.
    """

    num_blocks: int
    measure: Callable[[Pause], Int64Array]


def measure_side_by_side(points: Sequence[Point], num_threads: int, show: Callable[[int], None]) -> list[Int64Array]:
    """Measure points, the largest first. After a failure, stop the others and raise the first error.

    Args:
        points: in any order.
        num_threads: most points that run at a time.
        show: called after each point with the number of finished points.

    Returns:
        The hits of each point.
    """
    waiting = sorted(range(len(points)), key=lambda place: points[place].num_blocks)
    running: dict[Future[Int64Array], int] = {}
    hits: dict[int, Int64Array] = {}
    room = max((point.num_blocks for point in points), default=0)
    is_over = Event()

    def pause() -> None:
        if is_over.is_set():
            raise StoppedError

    with ThreadPoolExecutor(num_threads) as threads:
        try:
            while waiting or running:
                taken = sum(points[place].num_blocks for place in running.values())
                for place in _chosen(points, waiting, num_threads - len(running), room - taken):
                    waiting.remove(place)
                    running[threads.submit(points[place].measure, pause)] = place
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    hits[running.pop(done)] = done.result()
                    show(len(points) - len(waiting) - len(running))
        finally:
            is_over.set()
    return [hits[place] for place in range(len(points))]


def _chosen(points: Sequence[Point], waiting: Sequence[int], num_threads: int, room: int) -> list[int]:
    """Choose the points to start: those with the largest caches that fit together."""
    chosen: list[int] = []
    for place in reversed(waiting):
        if len(chosen) < num_threads and points[place].num_blocks <= room:
            chosen.append(place)
            room -= points[place].num_blocks
    return chosen
