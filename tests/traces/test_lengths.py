"""Lengths that a log states, and contents of its texts, against counts made from the rows by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.clocks import spread_stamps
from pagedkv.planner.traces.formats.calls import KnownLengths
from pagedkv.planner.traces.formats.parts import PICTURE_TOKENS, ids_part, text_part
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import CharacterTokens

TEXTS = CharacterTokens()
CHINESE = "从前有一座山山上有一座庙庙里有一个老和尚在讲故事。"


def read(path: Path, rows: list[Any], **options: Any) -> tuple[list[Request], str, list[str]]:  # noqa: ANN401 - as typed
    """Read rows, each as JSON or a line: the requests, what they were taken for, and what must be known."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (path / "log").write_text("\n".join(lines) + "\n")
    with TraceReader(path / "log", **options) as trace:
        requests = list(trace)
        return requests, trace.recognised, trace.notes


def chat(ts: float, messages: list[tuple[str, Any]], answer: str, prompt: int, completion: int) -> dict[str, Any]:
    return {
        "ts": ts,
        "messages": [{"role": role, "content": content} for role, content in messages],
        "response": {
            "choices": [{"message": {"role": "assistant", "content": answer}}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
        },
    }


def common(one: Request, other: Request, *, with_output: bool = False) -> int:
    """Tokens that the prompt of the second begins with as the first does, whose output may count."""
    assert one.prompt_token_ids is not None
    assert other.prompt_token_ids is not None
    first = one.prompt_token_ids
    if with_output:
        assert one.output_token_ids is not None
        first = np.concatenate([first, one.output_token_ids])
    num = min(len(first), len(other.prompt_token_ids))
    differ = np.flatnonzero(first[:num] != other.prompt_token_ids[:num])
    return int(differ[0]) if len(differ) else num


def test_a_conversation_in_chinese_has_its_lengths_and_hits_all_that_was_said(tmp_path: Path) -> None:
    asked, said, more = CHINESE * 100, CHINESE * 30, CHINESE * 5
    rows = [
        chat(1, [("system", "你是助手。"), ("user", asked)], said, 2417, 705),
        chat(9, [("system", "你是助手。"), ("user", asked), ("assistant", said), ("user", more)], "好", 3260, 1),
        chat(12, [("system", "你是助手。"), ("user", "你好")], "好", 19, 1),
    ]
    (first, second, third), told, notes = read(tmp_path, rows)
    assert told == "an OpenAI style request log, times in s, lengths of its usage, content of its texts"
    assert notes == []
    assert [(each.input_length, each.output_length) for each in (first, second, third)] == [
        (2417, 705),
        (3260, 1),
        (19, 1),
    ]
    assert common(first, second, with_output=True) >= 2417 + 705
    assert 0 < common(first, third) < 19


def test_texts_that_begin_alike_do_so_as_tokens_whatever_their_lengths(tmp_path: Path) -> None:
    examples = "".join(
        f"Question {number}: how much is {number} and {number}? Answer: {2 * number}.\n" for number in range(99)
    )
    rows = [
        {"ts": number, "prompt": examples + question, "usage": {"prompt_tokens": tokens, "completion_tokens": 3}}
        for number, (question, tokens) in enumerate([("What of 5?", 1706), ("And of 7, if you please, what?", 1712)])
    ]
    (first, second), *_ = read(tmp_path, rows)
    assert (first.input_length, second.input_length) == (1706, 1712)
    share = len(examples) / len(examples + "What of 5?")
    assert common(first, second) == pytest.approx(1706 * share, abs=4)


def test_what_no_row_states_is_counted_by_characters_and_only_that_is_said(tmp_path: Path) -> None:
    rows = [chat(1, [("user", "Hello")], "Hi", 9, 2), {"ts": 2, "messages": [{"role": "user", "content": "x" * 400}]}]
    rows[1]["response"] = {"choices": [{"message": {"role": "assistant", "content": "y" * 40}}]}
    (_, second), told, _ = read(tmp_path, rows)
    roles = -(-len("<|user|>") // 4) + -(-len("<|assistant|>") // 4)
    assert (second.input_length, second.output_length) == (roles + 100, 10)
    assert told.endswith(
        "lengths of its usage, content of its texts, estimated for 1 of 2 prompts and 1 of 2 answers: "
        "4 characters a token"
    )


def test_a_picture_is_not_its_letters(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 14_000}}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgp" * 14_000}}
    rows: list[Any] = [
        {"ts": number, "messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, shown]}]}
        for number, shown in enumerate((picture, picture, other))
    ]
    rows.append(chat(9, [("user", [{"type": "text", "text": "What is it?"}, picture])], "A cat", 781, 4))
    requests, told, _ = read(tmp_path, rows, keep_failed=True)
    assert requests[0].input_length == PICTURE_TOKENS + 2 + 3 + 4
    assert requests[3].input_length == 781
    assert common(requests[0], requests[1]) == requests[0].input_length
    assert common(requests[0], requests[2]) == 2 + 3
    assert f"pictures and files without a stated length: 3 ({PICTURE_TOKENS:,} tokens each)" in told


def test_thoughts_are_no_part_of_what_comes_next(tmp_path: Path) -> None:
    first = chat(1, [("user", "How many?")], "Four of them, as I said.", 12, 507)
    first["response"]["usage"]["completion_tokens_details"] = {"reasoning_tokens": 500}
    turns = [("user", "How many?"), ("assistant", "Four of them, as I said."), ("user", "And now?")]
    (one, other), *_ = read(tmp_path, [first, chat(2, turns, "Five.", 27, 2)])
    assert (one.input_length, one.output_length, other.input_length) == (12, 507, 27)
    assert common(one, other, with_output=True) == 12
    assert one.output_token_ids is not None
    assert other.prompt_token_ids is not None
    assert one.output_token_ids[500:].tolist() == other.prompt_token_ids[12:19].tolist()


def test_failed_requests_are_left_out_kept_and_counted(tmp_path: Path) -> None:
    rows = [
        {"ts": 1, "messages": [{"role": "user", "content": "a"}], "response": None},
        chat(2, [("user", "b")], "c", 7, 3),
        {
            "ts": 3,
            "messages": [{"role": "user", "content": "d"}],
            "status_code": 429,
            "error": {"message": "slow down"},
        },
        {
            "ts": 4,
            "messages": [{"role": "user", "content": "e"}],
            "response": {"status": 500, "error": {"code": "oops"}},
        },
        {"ts": 5, "messages": [{"role": "user", "content": "f"}], "status": "error", "error": {"type": "overloaded"}},
        {"ts": 6, "messages": [{"role": "user", "content": "g"}]},
        chat(7, [("user", "h")], "i", 7, 2),
    ]
    requests, told, _ = read(tmp_path, rows)
    assert [each.arrival_s for each in requests] == [2, 7]
    assert told.endswith("left out: 5 (no answer: 2, 429: 1, 500: 1, overloaded: 1)")
    requests, told, _ = read(tmp_path, rows, keep_failed=True)
    assert [each.arrival_s for each in requests] == [1, 2, 3, 4, 5, 6, 7]
    assert "failed, but kept: 5" in told
    with pytest.raises(TraceError, match=r"every request of the file failed \(429: 1\)\. Keep them: `keep_failed`"):
        read(tmp_path, rows[2:3])


def test_a_log_without_any_answer_tells_of_no_failures(tmp_path: Path) -> None:
    rows = [{"ts": number, "messages": [{"role": "user", "content": "a"}]} for number in range(300)]
    requests, told, _ = read(tmp_path, rows)
    assert (len(requests), told.endswith("without an answer: 300")) == (300, True)


def test_prompts_that_were_cut_pile_up_and_that_is_told(tmp_path: Path) -> None:
    def lines(length: int, number: int) -> list[str]:
        ids = [number + place for place in range(min(100, length))]
        at = f"INFO 05-01 12:30:{number:02} [request_logger.py:66]"
        return [
            f"DEBUG {at[5:]} Request r{number} details: prompt: 'x', prompt_token_ids: {ids}, prompt_embeds: None.",
            f"{at} Received request r{number}: params: SamplingParams(n=1, max_tokens=9), lora_request: None.",
        ]

    cut = [line for number, length in enumerate([400, 30, 500, 600, 20, 700, 800]) for line in lines(length, number)]
    allowed = (
        "the log lacks the answers of 7 of 7 requests: each counts with its greatest allowed length, which is "
        "usually too long"
    )
    *_, (piled, *others) = read(tmp_path, cut)
    assert piled.startswith("5 of 7 prompts have 100 tokens and none has more: if the log cuts prompts (--max-log-len")
    assert others == [allowed]
    whole = [line for number, length in enumerate([40, 30, 50, 60, 20, 70, 80]) for line in lines(length, number)]
    assert read(tmp_path, whole)[2] == [allowed]


@pytest.mark.parametrize("options", [{}, {"texts": CharacterTokens(3.0)}])
def test_prompts_that_became_equal_by_the_cut_are_told_too(tmp_path: Path, options: dict[str, Any]) -> None:
    system = "You are a helpful assistant of the house. " * 3
    cut = [
        f"INFO 05-01 12:30:{number:02} [x.py:1] Received request r{number}: prompt: {(system + question)[:100]!r}, "
        "params: SamplingParams(n=1, max_tokens=9), prompt_token_ids: None, lora_request: None."
        for number, question in enumerate(["Who?", "Where is it?", "When?", "Why?", "What for?", "How?"])
    ]
    short = cut[0].replace(system[:100], "Hello").replace("r0", "r9").replace(":00 [", ":59 [")
    *_, notes = read(tmp_path, [*cut, short], **options)
    assert notes[0].startswith("6 of 7 prompts have 100 characters and none has more: if the log cuts prompts")


def test_stamps_in_whole_seconds_are_told_and_spread_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = [{"ts": number // 5, "usage": {"prompt_tokens": 9, "completion_tokens": 1}} for number in range(40)]
    requests, _, notes = read(tmp_path, rows)
    told = "times are whole seconds, so 32 of 40 requests come together with the one before: bursts that may come"
    assert notes == [f"{told} from rounding; `span_s=1` spreads them over their second"]
    spread = [round(each.arrival_s, 6) for each in spread_stamps(requests, 1.0)]
    assert spread == [round(number / 5, 6) for number in range(40)]
    assert [each.arrival_s for each in spread_stamps(requests[:7], 4.0)] == [0, 0.2, 0.4, 0.6, 0.8, 1, 3]
    with pytest.raises(ConfigurationError, match="`span_s` must be a number of seconds above 0"):
        spread_stamps(requests, 0)
    assert read(tmp_path, rows, is_spread=True)[2] == []
    *_, out_of_order = read(tmp_path, [*rows[1::2], *rows[::2]], any_order=True)
    assert out_of_order == notes, "equal stamps need not stand together"
    rows[9]["ts"] = 1.25
    assert read(tmp_path, rows)[2] == []


def test_a_clock_of_coarse_steps_is_told_whatever_its_unit(tmp_path: Path) -> None:
    def written(step_ms: int) -> list[dict[str, Any]]:
        lengths = {"input_length": 512, "output_length": 1, "hash_ids": [0]}
        return [{"timestamp": 27 + step_ms * (number // 5) + number // 25, **lengths} for number in range(40)]

    *_, notes = read(tmp_path, written(2999))
    told = "times come in steps of 3 s and more, so 32 of 40 requests come together with the one before: bursts that"
    assert notes == [f"{told} may come from rounding; `span_s=3` spreads them over their step"]
    assert read(tmp_path, written(100))[2] == [], "so many may come within a tenth of a second"


def test_a_prompt_shorter_than_what_it_begins_with_keeps_its_length() -> None:
    lengths = KnownLengths()
    head, tail = text_part("x" * 400, TEXTS), text_part("y" * 40, TEXTS)
    long, _ = lengths.prompt([head, tail], 900)
    short, _ = lengths.prompt([head, tail], 300)
    assert (len(long), len(short)) == (900, 300)
    exact, _ = lengths.prompt([ids_part(np.arange(7, dtype=np.int32))], 9)
    assert exact.tolist() == list(range(7))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.lists(st.sampled_from(["", "a", "bcd" * 9, CHINESE, "x" * 300]), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.one_of(st.none(), st.integers(0, 2000)), min_size=8, max_size=8),
)
def test_lengths_are_those_stated_and_equal_texts_begin_alike(
    prompts: list[list[str]], stated: list[int | None]
) -> None:
    lengths = KnownLengths()
    for texts, length in zip(prompts, stated, strict=False):
        tokens, _ = lengths.prompt([text_part(text, TEXTS) for text in texts], length)
        assert length is None or len(tokens) == length
        assert len(tokens) == 0 or tokens.min() >= 0
        again, _ = lengths.prompt([text_part(text, TEXTS) for text in texts], length)
        assert len(again) == len(tokens)
        num = len(tokens) - 1  # the last one may stand for what was cut
        assert num <= 0 or length is None or again[:1].tolist() == tokens[:1].tolist()


def test_what_a_prompt_says_is_no_part_of_the_log_line(tmp_path: Path) -> None:
    said = "what is prompt_token_ids: [9, 9], params: max_tokens=3, input_ids=[9]?"
    at = "05-01 12:30:00 [request_logger.py:66]"
    vllm = [
        f"DEBUG {at} Request r details: prompt: {said!r}, prompt_token_ids: [1, 2, 3], prompt_embeds shape: None.",
        f"INFO {at} Received request r: params: SamplingParams(n=1, max_tokens=64), lora_request: None.",
    ]
    (request,), *_ = read(tmp_path, vllm)
    assert (request.input_length, request.output_length) == (3, 64)
    obj = f"obj=GenerateReqInput(rid='a', session_id='s', text={said!r}, input_ids=[1, 2, 3, 4])"
    out = f"out={{'text': {said!r}, 'output_ids': [5, 6], 'meta_info': {{'prompt_tokens': 4, 'completion_tokens': 2}}}}"
    (request,), *_ = read(tmp_path, [f"[2026-03-01 09:00:01] Finish: {obj}, {out}"])
    assert (request.input_length, request.output_length, request.session) == (4, 2, "s")
    assert request.output_token_ids is not None
    assert request.output_token_ids.tolist() == [5, 6]
