"""The types that loops take for those of the arguments that they are given.

Machine code for an array that may be written is that for one that may not. Token ids come as either, so each loop over
them would be an entry twice. That a loop leaves alone what it is only to read is seen where loops are plain Python:
NumPy refuses to write there.
"""

from typing import Any, TypeAlias

from numba.core import types

__all__ = ["of_entry", "widened"]

Opaque: TypeAlias = Any
"""A type of Numba's."""


def widened(kind: Opaque) -> Opaque:
    """Give what a piece takes: no constant, and of signed integers the widest."""
    if isinstance(kind, types.Literal) and isinstance(kind.literal_type, types.Integer | types.Boolean):
        kind = kind.literal_type
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind


def of_entry(kind: Opaque) -> Opaque:
    """Give what an entry takes: moreover, of arrays those that may be written."""
    kind = widened(kind)
    return kind.copy(readonly=False) if type(kind) is types.Array and not kind.mutable else kind
