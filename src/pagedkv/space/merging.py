"""Duplicates: live blocks with the same content as a named block, replaced by it once that is safe.

Two rows may compute the same content, one after the other or in one step. The first block to be published gets the
name (it is the *carrier*); the second stays unnamed until both are settled. Then every row that holds the duplicate is
pointed at the carrier, and the duplicate is freed. If the carrier is gone by then, the duplicate is published instead.
"""

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.space.publishing import publish
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.publishing import INDEX

__all__ = ["merge"]


def merge(state: SpaceState, ledger: StepLedger, duplicates: list[list[Int32Array]]) -> None:
    """Merge those duplicates that are settled, by group; the others wait for the next step to end."""
    if not any(duplicates):
        return
    republishing = np.zeros(len(state.rows), np.int32)
    for group, parts in zip(state.groups, duplicates, strict=True):
        if not parts:
            continue
        found = np.concatenate(parts)
        num_before = int(republishing.max())
        indexes, fates = np.unique(found[:, INDEX]), np.zeros(group.pool.num_blocks, np.int32)
        num_waiting = state.loops.merge_duplicates(*group.view, found, indexes, fates, republishing, num_before)
        if num_waiting:
            ledger.duplicates[group.index].append(found[:num_waiting])
    if republishing.any():
        rows = np.flatnonzero(republishing).astype(np.int32)
        in_order = rows[np.argsort(republishing[rows], kind="stable")]  # the order in which duplicates were found
        publish(state, ledger, in_order)
