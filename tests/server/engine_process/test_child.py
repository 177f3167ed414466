"""What the engine's process tells in two lists of numbers, and what as it is."""

from dataclasses import replace
from typing import Any, cast

import pytest

from pagedkv.engine import RequestOutput, TokenUpdate
from pagedkv.engine.answer_stream import StreamMessage
from pagedkv.engine.sampling import TokenLogprobs
from pagedkv.errors import EngineError
from pagedkv.server.engine_process.child import Recipient, only_token

UPDATE = TokenUpdate(0, 0, (7,), None)
LOGPROBS = TokenLogprobs(7, -1.0, 1, ())
OUTPUT = RequestOutput(0, (1,), (), 0, 0, 0, None, None)


def recipient(*, has_begun: bool = True) -> Recipient:
    """Make a request whose first token was told."""
    made = Recipient(1, cast("Any", None))
    made.has_begun = has_begun
    return made


def test_a_further_token_is_told_as_a_number() -> None:
    assert only_token(StreamMessage(recipient(), (UPDATE,), num_cached_tokens=16)) == 7


@pytest.mark.parametrize(
    "message",
    [
        StreamMessage(recipient(has_begun=False), (UPDATE,), num_cached_tokens=16),
        StreamMessage(recipient()),
        StreamMessage(recipient(), (UPDATE, replace(UPDATE, index=1))),
        StreamMessage(recipient(), (replace(UPDATE, index=1),)),
        StreamMessage(recipient(), (replace(UPDATE, token_ids=(7, 8)),)),
        StreamMessage(recipient(), (replace(UPDATE, token_ids=(), finish_reason="aborted"),)),
        StreamMessage(recipient(), (replace(UPDATE, finish_reason="stop", stop=7),)),
        StreamMessage(recipient(), (replace(UPDATE, logprobs=(LOGPROBS,)),)),
        StreamMessage(recipient(), (UPDATE,), OUTPUT),
        StreamMessage(recipient(), (UPDATE,), problem=EngineError("it has ended")),
    ],
)
def test_what_tells_more_is_told_whole(message: StreamMessage) -> None:
    assert only_token(message) is None
