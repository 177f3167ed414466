"""What a file is, told by how it begins: compressed, a table, or something that is named and refused."""

import gzip
import json
import pickle
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces import lines
from pagedkv.planner.traces.formats.csv_rows import parse_columns
from pagedkv.planner.traces.reader import TraceReader
from tests.traces.trace_files import HASH_IDS, LENGTHS

ROWS: list[dict[str, Any]] = [
    {"ts": 1, "messages": [{"role": "user", "content": "Name a river."}], "response": {"content": "The Elbe."}},
    {"ts": 2, "messages": [{"role": "user", "content": "Another."}], "response": {"content": "The Oder."}},
]


def read(path: Path, **options: Any) -> list[tuple[float, int, int]]:  # noqa: ANN401 - what TraceReader takes
    with TraceReader(path, **options) as trace:
        return [(request.arrival_s, request.input_length, request.output_length) for request in trace]


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read(path)
    return str(caught.value)


def test_zst_is_read_of_one_frame_or_several_and_a_cut_one_is_told(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "plain").write_text(HASH_IDS)
    expected = read(tmp_path / "plain")
    lines = HASH_IDS.encode().splitlines(keepends=True)
    whole = zstandard.compress(HASH_IDS.encode())
    for content in (whole, b"".join(zstandard.compress(line) for line in lines)):
        (tmp_path / "trace.zst").write_bytes(content)
        assert read(tmp_path / "trace.zst") == expected
    assert "the compressed file is cut short here" in refused(tmp_path / "cut", whole[:-3])
    assert "cannot be read" in refused(tmp_path / "damaged", whole[:5] + b"\xff" * 9 + whole[14:])


def test_a_long_zst_is_read_piece_by_piece(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}
    text = "".join(json.dumps(row | {"timestamp": number}) + "\n" for number in range(20_000))
    (tmp_path / "trace").write_bytes(zstandard.compress(text.encode()))
    assert len(read(tmp_path / "trace")) == 20_000


USAGE: list[dict[str, Any]] = [
    {"timestamp": datetime(2026, 3, 1, 9, 0, second, tzinfo=UTC), "prompt_tokens": 12, "completion_tokens": 3}
    for second in (0, 1)
]


