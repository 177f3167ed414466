"""Where a breakpoint lies in tokens, also with templates that refuse the beginning of a conversation."""

from typing import Any

import pytest

from pagedkv.engine import Breakpoint, Chat
from pagedkv.server.chat_prompts import ChatPrompts, KeptAnswers, breakpoints_at
from pagedkv.server.config import Caller

FACTS = "red kite: locker 7. blue lamp: shelf 12. "
QUESTION = "Where? red kite:"


@pytest.mark.parametrize("question_is_apart", [False, True])
def test_a_template_that_refuses_a_conversation_without_its_question_has_a_place_before_it(
    *, question_is_apart: bool
) -> None:
    pytest.importorskip("transformers")
    from pagedkv.engine.demo.trained import load_demo  # noqa: PLC0415 - needs torch

    tokenizer: Any = load_demo()[1]
    chats, caller = ChatPrompts(tokenizer, KeptAnswers(100)), Caller(None)
    texts = [FACTS, QUESTION] if question_is_apart else [FACTS + QUESTION]
    whole = Chat([{"role": "user", "content": text} for text in texts])
    beginning = Chat([{"role": "user", "content": FACTS}])
    prepared = chats.prepare(whole, caller)
    [found] = breakpoints_at([(beginning, 300.0)], whole, prepared, chats, caller)
    assert found == Breakpoint(1 + len(tokenizer(FACTS, add_special_tokens=False).input_ids), 300.0)
