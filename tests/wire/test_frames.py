"""Frames as real publishers send them, and as others do."""

import pytest

from pagedkv.errors import RecordingError
from pagedkv.wire import Message
from pagedkv.wire.following import answered, published, request_frames
from tests.wire.golden_frames import NUMBERS, SGLANG, TOPIC, VLLM, answer


@pytest.mark.parametrize("payloads", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_messages_of_real_publishers(payloads: tuple[bytes, bytes]) -> None:
    messages = [published([TOPIC, number, each], "") for number, each in zip(NUMBERS, payloads, strict=True)]
    assert messages == [Message(0, payloads[0]), Message(1, payloads[1])]
    assert {message.topic for message in messages} == {TOPIC}


@pytest.mark.parametrize("payloads", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_what_real_publishers_send_again(payloads: tuple[bytes, bytes]) -> None:
    assert [answered(frames, "") for frames in answer(payloads)] == [Message(1, payloads[1]), None]
    assert request_frames(1) == [b"", NUMBERS[1]]


@pytest.mark.parametrize("before", [[], [b""], [b"kv"], [b"", b"kv"]], ids=["neither", "either", "topic", "both"])
def test_the_empty_frame_and_the_topic_may_be_missing_from_an_answer(before: list[bytes]) -> None:
    assert answered([*before, NUMBERS[1], b"payload"], "") == Message(1, b"payload")
    assert answered([*before, b"\xff" * 8, b""], "") is None


@pytest.mark.parametrize("frames", [[b"alone"], [b"", b"short", b"x"], [b"", b"", b"", NUMBERS[0], b"x"]])
def test_other_frames_are_refused_with_what_to_name(frames: list[bytes]) -> None:
    with pytest.raises(RecordingError, match=r"here: an answer has frames of .* bytes.*`replay="):
        answered(frames, "here")
    with pytest.raises(RecordingError, match=r"here: a message has frames of .* bytes.*tcp://127.0.0.1:5557"):
        published(frames, "here")
