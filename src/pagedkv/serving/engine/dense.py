"""What a model answers by itself, dense, to one prompt; and how far that is certain.

Two ways to compute the same logits round differently. So an answer can be held against another one only up to the
first position where the model could have chosen otherwise: where its two largest logits are closer than
:data:`TOLERANCE` of their spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.serving.engine import compat
from pagedkv.serving.engine.borrowing import BorrowedModel
from pagedkv.serving.engine.llm import LLM

__all__ = ["TOLERANCE", "DenseAnswer", "ask_dense"]

TOLERANCE: Final = 1e-4
"""Of the standard deviation of a position's logits; float32."""


@dataclass(frozen=True, slots=True)
class DenseAnswer:
    """A model's own answer.

    Args:
        token_ids: the tokens.
        num_certain: of them, how many come before the first that could have been another one.
    """

    token_ids: tuple[int, ...]
    num_certain: int


def ask_dense(model: compat.Model, llm: LLM, prompt_token_ids: Sequence[int], num_new: int) -> DenseAnswer:
    """Let a model answer by its own ``generate``: the most likely tokens, which none of them ends.

    Args:
        model: the model.
        llm: an engine for it, between steps; it knows whether the model has soft caps.
        prompt_token_ids: at least one.
        num_new: how many tokens, at least one.
    """
    has_cap = any(layer.soft_cap for layer in llm.groups.attention)
    with BorrowedModel(model).dense(has_cap=has_cap):
        token_ids, logits = compat.dense_generate(model, prompt_token_ids, num_new)
    top = logits.topk(2, dim=1).values
    is_close = (top[:, 0] - top[:, 1] < TOLERANCE * logits.std(dim=1)).tolist()
    return DenseAnswer(tuple(token_ids), is_close.index(True) if True in is_close else len(is_close))
