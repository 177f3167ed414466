"""The public methods that explain why hits end."""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

import numpy.typing as npt

from pagedkv.contract.arguments import as_count, as_row
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.miss_causes import Explanation
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import ConfigurationError, SequenceError
from pagedkv.space import miss_analysis
from pagedkv.space.content_space import ContentSpace

__all__ = ["ExplanationMethods"]


class ExplanationMethods(ContentSpace):
    """The part of a block space that explains hits."""

    def explain(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        max_hit_tokens: int | None = None,
    ) -> Explanation:
        """Return how many leading tokens hit, as :meth:`match` does, and why the hit ends there. Changes nothing.

        Exact for cached content. With ``SpaceConfig.explain`` the pool also remembers the latest evicted content;
        without it, and for older content, the cause is ``UNKNOWN``.

        Args:
            token_ids, keys, digests, max_hit_tokens: as in :meth:`match`.

        Raises: as :meth:`match`.

        Cost: O(blocks of the pool + tokens), about 3 ns a block of the pool and 0.1 us a block of the prompt that does
        not hit. Reading what was recorded when a request was admitted is cheaper (:meth:`explanation`).
        """
        hit = self.match(token_ids, keys=keys, digests=digests, max_hit_tokens=max_hit_tokens)
        return miss_analysis.explain(self._state, hit.prompt, hit)

    def explanation(self, row: int, generation: int | None = None) -> Explanation:
        """Return why a request's hit ended, as recorded when the request was admitted. Changes nothing.

        Recorded if ``SpaceConfig.explain`` is set. The answer is that of :meth:`BlockSpace.explain
        <pagedkv.BlockSpace.explain>` at that time, with one restriction: of the cached content, only the latest
        continuation of the hit, and only its first block, was compared. So it may say "never stored" of content that is
        cached under other keys or with changed tokens. It is about the prompt of ``match=``, or else about the
        allocated tokens.

        Args:
            row: a row that was allocated; forks have no explanation.
            generation: which of the row's sequences (:meth:`generation`), if it may have been freed since. Beside those
                that have rows, the last 1,024 sequences (or ``max_sequences``, if that is more) are remembered. None:
                the sequence that has the row.

        Raises:
            ConfigurationError: nothing is recorded in this space.
            SequenceError: the row was never given out, or not by an allocation; the generation is forgotten.

        Cost: O(1) while the sequence lives, else O(remembered sequences).
        """
        book = self._explanations
        if book is None:
            raise ConfigurationError("no explanations are recorded: set explain=True in the configuration")
        if generation is None:
            return book.explanation(row, int(self._state.serials[self._occupied(row)]))
        return book.explanation(as_row(row), as_count(generation, "generation", error=SequenceError))
