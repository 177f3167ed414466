"""GrammarMatcher: adapts a grammar of llguidance to the engine's token matchers."""

from collections.abc import Collection, Sequence
from typing import final

import torch

from pagedkv.contract.extras import needing
from pagedkv.errors import SamplingError

with needing("grammar", "pagedkv.server.grammars"):
    from llguidance import LLMatcher

__all__ = ["GrammarMatcher"]


@final
class GrammarMatcher:
    """Constrains one sequence to a grammar: a :class:`~pagedkv.engine.sampling.TokenMatcher`.

    Args:
        matcher: a matcher of llguidance at the grammar's beginning, owned by this object.
        vocab_size: columns of the logits.
        eos_token_ids: tokens that end an answer; after a complete answer several of them may follow each other.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._accepted: list[int] = []

    def allowed_tokens(self, generated_ids: list[int], /) -> torch.Tensor:
        """Set the matcher's state to these tokens of the answer, and return the tokens that may follow.

        After a complete answer that nothing can extend, only the tokens that end an answer are allowed.

        Returns:
            int32 ``[ceil(vocabulary / 32)]`` with the bit of each allowed token set, lowest bit first; after the
            answer's end bool ``[vocabulary]``.

        Raises:
            SamplingError: the grammar does not allow the tokens, or llguidance's limits of work are exceeded.

        Cost: one mask of the vocabulary, and one step of the grammar for each token that the last call did not have.
        """
        num_ends = 0
        while num_ends < len(generated_ids) and generated_ids[-1 - num_ends] in self._eos_token_ids:
            num_ends += 1
        self._move_to(generated_ids[: len(generated_ids) - num_ends])
        if num_ends:  # never passed to llguidance, whose rollback counts end tokens differently
            return self._ended()
        mask = self._matcher.compute_bitmask()
        self._require_sound()
        return torch.frombuffer(bytearray(mask), dtype=torch.int32)

    def fork(self) -> "GrammarMatcher":
        """Return an independent matcher at the same place of the same grammar."""
        copy = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        copy._accepted = self._accepted.copy()
        return copy

    def _move_to(self, token_ids: Sequence[int]) -> None:
        accepted = self._accepted
        common = len(accepted)
        if token_ids[:common] != accepted:
            common = next(
                (at for at, (have, want) in enumerate(zip(accepted, token_ids, strict=False)) if have != want),
                min(common, len(token_ids)),
            )
            if not self._matcher.rollback(len(accepted) - common):
                self._require_sound()
            del accepted[common:]
        for token in token_ids[common:]:
            if token in self._eos_token_ids or not self._matcher.try_consume_tokens([token]):
                self._require_sound()
                raise SamplingError(f"the grammar does not allow token {token} as number {len(accepted)} of the answer")
            accepted.append(token)

    def _ended(self) -> torch.Tensor:
        if not self._matcher.is_accepting():
            raise SamplingError(f"the grammar does not allow that the answer ends after {len(self._accepted)} tokens")
        flags = torch.zeros(self._vocab_size, dtype=torch.bool)
        flags[list(self._eos_token_ids)] = True
        return flags

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise SamplingError(f"the grammar cannot continue: {self._matcher.get_error()}")
