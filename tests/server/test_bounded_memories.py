"""What a server remembers of earlier answers: by tenant, and within a bound."""

import pytest

from pagedkv.contract.answers import Explanation, MissCause
from pagedkv.server import ApiError, Caller
from pagedkv.server.anthropic.conversations import ContentBlocks
from pagedkv.server.anthropic.messages import Fingerprint, MessageMemory, cache_miss_reason
from pagedkv.server.chat_prompts import KeptAnswers
from pagedkv.server.openai.responses import StoredResponses
from pagedkv.server.parsing import CallArguments, CallBegin, CallEnd

ONE, OTHER = Caller("one", b"1"), Caller("other", b"2")


def fingerprint(system: bytes = b"s", *beginnings: bytes, num_reusable: int = 64) -> Fingerprint:
    """Make one."""
    return Fingerprint(b"m", system, b"t", b"".join(each * 16 for each in beginnings), num_reusable)


def test_a_message_is_found_by_its_tenant_alone() -> None:
    memory = MessageMemory()
    memory.keep(ONE, "msg_1", fingerprint())
    assert memory.find(ONE, "msg_1") == fingerprint()
    assert memory.find(OTHER, "msg_1") is None
    assert memory.find(Caller(None), "msg_1") is None


def test_messages_that_came_first_are_dropped_first() -> None:
    one = fingerprint()
    memory = MessageMemory(one.nbytes * 2)
    for name in ("a", "b", "c"):
        memory.keep(ONE, name, one)
    assert [memory.find(ONE, name) is not None for name in ("a", "b", "c")] == [False, True, True]


def test_a_stored_response_is_found_by_its_tenant_alone() -> None:
    stored = StoredResponses(60)
    message = [{"role": "user", "content": "x"}]
    stored.keep(ONE, message, {"id": "a"})
    assert stored.find(ONE, "a").messages == message
    with pytest.raises(ApiError, match="'a'"):
        stored.find(OTHER, "a")
    stored.keep(ONE, message, {"id": "b"})
    assert stored.find(ONE, "b").messages == message
    with pytest.raises(ApiError, match="dropped"):
        stored.find(ONE, "a")


def test_content_of_other_tenants_is_no_cause() -> None:
    """Where nothing hits, a position would show how far another tenant's prompt is the same."""
    changed = Explanation(100, 0, MissCause.CHANGED_TOKENS, 7)
    reason = cache_miss_reason(fingerprint(), fingerprint(b"other"), 0, changed, ONE)
    assert reason == {"type": "system_changed", "cache_missed_input_tokens": 64, "cause": "never stored", "position": 0}
    alone = cache_miss_reason(fingerprint(), fingerprint(b"other"), 0, changed, Caller(None))
    assert alone is not None
    assert alone["position"] == 7


def test_evicted_content_is_unavailable_with_its_cause() -> None:
    evicted = Explanation(100, 16, MissCause.EVICTED, 16)
    before, now = fingerprint(b"s", b"1"), fingerprint(b"s", b"1", b"2", num_reusable=96)
    assert cache_miss_reason(before, now, 64, evicted, ONE) is None
    assert cache_miss_reason(before, now, 16, evicted, ONE) == {
        "type": "unavailable",
        "cache_missed_input_tokens": 48,
        "cause": "evicted",
        "position": 16,
    }


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", ""])
def test_arguments_that_broke_off_are_told_as_none(arguments: str) -> None:
    content = ContentBlocks()
    events = list(content.add([CallBegin(0, "call_1", "f"), CallArguments(0, arguments), CallEnd(0)]))
    assert content.blocks == [{"type": "tool_use", "id": "call_1", "name": "f", "input": {}}]
    assert [event["type"] for event in events] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]


def test_a_tenant_that_keeps_much_pushes_out_its_own() -> None:
    kept = KeptAnswers(100)
    kept.keep(b"small", range(40), "one")
    for number in range(20):
        kept.keep(bytes([number]), range(20), "other")
    assert kept.find(b"small", "one") is not None
    assert kept.find(b"small", "other") is None
    assert [kept.find(bytes([number]), "other") is not None for number in range(16, 20)] == [False, True, True, True]
    assert kept.num_tokens == 100
    kept.keep(b"all", range(100), "one")
    assert kept.find(b"all", "one") is None, "the largest tenant loses, itself among them"
    assert kept.num_tokens == 60
