"""Hits of a trace in one pool: of a policy by the production pool, of LRU and the optimum without a simulation.

A policy is replayed at one capacity, through the production pool, its eviction and its prefix index. The loop does not
depend on the policy. It looks up the leading blocks of each request by their digests and references them; it acquires
and names the rest; then it releases all of them, tail first. The production code (:mod:`pagedkv.blocks`) decides which
blocks are evicted, and in which order.

Points of a curve are measured in parallel by threads of one process. The compiled loops release Python's lock. Threads
share the references of the trace, so only the caches take additional memory. Points run in parallel while their caches
together are no larger than the largest alone, so a curve takes as much memory with many threads as with one.

LRU and the optimum are counted without a simulation of the cache, by prefix sums of changing weights: a Fenwick tree
(Peter Fenwick, "A New Data Structure for Cumulative Frequency Tables", Software: Practice and Experience 24(3), 1994).
Place i of the tree has the sum of ``i & -i`` weights (the lowest set bit of i), the last of which is number i - 1.

LRU is counted at every capacity at once, by stack distances. Order all blocks by how recently they were used, and those
of one request head first. For every C, a cache of C blocks has the first C of this line (Mattson, Gecsei, Slutz and
Traiger, "Evaluation Techniques for Storage Hierarchies", IBM Systems Journal 9(2), 1970). So a request need not be
replayed at each capacity: at capacity C it hits those of its blocks that are at place C or before. A block's place on
arrival is its *stack distance*.

Proof that this holds here too, after a request for the n blocks R:

* The line becomes R, head first, followed by the old line without R.
* If n < C, the cache keeps R and evicts the least recent of its other blocks until C - n are left. They are the first
  C - n of the line without R, since those were among the first C of the old line.
* If n >= C, the cache has the first C blocks of R, and so do the first C places of the line.

The blocks of a prompt at place C or before are a *leading* run of it: a request that used one of them also used all
blocks before it, and moved them to the front, ahead of it.

One row of :class:`~pagedkv.planner.capacity.references.Reuses` takes neighbouring places. Later requests moved a head
of the prompt of ``earlier`` to the front. The rest of that prompt has no gaps, and the row's blocks come first in it::

    line    | last used after ``earlier`` | last used by ``earlier``  | last used before |
            |                             | the row's | deeper        |                  |

So each row is one range of distances. The range begins at a sum, over requests, of the blocks last used by each. A
Fenwick tree has those sums; no single block is visited.

The offline optimum has the most hits that a policy with knowledge of the whole trace could have. It is Belady's MIN ("A
Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal 5(2), 1966) with bypass. After each
request the cache keeps at most C of its blocks and the request's: those whose next use comes first, and among equal
next uses those nearer to the head. Blocks that are never used again are dropped.

*What it bounds.* The optimum may keep any C of the cached blocks and the request's blocks; it may drop the request's
own (bypass). A policy that must hold the blocks of each request, at most the first C, is one of its choices, so that
policy has no more hits. Possibly no policy has as many: at capacity 1 the prompts ``a``, ``b``, ``a`` hit once with
bypass, and never without.

*Why it is optimal.* Keeping a block from one use to the next is an interval of requests, and at most C intervals may
overlap. The number of kept intervals is greatest if, whenever there are too many, those that end last are dropped
(Faigle and Nawijn, "Note on scheduling intervals on-line", Discrete Applied Mathematics 58, 1995). So no policy has
more blocks resident at their next use, let alone in leading runs. Here the kept blocks *are* leading runs: the block
before a kept one is used next no later than that one, and is nearer to the head.

*How it is computed.* The blocks kept for one next request are a leading run of it, so their count suffices. A row of
:class:`~pagedkv.planner.capacity.references.Reuses` adds to the count of its later request. Eviction lowers the count
of the furthest request that has one. The count that remains when a request arrives is its number of hits. No single
block is visited.
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
from pagedkv.planner.capacity.references import SPREAD, WORD, BlockReferences, Reuses, write_path

DEFAULT: Final = policy_named(DEFAULT_EVICTION)
NAME: Final = 1  # name of the only group
REQUESTS_A_CALL: Final = 4096
"""Requests served by one call of the loop: some 10 ms, so that Ctrl-C takes effect soon."""
MICROSECONDS: Final = 10**6


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


def new_fenwick_tree(num_weights: int) -> Int64Array:
    """Make a tree of ``num_weights`` zeros: int64 ``[1 + num_weights]``."""
    return np.zeros(1 + num_weights, np.int64)


@compiled
def add_weight(tree: Int64Array, index: int, weight: int) -> None:
    """Add to one weight. O(log n)."""
    place = index + 1
    while place < len(tree):
        tree[place] += weight
        place += place & -place


@compiled
def sum_through(tree: Int64Array, index: int) -> int:
    """Sum the weights from 0 through ``index``. O(log n)."""
    place = index + 1
    total = 0
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


@compiled
def find_unit(tree: Int64Array, unit: int) -> int:
    """Find the first index at which the prefix sum of the weights, none negative, reaches ``unit`` >= 1. O(log n)."""
    step = 1
    while 2 * step < len(tree):
        step *= 2
    place = 0
    left = unit
    while step > 0:
        if place + step < len(tree) and tree[place + step] < left:
            place += step
            left -= tree[place]
        step //= 2
    return place


def lru_hits_by_capacity(references: BlockReferences) -> Int64Array:
    """Count the hits of LRU at every capacity.

    Returns:
        int64 ``[1 + num_unique_blocks]``, indexed by capacity; never decreasing, the last value ideal. O(blocks + r log
        n) for r rows of reuses of n requests.
    """
    changes = np.zeros(references.num_unique_blocks + 2, np.int64)
    held = new_fenwick_tree(references.num_requests)
    _mark_distances(references.reuses, references.num_blocks, held, changes)
    hits_at_distance = np.cumsum(changes[:-1], out=changes[:-1])  # in place: the array has a number for each block
    return np.cumsum(hits_at_distance, out=hits_at_distance)


def lru_hits_by_request(references: BlockReferences, capacity: int) -> Int64Array:
    """Count the hits of LRU at one capacity, request by request: int64 ``[num_requests]``. O(r log n) as above."""
    hits = np.zeros(references.num_requests, np.int64)
    held = new_fenwick_tree(references.num_requests)
    _count_within(references.reuses, references.num_blocks, held, capacity, hits)
    return hits


@compiled
def _mark_distances(reuses: Reuses, num_blocks: Int32Array, held: Int64Array, changes: Int64Array) -> None:
    """Add up the ranges of distances: +1 where a range begins, -1 after its end.

    ``held`` is the Fenwick tree of the blocks last used by each request.
    """
    num_blocks_used = 0
    row = 0
    for request in range(len(num_blocks)):
        first_row = row
        while row < len(reuses.later) and reuses.later[row] == request:
            num_more_recent = num_blocks_used - sum_through(held, reuses.earlier[row])
            changes[num_more_recent + 1] += 1
            changes[num_more_recent + 1 + reuses.num_blocks[row]] -= 1
            row += 1
        num_blocks_used += _move_to_front(reuses, first_row, row, held, request, num_blocks[request])


@compiled
def _count_within(reuses: Reuses, num_blocks: Int32Array, held: Int64Array, capacity: int, hits: Int64Array) -> None:
    """Add up, for each request, the blocks within a capacity. Arguments as in :func:`_mark_distances`."""
    num_blocks_used = 0
    row = 0
    for request in range(len(num_blocks)):
        first_row = row
        while row < len(reuses.later) and reuses.later[row] == request:
            num_more_recent = num_blocks_used - sum_through(held, reuses.earlier[row])
            hits[request] += min(max(capacity - num_more_recent, 0), reuses.num_blocks[row])
            row += 1
        num_blocks_used += _move_to_front(reuses, first_row, row, held, request, num_blocks[request])


@inlined
def _move_to_front(  # noqa: PLR0913, PLR0917 - a compiled loop takes arrays and numbers separately
    reuses: Reuses, first_row: int, stop_row: int, held: Int64Array, request: int, num_blocks: int
) -> int:
    """Move the reused blocks from their last users' counts to the request's; return how many blocks are new."""
    num_new = num_blocks
    for row in range(first_row, stop_row):
        add_weight(held, reuses.earlier[row], -reuses.num_blocks[row])
        num_new -= reuses.num_blocks[row]
    add_weight(held, request, num_blocks)
    return num_new


def optimal_hits(references: BlockReferences, capacity: int, pause: Pause = go_on) -> int:
    """Count the hits of the optimum. O(r log n) for r rows of reuses of n requests.

    Args:
        references: the trace.
        capacity: blocks of the cache, at least 1.
        pause: called before counting begins; its exception ends the count.
    """
    return int(optimal_hits_by_request(references, capacity, pause).sum())


def optimal_hits_by_request(references: BlockReferences, capacity: int, pause: Pause = go_on) -> Int64Array:
    """Count as :func:`optimal_hits` does, request by request: int64 ``[num_requests]``."""
    pause()
    order = np.argsort(references.reuses.earlier, kind="stable")
    earlier, later, num_blocks = references.reuses
    rows = Reuses(earlier[order], later[order], num_blocks[order])
    num_kept = np.zeros(references.num_requests, np.int64)
    num_usable = min(capacity, references.num_unique_blocks)
    _serve_all(rows, num_usable, num_kept, new_fenwick_tree(references.num_requests))
    return num_kept


@compiled_aside
def _serve_all(rows: Reuses, capacity: int, num_kept: Int64Array, kept: Int64Array) -> None:
    """Serve all requests. ``num_kept``: blocks kept for each request, finally its hits; ``kept``: the Fenwick tree."""
    num_resident = 0
    row = 0
    for request in range(len(num_kept)):
        num_resident -= num_kept[request]
        add_weight(kept, request, -num_kept[request])
        while row < len(rows.earlier) and rows.earlier[row] == request:
            num_kept[rows.later[row]] += rows.num_blocks[row]
            add_weight(kept, rows.later[row], rows.num_blocks[row])
            num_resident += rows.num_blocks[row]
            row += 1
        while num_resident > capacity:
            furthest = find_unit(kept, num_resident)
            num_evicted = min(num_kept[furthest], num_resident - capacity)
            num_kept[furthest] -= num_evicted
            add_weight(kept, furthest, -num_evicted)
            num_resident -= num_evicted
