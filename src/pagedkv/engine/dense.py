"""Dense generation by a model itself, and the number of tokens up to which it is certain.

Two ways to compute the same logits round differently. So two answers can be compared only up to the first position at
which rounding could change the token: where the two largest logits are closer than :data:`TOLERANCE` of their spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.engine import compat
from pagedkv.engine.borrowing import BorrowedModel
from pagedkv.engine.llm import LLM

__all__ = ["TOLERANCE", "DenseAnswer", "ask_dense"]

TOLERANCE: Final = 1e-4
"""Of the standard deviation of a position's logits; float32."""


@dataclass(frozen=True, slots=True)
class DenseAnswer:
    """The answer of dense generation.

    Args:
        token_ids: the tokens.
        num_certain: tokens before the first that rounding could change.
    """

    token_ids: tuple[int, ...]
    num_certain: int


def ask_dense(model: compat.Model, llm: LLM, prompt_token_ids: Sequence[int], num_new: int) -> DenseAnswer:
    """Generate the most likely tokens by a model's own ``generate``, without end tokens.

    Args:
        model: the model.
        llm: an engine of the model, between steps, from which the soft caps of its layers are read.
        prompt_token_ids: at least one.
        num_new: number of tokens, at least one.
    """
    has_cap = any(layer.soft_cap for layer in llm.groups.attention)
    with BorrowedModel(model).dense(has_cap=has_cap):
        token_ids, logits = compat.dense_generate(model, prompt_token_ids, num_new)
    top = logits.topk(2, dim=1).values
    is_close = (top[:, 0] - top[:, 1] < TOLERANCE * logits.std(dim=1)).tolist()
    return DenseAnswer(tuple(token_ids), is_close.index(True) if True in is_close else len(is_close))
