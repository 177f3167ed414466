"""Whose a request is: by a column, a field, an attribute of a span, or a key of the trace's own format."""

import json
from pathlib import Path

import pytest

from pagedkv.errors import TraceError
from pagedkv.planner.traces.merging import sorted_by_arrival
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.token_blocks import anonymized
from pagedkv.planner.traces.writer import TraceWriter

SAMPLES = Path(__file__).with_name("samples")
HEADER = '{"format": "pagedkv-trace", "version": 1}\n'
OWN = HEADER + "".join(
    f'{{"arrival_s": {n}, "input_length": 9, "output_length": 1, "tenant": "{name}", "x_team": "t{n}"}}\n'
    for n, name in enumerate("aba")
)


def tenants(path: Path, field: str | None) -> list[str | None]:
    with TraceReader(path, tenant_by=field) as trace:
        return [request.tenant for request in trace]


def test_a_trace_of_our_own_names_tenants_itself(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(OWN)
    assert tenants(path, None) == ["a", "b", "a"]
    assert tenants(path, "x_team") == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], "who": {"team": 7}}',
            "who.team",
            "7",
        ),
        ("arrived_s,input_length,output_length,customer\n0,5,1,acme", "customer", "acme"),
        ("0,5,1,acme", "4", "acme"),
        (
            '{"ts": 0, "prompt": "x", "usage": {"prompt_tokens": 5}, "metadata": {"team": "red"}}',
            "metadata.team",
            "red",
        ),
        (
            '{"ts": 0, "request": "{\\"messages\\": [], \\"user\\": \\"u\\"}", "usage": {"prompt_tokens": 5}}',
            "request.user",
            "u",
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "who", None),
    ],
)
def test_a_field_or_a_column_names_the_tenant(tmp_path: Path, text: str, field: str, expected: str | None) -> None:
    path = tmp_path / "log"
    path.write_text(text + "\n")
    columns = {"arrival": "1", "input": "2", "output": "3"} if field == "4" else None
    with TraceReader(path, tenant_by=field, columns=columns) as trace:
        assert [request.tenant for request in trace] == [expected]


def test_spans_name_it_by_their_attributes_and_by_those_of_what_made_them(tmp_path: Path) -> None:
    span = {
        "startTimeUnixNano": "1764000000000000000",
        "attributes": [
            {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "12"}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "3"}},
            {"key": "user.id", "value": {"stringValue": "u1"}},
        ],
    }
    maker = {"attributes": [{"key": "service.name", "value": {"stringValue": "search"}}]}
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps({"resourceSpans": [{"resource": maker, "scopeSpans": [{"spans": [span]}]}]}) + "\n")
    assert tenants(path, "user.id") == ["u1"]
    assert tenants(path, "service.name") == ["search"]


@pytest.mark.parametrize("name", ["vllm.log", "sglang.log"])
def test_an_engines_log_names_nobody_and_says_so(name: str) -> None:
    with pytest.raises(TraceError, match="has no tenants"):
        tenants(SAMPLES / name, "user")


def test_a_column_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("arrived_s,input_length,output_length\n0,5,1\n")
    with pytest.raises(TraceError, match="has no column 'team'"):
        tenants(path, "team")


def test_tenants_are_sorted_and_written_with_their_requests_and_no_name_is_let_out(tmp_path: Path) -> None:
    path, written, secret = (tmp_path / name for name in ("own.jsonl", "written.jsonl", "secret.jsonl"))
    path.write_text(OWN)
    with TraceReader(path) as trace, written.open("wb") as file, TraceWriter(file) as writer:
        for request in sorted_by_arrival(trace, max_run_nbytes=1):
            writer.write(request)
    assert tenants(written, None) == ["a", "b", "a"]
    assert '"tenant":"b"' in written.read_text()
    with TraceReader(path) as trace, secret.open("wb") as file, TraceWriter(file) as writer:
        for request in anonymized(trace, b"salt"):
            writer.write(request)
    first, second, third = tenants(secret, None)
    assert first == third != second
    assert {first, second}.isdisjoint({"a", "b"})
