"""One small file of each foreign format, made here: what it is taken for, and the requests that come out."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.clocks import GeneratedArrivals
from pagedkv.planner.traces.formats.csv_rows import parse_columns
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import CharacterTokens, FileTokens

SAMPLES = Path(__file__).with_name("samples")
COLUMNS = "arrival=when_ms,input=tokens in,output=out,user=who"
FIELDS = "arrival=at.begin_ms,prompt=ask.turns,answer=reply,input=n.in,output=n.out,user=who,status=state"
CLAUDE = "2f8b1c4d-6a73-4e9b-91c0-5d7f3a8e2b46"
CODEX = "01a7c9e4-6d12-7b3a-9f42-8c6d5e1a0b73"

# Name of the file: what it is taken for; arrival, prompt and output tokens, sequences and session of each request.
EXPECTED: dict[str, tuple[str, list[tuple[float, int, int, int, str | None]]]] = {
    "azure.csv": (
        "Azure's CSV of lengths, times in ISO 8601",
        [(1700158546.68059, 374, 44, 1, None), (1700158550.995169, 396, 109, 1, None)],
    ),
    "burstgpt.csv": (
        "BurstGPT's CSV of lengths, times in s",
        [(5.0, 472, 18, 1, None), (45.0, 1087, 230, 1, None)],
    ),
    "columns.csv": (
        "CSV by `columns`, times in ms",
        [(1772355600.123, 12, 3, 1, "ann"), (1772355600.623, 7, 0, 1, "bob")],
    ),
    "bailian.jsonl": (
        "Qwen-Bailian's hash_ids of 16 tokens, times in s",
        [(61.114, 40, 132, 1, "159"), (90.5, 64, 3, 1, "159")],
    ),
    "mooncake.jsonl": (
        "Mooncake's hash_ids of 512 tokens, times in ms",
        [(27.482, 600, 52, 1, None), (30.535, 512, 26, 1, None)],
    ),
    "usage.jsonl": (
        "an OpenAI style request log, times in ms, lengths from its usage",
        [(1772355600.123, 120, 40, 1, None), (1772355601.623, 90, 0, 1, None)],
    ),
    "openai.jsonl": (
        "an OpenAI style request log, times in ISO 8601, lengths of its usage, content of its texts",
        [(1772355600.0, 30, 10, 1, "u1"), (1772355620.5, 48, 5, 2, "u1")],
    ),
    "anthropic.jsonl": (
        "an Anthropic style request log, times in s, lengths of its usage, content of its texts",
        [(1772355600.0, 12, 3, 1, None), (1772355605.25, 22, 3, 1, None)],
    ),
    "vllm.log": (
        (
            "vLLM's request log, times in s, tokens of the log, estimated for 1 of 2 prompts: 4 characters a token, "
            "left out: 1 (no answer: 1)"
        ),
        [(978307199.0, 6, 3, 1, None), (978307201.0, 7, 2, 2, None)],
    ),
    "vllm-debug.log": (
        "vLLM's request log, times in s, tokens of the log, left out: 1 (aborted: 1)",
        [(957184201.0, 24, 12, 1, None), (957184204.0, 44, 3, 1, None)],
    ),
    "sglang.log": (
        "SGLang's request log, times in ISO 8601, lengths of its meta data, content of its texts",
        [(1772355601.0, 4, 2, 1, None), (1772355602.0, 4, 2, 1, None)],
    ),
    "sglang.jsonl": (
        "SGLang's request log, times in ISO 8601, lengths of its meta data, content of its texts",
        [(1772355601.25, 4, 2, 1, None), (1772355602.25, 40, 2, 1, None)],
    ),
    "sglang-level2.log": (
        (
            "SGLang's request log, times in ISO 8601, lengths of its meta data, content of its texts, "
            "truncated prompts: 1 (what they share is unknown), left out: 1 (503: 1)"
        ),
        [(1772355601.25, 806, 4, 1, "s7"), (1772355602.0, 5, 3, 1, None)],
    ),
    "litellm.jsonl": (
        (
            "LiteLLM's log of calls (calls that generate no text, skipped: 1), times in s, lengths of its usage, "
            "content of its texts, left out: 2 (429: 1, answered from a cache of answers: 1)"
        ),
        [(1772355600.5, 24, 9, 1, "s1"), (1772355605.0, 40, 4, 1, "s1")],
    ),
    "litellm.csv": (
        "LiteLLM's table of spend, times in ISO 8601, lengths from its columns, left out: 1 (failure: 1)",
        [(1772355600.5, 1024, 9, 1, "s1"), (1772355605.0, 1080, 4, 1, "bob")],
    ),
    "langfuse.jsonl": (
        (
            "Langfuse's generations (other observations skipped: 1), times in ISO 8601, lengths of its usage, "
            "content of its texts, left out: 1 (Rate limit: 1)"
        ),
        [(1772355600.5, 24, 9, 1, "s1"), (1772355605.25, 40, 54, 1, "s1")],
    ),
    "langfuse.json": (
        "Langfuse's generations, times in ISO 8601, lengths of its usage, content of its texts",
        [(1772355600.5, 24, 9, 1, "t1"), (1772355605.25, 40, 4, 1, "t1")],
    ),
    "helicone.jsonl": (
        (
            "Helicone's requests, times in ISO 8601, lengths of its usage, content of its texts, left out: 2 (429: 1, "
            "no answer: 1)"
        ),
        [(1772355600.5, 24, 9, 1, "s1"), (1772355605.25, 40, 4, 1, "ann")],
    ),
    "otel.jsonl": (
        (
            "OpenTelemetry's spans of generative AI (other spans skipped: 1), times in ns, lengths of its usage, "
            "content of its texts, left out: 1 (429: 1)"
        ),
        [(1772355600.5, 24, 9, 1, "s1"), (1772355605.25, 40, 4, 1, "s1"), (1772355606.5, 11, 5, 1, None)],
    ),
    "responses.jsonl": (
        (
            "a log of OpenAI's Responses API, times in ISO 8601, lengths of its usage, content of its texts, "
            "truncated prompts: 1 (what they share is unknown), left out: 1 (server_error: 1)"
        ),
        [(1772355600.5, 24, 9, 1, "ann"), (1772355605.25, 40, 54, 1, "ann"), (1772355607.0, 30, 3, 1, "bob")],
    ),
    "batch-input.jsonl": (
        (
            "an OpenAI batch file, 4 characters a token, answers missing in it: 2 (each counted with its greatest "
            "allowed length), generated arrivals: at random, 1 a second"
        ),
        [(0.0, 24, 100, 1, None), (0.679932, 22, 100, 1, None)],
    ),
    "batch-output.jsonl": (
        "an OpenAI batch file, times in s, lengths from its usage, left out: 1 (batch_expired: 1)",
        [(1772355600.0, 24, 9, 1, None), (1772355605.0, 21, 5, 1, None)],
    ),
    "bench.json": (
        "a result of vllm bench serve, times in s, lengths from its usage, left out: 1 (error: 1)",
        [(0.0, 128, 3, 1, None), (0.5, 64, 2, 1, None)],
    ),
    "wildchat.jsonl": (
        (
            "WildChat's conversations by the time of the last turn (for 1 of 4 turns 30 s between two are assumed), "
            "times in ISO 8601, lengths of its usage, content of its texts, estimated for 3 of 4 prompts and 3 of 4 "
            "answers: 4 characters a token"
        ),
        [
            (1772355601.5, 12, 9, 1, "c1"),
            (1772355621.0, 31, 1, 1, "c1"),
            (1772355631.0, 8, 3, 1, "c2"),
            (1772355640.0, 19, 4, 1, "c2"),
        ],
    ),
    "bedrock.jsonl": (
        (
            "Bedrock's log of invocations (calls that generate no text, skipped: 1), times in ISO 8601, lengths of its "
            "usage, content of its texts, truncated prompts: 1 (what they share is unknown), left out: 1 "
            "(ThrottlingException: 1)"
        ),
        [
            (1772355600.0, 24, 9, 1, None),
            (1772355605.0, 40, 4, 1, None),
            (1772355606.0, 21, 6, 1, None),
            (1772355608.0, 90_000, 4, 1, None),
        ],
    ),
    "vertex.jsonl": (
        "a log of Gemini's requests, times in ISO 8601, lengths of its usage, content of its texts",
        [(1772355600.5, 24, 9, 1, None), (1772355605.25, 40, 54, 1, None)],
    ),
    "vertex-batch.jsonl": (
        "a log of Gemini's requests, times in ISO 8601, lengths of its usage, content of its texts",
        [(1772355600.5, 24, 9, 1, None), (1772355605.25, 40, 4, 1, None)],
    ),
    "openinference.jsonl": (
        (
            "OpenTelemetry's spans of generative AI (other spans skipped: 1), times in ISO 8601, lengths of its usage, "
            "content of its texts"
        ),
        [(1772355600.5, 24, 9, 1, "s1"), (1772355605.25, 40, 4, 1, "s1")],
    ),
    "langsmith.jsonl": (
        ("LangSmith's runs (other runs skipped: 1), times in ISO 8601, lengths of its usage, content of its texts"),
        [(1772355600.5, 24, 9, 1, "s1"), (1772355605.25, 40, 4, 1, "s1")],
    ),
    "claude-code.jsonl": (
        (
            "Claude Code's sessions (rows of other kinds, skipped: 4), times in ISO 8601, lengths of its usage, "
            "content of its texts"
        ),
        [
            (1772355600.5, 1000, 60, 1, CLAUDE),
            (1772355605.25, 1084, 12, 1, CLAUDE),
            (1772355620.0, 1124, 5, 1, CLAUDE),
            (1772355620.2, 300, 3, 1, f"{CLAUDE} a1b2c3"),
        ],
    ),
    "codex.jsonl": (
        (
            "Codex's sessions (rows of other kinds, skipped: 5), times in ISO 8601, lengths of its usage, content of "
            "its texts"
        ),
        [
            (1772355600.5, 200, 40, 1, CODEX),
            (1772355602.5, 230, 9, 1, CODEX),
            (1772355620.0, 250, 2, 1, CODEX),
        ],
    ),
    "tracelab.jsonl": (
        "TraceLab's rounds, which share what the provider's cache had, times in ISO 8601, tokens of the log",
        [
            (1772355600.5, 24, 9, 1, "claude:s1"),
            (1772355605.25, 40, 4, 1, "claude:s1"),
            (1772355609.0, 50, 4, 1, "claude:s1"),
        ],
    ),
    "weka.json": (
        "Weka's sessions of agents, times in s of each session's own clock",
        [
            (0.0, 24, 9, 1, "trace_0001"),
            (2.0, 14, 3, 1, "trace_0001 agent 1"),
            (3.5, 19, 2, 1, "trace_0001 agent 1"),
            (6.0, 40, 4, 1, "trace_0001"),
        ],
    ),
    "fields.jsonl": (
        "JSON lines by `fields`, times in ms, lengths of its fields, content of its texts, left out: 1 (503: 1)",
        [(1772355600.5, 1024, 9, 1, "ann"), (1772355605.25, 1041, 4, 1, "ann")],
    ),
    "sharegpt.json": (
        "ShareGPT conversations without times (one turn every 30 s is assumed), 4 characters a token",
        [(0.0, 14, 2, 1, "first 1"), (30.0, 24, 4, 1, "first 1"), (0.0, 8, 3, 1, "second 2")],
    ),
}


def read(name: str, **options: Any) -> tuple[str, list[Request]]:  # noqa: ANN401 - what TraceReader takes
    """Read a sample: what it is taken for, and its requests."""
    if name == "columns.csv":
        options["columns"] = parse_columns(COLUMNS)
    if name == "fields.jsonl":
        options["columns"] = parse_columns(FIELDS, "fields")
    if name == "batch-input.jsonl":
        options["arrivals"] = GeneratedArrivals(1)
    with TraceReader(SAMPLES / name, **options) as trace:
        requests = list(trace)
        return trace.recognised, requests


def test_every_sample_is_expected() -> None:
    assert {path.name for path in SAMPLES.iterdir()} - {"SOURCES.md"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_is_recognised_and_read(name: str) -> None:
    recognised, requests = read(name)
    found = [
        (request.arrival_s, request.input_length, request.output_length, request.num_samples, request.session)
        for request in requests
    ]
    expected_name, expected = EXPECTED[name]
    if name.startswith("vllm"):  # which tells no year: only the distances mean something
        expected = [(arrival_s - expected[0][0] + found[0][0], *rest) for arrival_s, *rest in expected]  # type: ignore[misc]
    assert (recognised, found) == (expected_name, [pytest.approx(row) if row[-1] is None else row for row in expected])
    for request in requests:
        if request.prompt_token_ids is not None:
            assert len(request.prompt_token_ids) == request.input_length
        if request.output_token_ids is not None:
            assert len(request.output_token_ids) == request.output_length


@pytest.mark.parametrize(
    "name",
    [
        "openai.jsonl",
        "anthropic.jsonl",
        "sharegpt.json",
        "vllm-debug.log",
        "litellm.jsonl",
        "langfuse.jsonl",
        "langfuse.json",
        "otel.jsonl",
        "responses.jsonl",
        "wildchat.jsonl",
        "fields.jsonl",
        "bedrock.jsonl",
        "vertex.jsonl",
        "vertex-batch.jsonl",
        "openinference.jsonl",
        "langsmith.jsonl",
    ],
)
def test_a_conversation_that_goes_on_begins_with_all_that_was_said(name: str) -> None:
    _, (first, second, *_) = read(name)
    assert first.prompt_token_ids is not None
    assert first.output_token_ids is not None
    assert second.prompt_token_ids is not None
    said = np.concatenate([first.prompt_token_ids, first.output_token_ids])
    assert second.prompt_token_ids[: len(said)].tolist() == said.tolist()


def test_token_ids_of_a_log_are_taken_as_they_are() -> None:
    recognised, requests = read("vllm.log", keep_failed=True)
    assert "failed, but kept: 1 (no answer: 1)" in recognised
    assert (requests[2].arrival_s - requests[0].arrival_s, requests[2].output_length) == (5.0, 7)
    prompts = [None if each.prompt_token_ids is None else each.prompt_token_ids.tolist() for each in requests]
    assert (prompts[0], prompts[2]) == ([5, 6, 7, 8, 9, 10], [5, 6])
    assert requests[0].output_token_ids is not None
    assert requests[0].output_token_ids.tolist() == [3, 4, 11]


def test_more_characters_a_token_make_fewer_tokens() -> None:
    recognised, requests = read("vllm.log", texts=CharacterTokens(16))
    assert "16 characters a token" in recognised
    assert requests[1].input_length == 2


def test_texts_that_begin_alike_have_tokens_that_do() -> None:
    tokens = CharacterTokens(3.5)
    one, other = (
        tokens.token_ids("a long enough beginning, then this"),
        tokens.token_ids("a long enough beginning, now"),
    )
    assert one.min() >= 0
    assert one[:7].tolist() == other[:7].tolist()
    assert one[7] != other[7]
    assert len(tokens.token_ids("\ud800 a lone surrogate")) == 6


def test_a_conversation_of_sharegpt_in_one_line_or_as_json_lines_is_the_same(tmp_path: Path) -> None:
    import json  # noqa: PLC0415 - for this test alone

    conversations = json.loads((SAMPLES / "sharegpt.json").read_text())
    _, expected = read("sharegpt.json")
    texts = {
        "one line": json.dumps(conversations),
        "long": json.dumps(conversations) + " " * 3_000_000,
        "lines": "".join(json.dumps(each) + "\n" for each in conversations),
        "second far behind": json.dumps(conversations).replace('}, {"id"', "}," + " " * 2_000_000 + '{"id"'),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        with TraceReader(tmp_path / name) as trace:
            found = list(trace)
        assert [each.input_length for each in found] == [each.input_length for each in expected], name


BROKEN = {
    "csv in another shape": (b"a,b,c\n1,2,3\n", 1, "CSV whose columns are not known: a, b, c. Name the column of each"),
    "a long header": (
        ",".join(f"column_{number}" for number in range(30)).encode(),
        1,
        ", ".join(f"column_{number}" for number in range(12)) + " and 18 more. Name the column of each",
    ),
    "open quotes": (b'arrived_s,input_length,output_length\n0,"1,2\n', 2, "quotes open here and never close"),
    "a year's wait": (
        b"arrived_s,input_length,output_length\n1772355600,1,2\n1772355600000,1,2\n",
        3,
        "from the request before it, at '1772355600000'. State the unit of the times",
    ),
    "no date": (b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", 2, "'yesterday' is no time"),
    "no time": (b'{"messages": [], "model": "m"}\n', 1, "has no time among messages, model"),
    "no length": (
        b'{"ts": 1, "request": {}, "model": "m"}\n',
        1,
        "neither the prompt of this request nor its length is in the log",
    ),
    "usage of text": (b'{"ts": 1, "usage": {"prompt_tokens": "9"}}\n', 1, "usage.prompt_tokens is '9', no number"),
    "prompts not logged": (
        b"INFO 01-01 00:00:04 [logger.py:43] Received request a: params: SamplingParams(n=1), lora_request: None.\n",
        1,
        "neither the prompt of this request nor its length is in the log. Let the engine log prompts (vLLM",
    ),
    "no request": (b"INFO 01-01 00:00:04 [x.py:1] Starting\n", 1, "no request follows"),
    "a turn of nobody": (b'{"conversations": [{"value": "x"}]}\n', 1, "a turn has no from and value that are texts"),
    "an array cut short": (b'[{"id": "a", "conversations": [', 1, "an object does not end"),
    "ids that do not fit": (
        b'{"chat_id": 1, "timestamp": 1, "input_length": 64, "output_length": 1, "hash_ids": [1]}\n',
        1,
        "1 block ids do not fit a prompt of 64 tokens at 16 tokens a block",
    ),
}


@pytest.mark.parametrize(("content", "line", "reason"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, content: bytes, line: int, reason: str) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(TraceError) as caught, TraceReader(tmp_path / "log") as trace:
        list(trace)
    assert str(caught.value).startswith(f"{tmp_path / 'log'}:{line}: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("unit", "value", "expected_s"),
    [
        (None, "1772355600", 1772355600),
        (None, "1772355600250", 1772355600.25),
        (None, "1772355600250000", 1772355600.25),
        (None, "1772355600250000000", 1772355600.25),
        (None, "2026-03-01T10:00:00.25+01:00", 1772355600.25),
        (None, "12.5", 12.5),
        ("ms", "12500", 12.5),
        ("us", "1772355600", 1772.3556),
    ],
)
def test_the_unit_of_times_is_told_by_the_first_or_by_the_user(
    tmp_path: Path, unit: str | None, value: str, expected_s: float
) -> None:
    (tmp_path / "log.csv").write_text(f"arrived_s,input_length,output_length\n{value},1,1\n")
    with TraceReader(tmp_path / "log.csv", time_unit=unit) as trace:
        assert [request.arrival_s for request in trace] == [pytest.approx(expected_s, rel=1e-12)]


def test_a_tokenizers_file_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "Once": 1, "upon": 2, "a": 3, "time": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    recognised, (first, _) = read("sglang.log", texts=FileTokens(str(tmp_path / "tokenizer.json")))
    assert recognised.endswith("lengths of its meta data, content of its texts (tokens of tokenizer.json)")
    assert first.prompt_token_ids is not None
    assert first.prompt_token_ids.tolist() == [1, 2, 3, 4]
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"broken.json: cannot be read as a tokenizer.json"):
        FileTokens(str(tmp_path / "broken.json"))


def test_columns_may_be_numbers_with_or_without_a_header(tmp_path: Path) -> None:
    for header in ("", "t,in,out\n"):
        (tmp_path / "log.csv").write_text(f"{header}0.5,7,3\n1.5,8,2\n")
        with TraceReader(tmp_path / "log.csv", columns=parse_columns("arrival=1,input=2,output=3")) as trace:
            assert [(each.arrival_s, each.input_length) for each in trace] == [(0.5, 7), (1.5, 8)]


def test_columns_may_hold_the_texts_themselves(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('t,question,reply\n0,"Tell me, please","A lot,\nreally"\n')
    with TraceReader(tmp_path / "log.csv", columns=parse_columns("arrival=t,prompt=question,answer=reply")) as trace:
        (request,) = trace
    assert (request.input_length, request.output_length) == (4, 4)
    assert request.prompt_token_ids is not None


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(EXPECTED)), st.data())
def test_damage_of_any_kind_is_told_as_a_fault_of_the_file(name: str, data: st.DataObject) -> None:
    content = bytearray((SAMPLES / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        piece = data.draw(
            st.sampled_from([b"", b"9" * 25, b'"', b"{", b"[", b",", b"-", b"null", b"\n", b"\xff", b"e"])
        )
        content[place : place + data.draw(st.integers(0, 30))] = piece
    columns = {"columns.csv": parse_columns(COLUMNS), "fields.jsonl": parse_columns(FIELDS, "fields")}.get(name)
    with TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        with suppress(TraceError), TraceReader(Path(folder) / name, columns=columns) as trace:
            for request in trace:
                assert 1 <= request.input_length <= 2**24
