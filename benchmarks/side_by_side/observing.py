"""What is compared: answers, errors, and how a space looks, as plain values that are written as JSON.

Only public methods are called, so that the two packages may differ in how they keep their state; the one exception is
:func:`free_orders`. The memory that bookkeeping itself takes is left out.
"""

import re
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from pagedkv import BlockSpace, PagedKVError, PrefixHit, RequestKeys, StepPlan

__all__ = ["free_orders", "plain", "state_of"]

NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
LEFT_OUT: Final = frozenset({"nbytes"})
"""Fields with the memory of bookkeeping: a new layout of the same state may take more or less."""
OF_A_HIT: Final = (
    "num_tokens", "num_whole_tokens", "num_replayed", "is_exact", "num_free", "junction", "checkpoint", "prompt_length",
    "num_blocks_needed", "block_ids", "tails", "loading",
)  # fmt: skip


def plain(value: object) -> Any:  # noqa: ANN401 - any value of JSON
    """Return what a value holds, for ``json.dumps(default=plain)``, which calls this again for the parts."""
    match value:
        case np.ndarray() | np.generic():
            described: object = value.tolist()
        case bytes():
            described = value.hex()
        case Enum():
            described = value.name
        case StepPlan():
            described = {"StepPlan": np.asarray(value.buffer)}
        case PrefixHit():
            described = {"PrefixHit": {name: getattr(value, name) for name in OF_A_HIT}}
        case Exception():
            described = _error(value)
        case _ if is_dataclass(value) and not isinstance(value, RequestKeys):
            names = [item.name for item in fields(value) if item.name not in LEFT_OUT]
            described = {type(value).__name__: {name: getattr(value, name) for name in names}}
        case _:
            described = repr(value)
    return described


def _error(error: Exception) -> dict[str, object]:
    """Describe an error: its class and its numbers are compared; a different text is reported separately."""
    return {"error": type(error).__name__, "numbers": NUMBER.findall(str(error)), "text": str(error)}


def state_of(space: BlockSpace, *, drain: bool) -> dict[str, object]:
    """Return the visible state of a space; ``drain``: with its events, which are removed."""
    statistics = space.statistics()
    rows = [row for row in range(space.config.max_sequences) if space.generation_or_none(row) is not None]
    return {
        "statistics": statistics,
        "weights_epoch": space.weights_epoch,
        "free": free_orders(space),
        "references": {pool.name: space.ref_counts(pool.name) for pool in statistics.pools},
        "events": space.drain_events() if drain else space.has_events,
        "rows": {row: _row_of(space, row) for row in rows},
    }


def free_orders(space: BlockSpace) -> dict[str, list[int]]:
    """List the free blocks of each pool in the order in which they will be allocated or evicted.

    No public method of a space returns this order, so only this function depends on the inside of a space.
    """
    state = space._state  # noqa: SLF001
    pools = (("", state.pools), ("host ", state.host_pools))
    return {where + name: pool.free_queue.get_all_free_blocks() for where, of in pools for name, pool in of.items()}


def _row_of(space: BlockSpace, row: int) -> dict[str, object]:
    groups = range(len(space.config.groups))
    described: dict[str, object] = {
        "num_tokens": space.num_tokens(row),
        "generation": space.generation(row),
        "blocks": [space.block_ids(row, group) for group in groups],
        "draft_blocks": [space.draft_block_ids(row, group) for group in groups],
    }
    if space.config.receipts:
        described["receipt"] = space.receipt(row)
    try:
        described["num_computed_blocks"] = [len(space.computed_block_ids(row, group)) for group in groups]
    except PagedKVError as error:
        return described | {"status": type(error).__name__}  # swapped out, or lost
    return described | ({"epochs": space.epochs(row)} if space.config.counts_epochs else {})
