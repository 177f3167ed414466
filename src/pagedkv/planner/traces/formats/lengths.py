"""Determines the tokens of each part of a text, where a log states only the length of the whole.

Stated usage gives lengths without tokens; texts show which prompts begin alike. If every prompt were stretched to its
own length, two prompts that begin alike would get different tokens there, and nothing would hit. So a part keeps the
length that it first got after the same preceding parts. In a prompt that continues another, the known parts keep their
lengths, and the new parts share the rest by their weights. A text that begins like an earlier one after the same parts
is stretched at the rate of that one, as far as the two agree, so that equal texts get equal tokens.

The lengths always add up to the stated length. If the known parts are longer than the whole prompt (another model, an
answer without its thoughts), they keep their lengths as far as they fit, and the rest is divided anew.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, Generic, TypeVar

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.traces.formats.messages import Part
from pagedkv.planner.traces.texts import marked_tokens, stretched_tokens

__all__ = ["KnownLengths"]

MOST_REMEMBERED: Final = 2**17
"""Number of parts whose length is remembered, some 60 MiB; a turn comes soon after the previous one."""
HEAD_PIECES: Final = 16
"""A text begins like another one if this number of leading pieces are equal."""

_Value = TypeVar("_Value")


class _Recent(Generic[_Value]):
    """A dictionary of the most recently used entries."""

    def __init__(self) -> None:
        self._values: dict[bytes, _Value] = {}

    def get(self, key: bytes) -> _Value | None:
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        return value

    def set_default(self, key: bytes, value: _Value) -> _Value:
        known = self.get(key)
        if known is not None:
            return known
        self._values[key] = value
        if len(self._values) > MOST_REMEMBERED:
            del self._values[next(iter(self._values))]
        return value


class KnownLengths:
    """Makes the tokens of prompts and answers, and remembers the lengths of their parts."""

    def __init__(self) -> None:
        self._lengths: _Recent[int] = _Recent()
        self._rates: _Recent[tuple[int, int]] = _Recent()

    def prompt(self, parts: Sequence[Part], stated: int | None) -> tuple[Int32Array, bytes]:
        """Make the tokens of a prompt.

        Args:
            parts: parts of the prompt, in order.
            stated: length of the prompt; None where the log has none: then each part has its known length, or else
                that of its pieces.

        Returns:
            int32 ``[stated]``, and a digest that identifies the whole prompt, for :meth:`answer`. O(tokens).
        """
        return self._tokens(parts, stated, sha256(b"prompt").digest())

    def answer(self, parts: Sequence[Part], stated: int | None, prompt: bytes, num_thoughts: int = 0) -> Int32Array:
        """Make the tokens of an answer; a later prompt that contains it after the same prompt gets the same tokens.

        Args:
            parts: parts of the answer.
            stated: its length, including thoughts.
            prompt: the digest of the prompt.
            num_thoughts: tokens at its beginning that no later prompt contains.
        """
        if not num_thoughts:
            return self._tokens(parts, stated, prompt)[0]
        num_thoughts = num_thoughts if stated is None else min(num_thoughts, stated)
        visible = self._tokens(parts, None if stated is None else stated - num_thoughts, prompt)[0]
        return np.concatenate([marked_tokens(sha256(b"thoughts" + prompt).digest(), num_thoughts), visible])

    def _tokens(self, parts: Sequence[Part], stated: int | None, parent: bytes) -> tuple[Int32Array, bytes]:
        names = _names(parts, parent)
        if parts and all(part.is_exact for part in parts):
            return np.concatenate([part.pieces for part in parts]), names[-1]
        heads = [
            sha256(b"head" + name + part.pieces[:HEAD_PIECES].tobytes()).digest()
            for name, part in zip(names, parts, strict=False)
        ]
        known = [self._lengths.get(name) for name in names[1:]]
        if stated is None:
            lengths = [
                self._scaled(part, head) if length is None else length
                for part, head, length in zip(parts, heads, known, strict=True)
            ]
        else:
            lengths = _shared_out(parts, known, stated)
            for name, length in zip(names[1:], lengths, strict=True):
                self._lengths.set_default(name, length)
        tokens = []
        for part, head, length, name in zip(parts, heads, lengths, names[1:], strict=True):
            rate = (max(1, length), max(1, len(part.pieces)))
            rate = self._rates.set_default(head, rate) if length else rate
            tokens.append(stretched_tokens(part.pieces, rate, length, name))
        rest = 0 if stated is None else stated - sum(lengths)
        return np.concatenate([*tokens, marked_tokens(names[-1], rest)]), names[-1]

    def _scaled(self, part: Part, head: bytes) -> int:
        """Estimate the length of a new part of a prompt whose length is not stated."""
        most, least = self._rates.get(head) or (1, 1)
        return len(part.pieces) * most // least


def _shared_out(parts: Sequence[Part], known: Sequence[int | None], stated: int) -> list[int]:
    """Divide a stated length: known lengths first, as far as they leave some for the rest, then shares of the rest.

    The lengths add up to ``stated``, unless there are no parts.
    """
    lengths: list[int] = []
    num_left = stated
    for length in known:
        num_behind = len(parts) - len(lengths) - 1
        if length is None or length > num_left - num_behind or (not num_behind and length != num_left):
            break
        lengths.append(length)
        num_left -= length
    weights = np.cumsum([part.weight for part in parts[len(lengths) :]], dtype=np.int64)
    if len(weights):
        ends = weights * num_left // max(1, int(weights[-1]))
        ends[-1] = num_left
        lengths += np.diff(ends, prepend=0).tolist()
    return lengths


def _names(parts: Sequence[Part], parent: bytes) -> list[bytes]:
    """Return a digest of each part and all parts before it, starting from the parent's digest."""
    names = [parent]
    for part in parts:
        names.append(sha256(names[-1] + part.pieces.tobytes()).digest())
    return names
