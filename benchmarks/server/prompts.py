"""Prompts of the parts of the benchmark."""

from typing import Final

from pagedkv.engine.demo.serving import decode, draw_questions

__all__ = ["draw_prompts"]

NUM_DOCUMENTS: Final = 4


def draw_prompts(num: int) -> list[str]:
    """Draw prompts of some 400 tokens."""
    return [decode(question.prompt.tolist()[1:]) for question in draw_questions(num, NUM_DOCUMENTS, 1)]
