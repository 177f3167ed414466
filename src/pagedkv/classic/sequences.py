"""Checks of the sequences and groups that classic schedulers pass, before anything else is done.

Any class with the attributes of :class:`~pagedkv.Sequence` and :class:`~pagedkv.SequenceGroup` is accepted, since
schedulers have their own. This module does not use rows or blocks.
"""

from collections.abc import Sequence as AbstractSequence

from pagedkv.contract.spec import Sequence, SequenceGroup
from pagedkv.errors import SequenceError

__all__ = ["as_sequence", "as_sequences", "sequences_of"]


def as_sequence(seq: Sequence) -> Sequence:
    """Check a sequence: a number, or a name, and tokens. O(1). Raises SequenceError."""
    try:
        hash(seq.seq_id)
        has_tokens = _is_list(seq.token_ids)
    except (AttributeError, TypeError):
        has_tokens = False
    if not has_tokens:
        raise SequenceError(f"a sequence has a number, seq_id, and a list, token_ids; got {seq!r}")
    return seq


def as_sequences(seqs: AbstractSequence[Sequence]) -> AbstractSequence[Sequence]:
    """Check a list of sequences. O(sequences). Raises SequenceError."""
    if not _is_list(seqs):
        raise SequenceError(f"sequences must be a list of them, got {seqs!r}")
    return [as_sequence(seq) for seq in seqs]


def sequences_of(seq_group: SequenceGroup) -> AbstractSequence[Sequence]:
    """Check a group, and return its sequences. O(sequences). Raises SequenceError."""
    if not hasattr(seq_group, "request_id") or not hasattr(seq_group, "seqs"):
        raise SequenceError(f"a group has a name, request_id, and a list of sequences, seqs; got {seq_group!r}")
    return as_sequences(seq_group.seqs)


def _is_list(values: object) -> bool:
    return isinstance(values, AbstractSequence) and not isinstance(values, str | bytes)
