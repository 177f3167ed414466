"""The functions that act at the moments of a pool with features, and the rules where several features meet.

A feature imports the core and no other feature. This module alone sets the order in which features act at a moment, and
combines them by these rules::

    a free block is of one kind:   leased | spare | cached in the policy's order    (a lease overrides the spare mark)
    leased and spare blocks        are excluded from the policy
    every free named block         is counted for its tenant, and towards the limit of its group
    eviction                       a tenant at its cap loses a block of its own (tenant_victims.py); leases end last

Whether a pool has a feature is checked when a function runs (the feature's array is empty if not), so that one set of
machine code serves all features. A pool without any feature does not run this module
(:mod:`pagedkv.blocks.block_pool`).
"""

from typing import ClassVar, Final

from pagedkv.blocks import cached_bounds, free_queue, siblings, tenant_charges
from pagedkv.blocks.epochs import copy_epochs, is_fresher, same_epochs, undate
from pagedkv.blocks.event_log import log_event
from pagedkv.blocks.eviction import moments as policy
from pagedkv.blocks.ghosts import recall, remember
from pagedkv.blocks.leasing import end_lease, enqueue_leased, is_due, is_leased, unlink_leased
from pagedkv.blocks.life_cycle import drop_name, is_spare
from pagedkv.blocks.moments import Moments
from pagedkv.blocks.record import EVICTED, FREE, NUM_FREE, NUM_LEASED, QUEUE, SHED, PoolArrays
from pagedkv.blocks.tenant_charges import ANY, IN_CACHED, IN_LEASED, IN_SPARE
from pagedkv.blocks.victims import end_largest_lease, make_room as make_room_under_caps
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.events import REMOVED, STORED

__all__ = ["ALL_FEATURES", "FeaturedArrays"]


# Allocating a block


@inlined
def _make_room(pool: PoolArrays) -> None:
    if len(pool.tenants):
        make_room_under_caps(pool)
    if pool.counts[NUM_LEASED] and pool.counts[NUM_LEASED] == pool.counts[NUM_FREE]:
        end_largest_lease(pool, ANY)


@inlined
def _counts_takes(pool: PoolArrays) -> bool:
    return len(pool.tenants) > 0


@inlined
def _note_eviction(pool: PoolArrays, block: int) -> None:
    policy.note_eviction(pool, block)
    policy.note_drop(pool, block)


@inlined
def _note_take(pool: PoolArrays, block: int) -> None:
    if len(pool.tenants):
        tenant_charges.take(pool, block)


# Names


@inlined
def _note_drop(pool: PoolArrays, block: int) -> None:
    if not (is_leased(pool, block) and pool.records[block, QUEUE] == FREE):
        policy.note_drop(pool, block)  # a free leased block was dropped when it became leased


@inlined
def _note_named(pool: PoolArrays, block: int) -> None:
    if len(pool.ghosts):
        recall(pool, block)
    log_event(pool, STORED, block)


@inlined
def _note_unnamed(pool: PoolArrays, block: int, cause: int) -> None:
    if len(pool.ghosts):
        remember(pool, block, cause)
    log_event(pool, REMOVED, block)
    siblings.unlink_child(pool, block)
    end_lease(pool, block)


# Releasing a block


@inlined
def _note_rest(pool: PoolArrays, block: int) -> None:
    if len(pool.tenants):
        tenant_charges.rest(pool, block)
    if is_leased(pool, block) and is_due(pool, block):
        end_lease(pool, block)


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    if is_leased(pool, block):
        enqueue_leased(pool, block)
    else:
        policy.enqueue(pool, block)


@inlined
def _note_cached(pool: PoolArrays, block: int) -> None:
    if len(pool.tenants):
        tenant_charges.join(pool, block, _kind_of(pool, block))
    if len(pool.bounds):
        _enforce_bound(pool, block)


@inlined
def _kind_of(pool: PoolArrays, block: int) -> int:
    """Return which of its tenant's lists a free named block belongs to."""
    if is_leased(pool, block):
        return IN_LEASED
    return IN_SPARE if is_spare(pool, block) else IN_CACHED


@compiled
def _enforce_bound(pool: PoolArrays, block: int) -> None:
    """Enforce the limit of a group, of which a block has become cached: evict its least valuable block if necessary."""
    if cached_bounds.stand(pool, block):
        least = cached_bounds.least_valuable(pool, block)
        drop_name(pool, least, SHED if is_spare(pool, least) else EVICTED)


@inlined
def _note_rank(pool: PoolArrays, block: int) -> None:
    if len(pool.tenants):
        tenant_charges.leave(pool, block)
        tenant_charges.join(pool, block, _kind_of(pool, block))


@inlined
def _unlink(pool: PoolArrays, block: int) -> None:
    if len(pool.bounds):
        cached_bounds.leave(pool, block)
    if is_leased(pool, block):
        unlink_leased(pool, block)
    else:
        free_queue.remove(pool.records, pool.counts, block)


@inlined
def _note_claim(pool: PoolArrays, block: int) -> None:
    if is_leased(pool, block):
        policy.note_name(pool, block)
    if len(pool.tenants):
        tenant_charges.resume(pool, block)
    policy.note_claim(pool, block)


@inlined
def _note_vacant(pool: PoolArrays, block: int) -> None:
    if len(pool.tenants):
        tenant_charges.leave(pool, block)
        tenant_charges.uncharge(pool, block)


ALL_FEATURES: Final = Moments(
    make_room=_make_room,
    counts_takes=_counts_takes,
    note_current_tenant=tenant_charges.charge_to,
    choose_victim=policy.choose_victim,
    note_eviction=_note_eviction,
    note_take=_note_take,
    note_begin=undate,
    note_name=policy.note_name,
    note_drop=_note_drop,
    note_named=_note_named,
    note_unnamed=_note_unnamed,
    note_child=siblings.link_child,
    next_child=siblings.next_child,
    expect=policy.expect,
    note_reuse=policy.note_reuse,
    note_recomputed=policy.note_recomputed,
    note_copy=copy_epochs,
    are_alike=same_epochs,
    is_fresher=is_fresher,
    note_request=policy.note_request,
    note_rest=_note_rest,
    enqueue=_enqueue,
    note_cached=_note_cached,
    put=policy.enqueue,
    note_rank=_note_rank,
    unlink=_unlink,
    note_claim=_note_claim,
    note_vacant=_note_vacant,
    stays=is_leased,
)


class FeaturedArrays(PoolArrays):
    """The arrays of a pool with features, for LRU; a policy's own class derives from this one."""

    __slots__ = ()
    moments: ClassVar = ALL_FEATURES
