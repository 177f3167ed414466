"""Receipt: what one life of a row took.

A value; :mod:`pagedkv.space.receipts` counts it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

__all__ = ["Receipt"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one life of a row took, from ``allocate`` or ``fork`` on; or the sum of several.

    Counts accrue when a step is acknowledged that computes something for the row. Receipts add up with ``+``, and
    ``sum(receipts, Receipt())`` works.

    Args:
        num_computed: tokens that acknowledged steps computed for it, including drafts that were refused.
        num_recomputed: of these, tokens that had been computed for it before and were lost, by preemption for example.
        num_hit: tokens that it did not have to compute, since they were cached or computed for another sequence.
        num_hit_inside: of these, the leading tokens of a block that was copied for it.
        num_forked: tokens that it shared with its parent when it was forked, and did not have to compute.
        num_swapped_in: tokens that it did not have to compute again, since they came back from the host pool.
        num_declared: tokens that ``mark_computed`` declared, in place of the steps that were to compute them.
        num_aborted: tokens that aborted steps were to compute.
        num_abandoned: tokens of the steps in flight when it was freed, whether or not these succeed.
        block_steps: by device pool, blocks of its tables summed over the acknowledged steps; in the order of
            ``statistics().pools``.
        host_block_steps: the same by host pool, while it was swapped out, in the order of ``statistics().host_pools``.
        num_replayed: of those hit, tokens that acknowledged steps computed once more in windows alone, which had lost
            them (:class:`~pagedkv.Replay`).
        num_reached: leading tokens that were available to it, however they came; if a later life computes them, they
            count as recomputed. This is no amount taken: it is not compared, and a sum has the largest.
        num_loaded: of those hit, tokens that a load from a tier brought for it, by medium ("host", "folder", "redis",
            "object"). The owner of the tiers fills it in; a space has no tiers, so it is empty in a space's receipts
            and is not compared.
    """

    num_computed: int = 0
    num_recomputed: int = 0
    num_hit: int = 0
    num_forked: int = 0
    num_swapped_in: int = 0
    num_declared: int = 0
    num_aborted: int = 0
    num_abandoned: int = 0
    block_steps: tuple[int, ...] = ()
    host_block_steps: tuple[int, ...] = ()
    num_reached: int = field(default=0, compare=False)
    num_hit_inside: int = 0
    num_replayed: int = 0
    num_loaded: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def hits_by_medium(self) -> dict[str, int]:
        """The hit tokens by medium: ``"device"`` for those in device memory already, then ``num_loaded``.

        They add up to ``num_hit``.
        """
        return {"device": self.num_hit - sum(self.num_loaded.values()), **self.num_loaded}

    def __add__(self, other: "Receipt") -> "Receipt":
        """Add the counts of two receipts."""
        if not isinstance(other, Receipt):
            return NotImplemented
        return Receipt(
            self.num_computed + other.num_computed,
            self.num_recomputed + other.num_recomputed,
            self.num_hit + other.num_hit,
            self.num_forked + other.num_forked,
            self.num_swapped_in + other.num_swapped_in,
            self.num_declared + other.num_declared,
            self.num_aborted + other.num_aborted,
            self.num_abandoned + other.num_abandoned,
            _added(self.block_steps, other.block_steps),
            _added(self.host_block_steps, other.host_block_steps),
            max(self.num_reached, other.num_reached),
            self.num_hit_inside + other.num_hit_inside,
            self.num_replayed + other.num_replayed,
            _added_by_medium(self.num_loaded, other.num_loaded),
        )


def _added_by_medium(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    return {medium: left.get(medium, 0) + right.get(medium, 0) for medium in {**left, **right}} if right else left


def _added(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(mine + other for mine, other in zip_longest(left, right, fillvalue=0))
