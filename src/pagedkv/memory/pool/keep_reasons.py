"""Why a block stays cached, or what lies ahead of it in its chain: one column of its record, and nothing else.

A group that is walked looks ahead (``AHEAD``), and needs no reason to keep a block; a window group is not walked, and
has reasons (``KEPT``): bits whose meaning is :mod:`pagedkv.memory.tables.retaining`'s, or ``SPARE`` for none. A spare
block of a walked group leads nowhere.
"""

from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import AHEAD, KEPT, NULL_BLOCK, SPARE

__all__ = [
    "add_reasons",
    "add_reasons_of",
    "forget_reasons",
    "keep_instead",
    "keep_only_for",
    "mark_spare",
    "note_ahead",
]


@inlined
def note_ahead(records: Int32Array, block: int, ahead: int) -> None:
    """Note what lies ``LOOKAHEAD`` places further down a block's chain: a hint, which may be wrong or out of date."""
    records[block, AHEAD] = ahead


@inlined
def forget_reasons(records: Int32Array, block: int) -> None:
    """Note that nothing keeps a block, and that nothing is known to lie ahead of it."""
    records[block, KEPT] = NULL_BLOCK


@inlined
def mark_spare(records: Int32Array, block: int) -> None:
    """Mark a block as one that is to be handed out before other cached ones."""
    records[block, KEPT] = SPARE


@inlined
def add_reasons(records: Int32Array, block: int, why: int) -> None:
    """Add reasons for which a block is kept."""
    records[block, KEPT] |= why


@inlined
def keep_only_for(records: Int32Array, block: int, why: int) -> None:
    """Take all reasons away for which a block is kept, but these."""
    records[block, KEPT] &= why


@inlined
def keep_instead(records: Int32Array, block: int, former: int, why: int) -> None:
    """Replace a reason for which a block is kept, and which it has, by others."""
    records[block, KEPT] = (records[block, KEPT] ^ former) | why


def add_reasons_of(records: Int32Array, block: int, why: int) -> None:
    """Do what :func:`add_reasons` does, from Python."""
    records[block, KEPT] |= why
