"""Prompts of the parts of the benchmark, and an engine that answers them without HTTP."""

from collections.abc import Sequence
from typing import Final

from pagedkv.engine import LLM, EngineConfig
from pagedkv.engine.demo.serving import decode, draw_questions
from pagedkv.engine.demo.trained import load_demo
from pagedkv.engine.prompts import chat_token_ids

__all__ = ["NUM_BLOCKS", "draw_prompts", "engine_for"]

NUM_DOCUMENTS: Final = 4
NUM_BLOCKS: Final = 4000


def draw_prompts(num: int) -> list[str]:
    """Draw prompts of some 400 tokens."""
    return [decode(question.prompt.tolist()[1:]) for question in draw_questions(num, NUM_DOCUMENTS, 1)]


def engine_for(prompts: Sequence[str], max_sequences: int) -> tuple[list[list[int]], LLM]:
    """Return the prompts as a server makes them, and an engine like a server's."""
    model, tokenizer = load_demo()
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_sequences=max_sequences, self_test=False, leases=True)
    chats = [chat_token_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    return chats, LLM(model, config, tokenizer=tokenizer)
