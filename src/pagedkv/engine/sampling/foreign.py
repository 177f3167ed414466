"""Foreign processors of a request's sampling: logits processors, and token matchers such as grammars.

Two small protocols. A :class:`LogitsProcessor` is called as transformers calls its own, with one row, so all of
transformers' can be used unchanged. A :class:`TokenMatcher` returns the allowed next tokens. Both may return
:data:`NOT_READY`: that row then waits, and no other row does (:mod:`.sampler`). Nothing here depends on a grammar.
"""

from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import torch

from pagedkv.errors import SamplingError


class NotReady(Enum):
    """The type of :data:`NOT_READY`."""

    NOT_READY = "not ready"


NOT_READY: Final = NotReady.NOT_READY
"""Returned by a processor without a result yet: it is called again later."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes one row's scores, as transformers' logits processors do."""

    def __call__(self, token_ids: torch.LongTensor, scores: torch.FloatTensor, /) -> torch.Tensor | NotReady:
        """Return the scores to sample from, or NOT_READY.

        Args:
            token_ids: int64 ``[1, tokens]``, prompt and answer so far.
            scores: float32 ``[1, vocabulary]``; may be overwritten.

        Returns:
            Scores of the same shape.
        """
        ...


@runtime_checkable
class TokenMatcher(Protocol):
    """Returns the tokens that are allowed next."""

    def allowed_tokens(self, generated_ids: list[int], /) -> torch.Tensor | NotReady:
        """Return the tokens that may follow these tokens of the answer, which may be fewer than in the last call.

        Returns:
            bool ``[vocabulary]``, or int32 ``[ceil(vocabulary / 32)]`` with the bit of each allowed token set,
            the lowest first; or that it is not ready.
        """
        ...

    def fork(self) -> "TokenMatcher":
        """Return an independent matcher for another sequence of the same request."""
        ...


ForeignProcessor: TypeAlias = LogitsProcessor | TokenMatcher


def apply_foreign(
    processors: tuple[ForeignProcessor, ...], token_ids: list[int], num_prompt_tokens: int, scores: torch.Tensor
) -> torch.Tensor | None:
    """Apply one row's foreign processors in their order.

    Args:
        processors: of this row; token_ids: prompt and answer so far.
        scores: float32 ``[1, vocabulary]``; may be overwritten.

    Returns:
        Scores to sample from, or None where one of them is not ready; ``scores`` may have been overwritten then, too.

    Raises:
        SamplingError: an answer of the wrong type or shape. What a processor raises goes through.
    """
    for index, processor in enumerate(processors):
        answer: object
        if isinstance(processor, TokenMatcher):
            answer = processor.allowed_tokens(token_ids[num_prompt_tokens:])
            if isinstance(answer, torch.Tensor):
                answer = scores.masked_fill_(~_as_flags(answer, scores, index), -torch.inf)
        else:
            ids = torch.tensor([token_ids], dtype=torch.int64, device=scores.device)
            answer = processor(ids, scores)  # type: ignore[arg-type] # a typed tensor is a tensor
        if answer is NOT_READY:
            return None
        if not isinstance(answer, torch.Tensor) or answer.shape != scores.shape:
            given = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
            raise SamplingError(
                f"logits processor {index} ({type(processor).__name__}) must answer scores of the shape "
                f"{tuple(scores.shape)} or NOT_READY, got {given}"
            )
        scores = answer.to(scores)
    return scores


def _as_flags(answer: torch.Tensor, scores: torch.Tensor, index: int) -> torch.Tensor:
    """Turn a matcher's answer into bool ``[1, vocabulary]``."""
    size = scores.shape[1]
    answer = answer.to(scores.device)
    if answer.dtype == torch.bool and answer.shape == (size,):
        return answer[None]
    if answer.dtype == torch.int32 and answer.ndim == 1 and len(answer) * 32 >= size:
        bits = torch.arange(32, dtype=torch.int32, device=answer.device)
        return ((answer[:, None] >> bits) & 1).bool().view(1, -1)[:, :size]
    raise SamplingError(
        f"the matcher in place {index} of logits_processors must answer bool [{size}] or int32 [{-(-size // 32)}], got "
        f"{answer.dtype} {list(answer.shape)}"
    )


class XGrammarMatcher:
    """A grammar of xgrammar (https://github.com/mlc-ai/xgrammar) as a :class:`TokenMatcher`.

    Args:
        compiled_grammar: an ``xgrammar.CompiledGrammar``.
        vocab_size: of the logits.

    Raises:
        ImportError: xgrammar is not installed.
    """

    def __init__(self, compiled_grammar: Any, vocab_size: int) -> None:  # noqa: ANN401 - xgrammar may be absent
        import xgrammar  # noqa: PLC0415 - needed by users of this class alone

        self._grammar = compiled_grammar
        self._vocab_size = vocab_size
        self._matcher = xgrammar.GrammarMatcher(compiled_grammar, max_rollback_tokens=-1)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._accepted: list[int] = []

    def allowed_tokens(self, generated_ids: list[int], /) -> torch.Tensor:
        """Move to these tokens, back or forth, and return the tokens that may follow.

        Raises:
            SamplingError: the grammar does not allow what was generated.
        """
        common = 0
        for have, want in zip(self._accepted, generated_ids, strict=False):
            if have != want:
                break
            common += 1
        if common < len(self._accepted):
            self._matcher.rollback(len(self._accepted) - common)
            del self._accepted[common:]
        for token in generated_ids[common:]:
            if not self._matcher.accept_token(token):
                raise SamplingError(
                    f"the grammar does not allow token {token} as number {len(self._accepted)} of the answer"
                )
            self._accepted.append(token)
        self._matcher.fill_next_token_bitmask(self._bits, 0)
        bits: torch.Tensor = self._bits[0]
        return bits

    def fork(self) -> "XGrammarMatcher":
        """Return a matcher at the beginning of the same grammar; :meth:`allowed_tokens` moves it."""
        return XGrammarMatcher(self._grammar, self._vocab_size)
