"""Runs all operations of a small store, so that all loops of stores are compiled."""

import numpy as np
import numpy.typing as npt

from pagedkv.tiers.actions import Fault, Read, Write
from pagedkv.tiers.config import StoreConfig
from pagedkv.tiers.core import StoreCore

__all__ = ["rehearse"]

NBYTES = 10
DEADLINE_S = 5.0


def rehearse(eviction: str) -> None:
    """Store, find, load, evict, lose and withdraw entries, with the eviction policy of a store."""
    config = StoreConfig(cap_nbytes=4 * NBYTES, max_entries=6, eviction=eviction, admission="second-offer")
    store = StoreCore(config)
    keys = np.random.default_rng(1).integers(0, 256, (8, 32), dtype=np.uint8)
    store.restore(keys[7:], [NBYTES], 0.0)
    for first in (0, 3):
        some = keys[first : first + 3]
        for _ in range(2):
            store.select_for_offer(some, 1.0)
        store.offer(some, [NBYTES] * len(some), 1.0)
        store.offer(some, [NBYTES] * len(some), 1.0)
        _carry_out(store, None)
        store.look_up(some)
        store.load(some, 2.0, DEADLINE_S)
        _carry_out(store, None if first else Fault.GONE)
    _offer(store, keys[6:7], Fault.IO)
    store.withdraw(keys[3:4], 3.0)
    _carry_out(store, None)
    store.reset(4.0)
    _carry_out(store, None)
    store.check()


def _offer(store: StoreCore, keys: npt.NDArray[np.uint8], fault: Fault) -> None:
    """Offer entries whose writes fail."""
    store.select_for_offer(keys, 2.0)
    store.select_for_offer(keys, 2.0)
    store.offer(keys, [NBYTES] * len(keys), 2.0, is_noted=True)
    _carry_out(store, None, fault)


def _carry_out(store: StoreCore, read: Fault | None, write: Fault | None = None) -> None:
    """Report all actions as completed, or reads and writes as failed if a fault is given for them."""
    while actions := store.take_actions():
        for action in actions:
            fault = read if isinstance(action, Read) else write if isinstance(action, Write) else None
            if fault is None:
                store.completed(action.action, 2.0, NBYTES if isinstance(action, Read) else None)
            else:
                store.failed(action.action, fault, 2.0)
    store.take_answers()
