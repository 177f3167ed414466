"""One trace at one capacity, served by a pool that gets the intent of its sessions: hits by block, and what missed."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.eviction.registry import policy_named
from pagedkv.blocks.eviction.tlru import set_tail
from pagedkv.blocks.free_queue import is_spare
from pagedkv.blocks.leasing import lease
from pagedkv.blocks.life_cycle import make_cached, make_spare
from pagedkv.blocks.prefix_index import find
from pagedkv.blocks.record import NULL_BLOCK, REF_COUNT, PoolArrays, PoolFeatures
from pagedkv.blocks.sweeps import find_child
from pagedkv.blocks.tenant_charges import charge_hits
from pagedkv.blocks.victims import end_overdue, keep_cap
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import DIGEST_WORDS, Int32Array, Uint32Array
from pagedkv.planner.capacity.pool_hits import NAME, PromptScratch, serve_prompt, write_digest
from pagedkv.planner.capacity.references import BlockReferences, write_path

__all__ = ["INTENTS", "Intent", "Served", "Session", "serve"]

UNTIL_NEXT: Final = -1.0
UNKNOWN_OUTPUT: Final = -1


class Intent(NamedTuple):
    """The intent of a session.

    Args:
        name: in the table.
        eviction: name of the policy for all else.
        supersedes: a next prompt replaces the one before.
        lease_s: seconds for which what a request leaves is kept; 0: none, -1: until the next request of its session.
        answers: whether the generated tokens stay behind the prompt, as blocks that never come back: "kept" as all
            else, or "first", to be evicted first.
        tail_tokens: with "tlru".
        cap: the share of the pool that a session's blocks may take, each session a tenant; 0: no tenants.
    """

    name: str
    eviction: str = "lru"
    supersedes: bool = False
    lease_s: float = 0.0
    answers: str = ""
    tail_tokens: int = 0
    cap: float = 0.0


INTENTS: Final = (
    Intent("lru"),
    Intent("adaptive", "adaptive"),
    Intent("supersession", supersedes=True),
    Intent("leases of 10 s", lease_s=10.0),
    Intent("leases of 60 s", lease_s=60.0),
    Intent("leases until next", lease_s=UNTIL_NEXT),
    Intent("both", supersedes=True, lease_s=UNTIL_NEXT),
    Intent("both, adaptive", "adaptive", supersedes=True, lease_s=UNTIL_NEXT),
    Intent("t-lru, 2,048", "tlru", tail_tokens=2048),
    Intent("t-lru, 8,192", "tlru", tail_tokens=8192),
    Intent("lru, answers kept", answers="kept"),
    Intent("lru, answers first", answers="first"),
    Intent("caps of a half", cap=0.5),
    Intent("caps of a quarter", cap=0.25),
    Intent("caps of an eighth", cap=1 / 8),
    Intent("caps of a sixteenth", cap=1 / 16),
)


class Session(NamedTuple):
    """Where a request stands in its session.

    Args:
        arrival_s: when it comes.
        before: the request before it of the same session, or -1.
        next_s: when the next one comes, or -1.
        number: of the session, from 1 on; 0 without one.
    """

    arrival_s: float
    before: int
    next_s: float
    number: int = 0


class Served(NamedTuple):
    """What a pool did for a trace.

    Args:
        num_hits: blocks.
        missed: int32 ``[requests]``, blocks of each prompt that did not hit.
    """

    num_hits: int
    missed: Int32Array


def serve(references: BlockReferences, sessions: Sequence[Session], capacity: int, intent: Intent) -> Served:
    """Serve a trace in its order by a pool of ``capacity`` blocks. O(references).

    Of a prompt longer than the pool, or than its session's cap, as many blocks as fit are cached.
    """
    num_answer_blocks = references.output_lengths // references.block_size * bool(intent.answers)
    num_usable = min(capacity, references.num_unique_blocks + int(num_answer_blocks.sum()))
    cap = max(1, int(intent.cap * capacity))
    num_sessions = max(session.number for session in sessions)
    limits = ((num_usable, 0), *((cap, 0) for _ in range(num_sessions))) if intent.cap else ()
    features = PoolFeatures(leases=True, limits=limits)
    pool = BlockPool("cache", num_usable + 1, block_size=1, policy=policy_named(intent.eviction), features=features)
    if intent.tail_tokens:
        set_tail(pool.arrays, intent.tail_tokens // references.block_size)
    most = references.longest_prompt + int(num_answer_blocks.max(initial=0))
    scratch = PromptScratch(np.zeros(most, np.int32), np.zeros(most, np.int32), np.zeros(DIGEST_WORDS, np.uint32))
    former = np.zeros(references.longest_prompt, np.int32)
    digest = np.zeros(DIGEST_WORDS, np.uint32)
    missed = np.zeros(references.num_requests, np.int32)
    next_answer = references.num_unique_blocks + 1
    for request, session in enumerate(sessions):
        num_blocks = int(references.num_prompt_blocks[request])
        end_overdue(pool.arrays, session.arrival_s)
        write_path(references.parents, int(references.last_blocks[request]), scratch.contents[:num_blocks])
        num_answer = int(num_answer_blocks[request])
        scratch.contents[num_blocks : num_blocks + num_answer] = range(next_answer, next_answer + num_answer)
        next_answer += num_answer
        num_served = min(num_blocks + num_answer, num_usable)
        if intent.cap:
            num_served = min(num_served, limits[session.number][0])
            pool.charge_to(session.number)
            _charge(pool.arrays, scratch, num_served, session.number)
        missed[request] = num_blocks - serve_prompt(pool.arrays, scratch, num_served, UNKNOWN_OUTPUT)
        if intent.answers == "first":
            for block in scratch.block_ids[num_blocks:num_served][::-1].tolist():
                make_spare(pool.arrays, block)
        if intent.supersedes and session.before >= 0:
            num_former = int(references.num_prompt_blocks[session.before])
            write_path(references.parents, int(references.last_blocks[session.before]), former[:num_former])
            _give_up(pool.arrays, former[:num_former], scratch.contents[:num_blocks], digest)
        until = session.next_s if intent.lease_s == UNTIL_NEXT else session.arrival_s + intent.lease_s
        if intent.lease_s and until > session.arrival_s:
            _lease(pool.arrays, scratch.block_ids[:num_served], until)
    return Served(references.num_block_refs - int(missed.sum()), missed)


@compiled
def _give_up(pool: PoolArrays, former: Int32Array, contents: Int32Array, digest: Uint32Array) -> None:
    """Make spare what a prompt has left of the one before, tail first, but what is leased.

    Nothing if it shares less than half of it: that is another agent of the session, and no edit.
    """
    half = (len(former) - 1) // 2
    if half >= len(contents) or former[half] != contents[half]:
        return
    for index in range(len(former) - 1, -1, -1):
        if index < len(contents) and former[index] == contents[index]:
            return  # paths in a tree: all before is the same as well
        write_digest(digest, former[index])
        block = find(pool, NAME, digest)
        if block != NULL_BLOCK and pool.records[block, REF_COUNT] == 0 and pool.leases[block] == 0:
            make_spare(pool, block)


@compiled
def _charge(pool: PoolArrays, scratch: PromptScratch, num_blocks: int, number: int) -> None:
    """Charge what a prompt is about to hit to its session, and evict what that session has above its cap."""
    parent = NULL_BLOCK
    num_hits = 0
    while num_hits < num_blocks:
        write_digest(scratch.digest, scratch.contents[num_hits])
        block = find_child(pool, NAME, scratch.digest, parent)
        if block == NULL_BLOCK:
            break
        scratch.block_ids[num_hits] = parent = block
        num_hits += 1
    charge_hits(pool, scratch.block_ids[:num_hits])
    keep_cap(pool, number, 0)


@compiled
def _lease(pool: PoolArrays, blocks: Int32Array, until: float) -> None:
    """Keep what a request leaves, tail first."""
    for place in range(len(blocks) - 1, -1, -1):
        if is_spare(pool, blocks[place]):
            make_cached(pool, blocks[place])
        lease(pool, blocks[place], until)
