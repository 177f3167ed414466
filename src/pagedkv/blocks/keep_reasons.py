"""Writes of one column of a block's record: why the block stays cached, or a hint for walks of its chain.

In groups with chains that are walked the column is ``AHEAD``, a block further down the chain for prefetching; their
blocks stay cached without a reason. In window groups, which are not walked, it is ``KEPT``, the reasons for which a
block is kept, as bits (:mod:`pagedkv.tables.retaining`). ``SPARE`` marks a spare block in both.
"""

from typing import Final

from pagedkv.blocks.blocks import AHEAD, KEPT, NULL_BLOCK, SPARE
from pagedkv.compilation.compiled import inlined
from pagedkv.contract.arrays import Int32Array

__all__ = [
    "AT_END",
    "AT_JUNCTION",
    "AT_RESEND",
    "add_reasons",
    "add_reasons_of",
    "forget_reasons",
    "keep_instead",
    "keep_only_for",
    "mark_spare",
    "note_ahead",
]

AT_END: Final = 1
AT_JUNCTION: Final = 2
AT_RESEND: Final = 4


@inlined
def note_ahead(records: Int32Array, block: int, ahead: int) -> None:
    """Record a block ``LOOKAHEAD`` places further down a block's chain: a hint, which may be wrong or outdated."""
    records[block, AHEAD] = ahead


@inlined
def forget_reasons(records: Int32Array, block: int) -> None:
    """Clear a block's reasons, or its hint."""
    records[block, KEPT] = NULL_BLOCK


@inlined
def mark_spare(records: Int32Array, block: int) -> None:
    """Mark a block as one to be allocated before other cached ones."""
    records[block, KEPT] = SPARE


@inlined
def add_reasons(records: Int32Array, block: int, why: int) -> None:
    """Add reasons for which a block is kept."""
    records[block, KEPT] |= why


@inlined
def keep_only_for(records: Int32Array, block: int, why: int) -> None:
    """Remove all reasons of a block except those in ``why``."""
    records[block, KEPT] &= why


@inlined
def keep_instead(records: Int32Array, block: int, former: int, why: int) -> None:
    """Replace ``former``, a reason that the block has, by the reasons in ``why``."""
    records[block, KEPT] = (records[block, KEPT] ^ former) | why


def add_reasons_of(records: Int32Array, block: int, why: int) -> None:
    """Add reasons as :func:`add_reasons` does, from Python."""
    records[block, KEPT] |= why
