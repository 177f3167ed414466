"""Words that must not be generated: which token each of them forbids after what stands there now.

A word of one token is always forbidden. A longer one forbids its last token where its others stand right before; they
are found by the token that stands last, so a step costs the words that end in it, not all words.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import final

__all__ = ["BadWords", "bad_words_as_ids"]


@final
class BadWords:
    """The bad words of one request; shared by its sequences, since nothing in it changes.

    Args:
        words: token ids of each.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        different = dict.fromkeys(tuple(word) for word in words)
        self.always = tuple(word[0] for word in different if len(word) == 1)
        self._by_last: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in different:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append((word[:-1], word[-1]))
        self.num_before = max((len(word) - 1 for word in different), default=0)

    def after(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that longer words forbid after these; the last ``num_before`` are enough."""
        if not token_ids:
            return []
        found = self._by_last.get(token_ids[-1], ())
        return [token for before, token in found if tuple(token_ids[-len(before) :]) == before]


def bad_words_as_ids(
    words: Iterable[str | Sequence[int]], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Turn bad words into token ids: text as it begins a text, and as it follows a space. Ids stay as they are.

    Args:
        words: of :class:`~pagedkv.engine.sampling.parameters.SamplingParams`.
        encode: gives a text's token ids without special tokens.

    Returns:
        Token ids of each spelling, each once. The spelling after a space counts where it is another one of as many
        tokens: a space that is a token of its own would forbid the word's pieces elsewhere.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        found[plain] = None
        if len(spaced) == len(plain):
            found[spaced] = None
    found.pop((), None)
    return tuple(found)