def test_flat_tables_of_usage_are_read_in_every_kind_of_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(USAGE), tmp_path / "usage.parquet")
    (tmp_path / "usage.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in USAGE))
    cells = "".join(f"{row['timestamp']},{row['prompt_tokens']},{row['completion_tokens']}\n" for row in USAGE)
    (tmp_path / "usage.csv").write_text(f"timestamp,prompt_tokens,completion_tokens\n{cells}")
    expected = [(row["timestamp"].timestamp(), 12, 3) for row in USAGE]
    for name in ("usage.parquet", "usage.jsonl", "usage.csv"):
        assert read(tmp_path / name) == expected, name
    cached = {"ts": 5, "input_tokens": 10, "cache_read_input_tokens": 90, "output_tokens": 3, "status_code": 200}
    (tmp_path / "cached.jsonl").write_text(json.dumps(cached) + "\n" + json.dumps({**cached, "status_code": 429}))
    assert read(tmp_path / "cached.jsonl") == [(5.0, 100, 3)]


def test_a_flat_table_of_other_names_is_told_the_option_that_reads_it(tmp_path: Path) -> None:
    rows = [{"began_ts": 5, "n_input": 12, "n_generated": 3, "team": "a"}]
    (tmp_path / "rows").write_text(json.dumps(rows[0]))
    told = refused(tmp_path / "rows", (tmp_path / "rows").read_bytes())
    assert "Name the fields: `fields=arrival=began_ts,input=n_input,output=n_generated`" in told
    assert read(tmp_path / "rows", columns=parse_columns("arrival=began_ts,input=n_input,output=n_generated")) == [
        (5.0, 12, 3)
    ]
    told = refused(tmp_path / "csv", b"began_ts,n_input,n_generated\n5,12,3\n")
    assert "`columns=arrival=began_ts,input=n_input,output=n_generated`" in told


def test_an_export_of_helicone_needs_no_status(tmp_path: Path) -> None:
    row = {"request_created_at": "2026-03-01T09:00:00Z", "prompt_tokens": 12, "completion_tokens": 3, "provider": "x"}
    (tmp_path / "rows").write_text(json.dumps(row))
    assert [lengths for _, *lengths in read(tmp_path / "rows")] == [[12, 3]]


@pytest.mark.parametrize(
    "span",
    [
        {
            "traceId": "1",
            "startTimeUnixNano": "1700000000000000000",
            "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "12"}}],
        },
        {"start_time_unix_nano": 17 * 10**8 * 10**9, "attributes": {"gen_ai.usage.input_tokens": 12}},
        {"start_time": 1.7e9, "name": "chat", "gen_ai.usage.input_tokens": 12, "gen_ai.operation.name": "chat"},
        {
            "timestamp": 1.7e9,
            "attributes.gen_ai.usage.input_tokens": 12,
            "attributes.gen_ai.operation.name": "chat",
        },
        {
            "Timestamp": 1.7e9,
            "SpanAttributes": {"gen_ai.usage.input_tokens": "12", "gen_ai.operation.name": "chat"},
        },
    ],
)
def test_flat_spans_are_read(tmp_path: Path, span: dict[str, Any]) -> None:
    of_answer = {"gen_ai.usage.output_tokens": 3}
    if isinstance(span.get("attributes"), list):
        span["attributes"].append({"key": "gen_ai.usage.output_tokens", "value": {"intValue": "3"}})
    else:
        span = {**span, "attributes": {**span["attributes"], **of_answer}} if "attributes" in span else span | of_answer
    (tmp_path / "spans").write_text(json.dumps(span))
    assert read(tmp_path / "spans") == [(1.7e9, 12, 3)]


def test_parquet_is_read_as_the_same_rows_in_json_are(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    expected = read(tmp_path / "rows.jsonl")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows")
    assert read(tmp_path / "rows") == expected
    dated = [row | {"ts": datetime(2026, 3, 1, 9, 0, row["ts"], tzinfo=UTC)} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(dated), tmp_path / "dated")
    assert [arrival_s for arrival_s, _, _ in read(tmp_path / "dated")] == [1772355601.0, 1772355602.0]


def test_a_parquet_table_is_read_by_its_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    azure = pyarrow.table(
        {
            "TIMESTAMP": ["2023-11-16 18:15:46.68", "2023-11-16 18:15:50"],
            "ContextTokens": [374, 396],
            "GeneratedTokens": [44, 9],
        }
    )
    parquet.write_table(azure, tmp_path / "azure")
    assert read(tmp_path / "azure") == [(1700158546.68, 374, 44), (1700158550.0, 396, 9)]
    parquet.write_table(pyarrow.table({"t_ms": [1500, 2500], "in": [7, 8], "out": [1, 2]}), tmp_path / "own")
    columns = parse_columns("arrival=t_ms,input=in,output=out")
    assert read(tmp_path / "own", columns=columns) == [(1.5, 7, 1), (2.5, 8, 2)]
    whole = (tmp_path / "own").read_bytes()
    assert "not a whole Parquet file" in refused(tmp_path / "cut", whole[:-20])


@pytest.mark.parametrize(
    ("module", "head", "extra"),
    [(lines, b"\x28\xb5\x2f\xfd", ".[zstd]"), (lines, b"PAR1", ".[parquet]")],
)
def test_a_missing_extra_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    head: bytes,
    extra: str,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(module, "import_module", missing)
    (tmp_path / "trace").write_bytes(head + bytes(20))
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path / "trace")
    assert f"pip install '{extra}'" in str(caught.value)


def test_what_is_no_text_is_named_with_what_to_do(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zipped", "w") as archive:
        archive.writestr("trace.jsonl", HASH_IDS)
    assert "it is a zip archive. Unpack it" in refused(tmp_path / "a", (tmp_path / "zipped").read_bytes())
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        assert "it is UTF-16 text. Write it as UTF-8" in refused(tmp_path / "a", LENGTHS.encode(encoding))
    assert "it is a pickle. Write its rows" in refused(tmp_path / "a", pickle.dumps(ROWS))
    assert "it is an SQLite database" in refused(tmp_path / "a", b"SQLite format 3\x00" + bytes(99))
    assert "it is compressed by xz. Decompress it" in refused(tmp_path / "a", b"\xfd7zXZ\x00" + bytes(9))
    assert "it is a tar archive" in refused(tmp_path / "a", b"trace.jsonl".ljust(257, b"\x01") + b"ustar\x0000")
    (tmp_path / "a").write_bytes(gzip.compress(LENGTHS.encode()))
    assert len(read(tmp_path / "a")) == 2


def test_numbers_may_have_commas_between_thousands(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('arrived_s,input_length,output_length\n0,"1,234","2,000,000"\n')
    assert read(tmp_path / "a") == [(0.0, 1234, 2_000_000)]
    assert "$.input_length" in refused(tmp_path / "a", b'arrived_s,input_length,output_length\n0,"1,23",1\n')


def test_json_lines_of_any_shape_are_read_by_their_fields(tmp_path: Path) -> None:
    rows = [
        {
            "at": {"begin_ms": 1500},
            "ask": {"turns": [{"role": "user", "content": "Hi"}]},
            "n": {"in": "1,024", "out": 3},
        },
        {"at": {"begin_ms": 2500}, "ask": {"turns": "[]"}, "n": {"in": 9.0, "out": "2"}, "who": "ann", "state": 429},
    ]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = "arrival=at.begin_ms,prompt=ask.turns,input=n.in,output=n.out,user=who"
    assert read(tmp_path / "a", columns=parse_columns(named, "fields")) == [(1.5, 1024, 3), (2.5, 9, 2)]
    named += ",status=state"
    assert read(tmp_path / "a", columns=parse_columns(named, "fields")) == [(1.5, 1024, 3)]
    with pytest.raises(TraceError, match=r"has nothing for arrival under 'when'. It has ask, at, n"):
        read(tmp_path / "a", columns=parse_columns("arrival=when,input=n.in,output=n.out"))
    with pytest.raises(ConfigurationError, match="`fields` must name the column of output or answer"):
        parse_columns("arrival=at,input=n", "fields")
