"""Small traces of every format, and every way in which one can be broken, with the line that is to blame."""

import gzip
import json
from dataclasses import dataclass

__all__ = ["BROKEN", "HASH_IDS", "HASH_RUNS", "LENGTHS", "PAGEDKV", "SESSIONS", "TOKENS", "BrokenTrace", "as_text"]


def as_text(*rows: object) -> str:
    """Write JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


HASH_IDS = as_text(
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 0, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 13, "output_length": 5, "hash_ids": [4]},
)
HASH_RUNS = as_text(
    {"timestamp": 0, "session": "a", "input_length": 9, "output_length": 3, "hash_runs": []},
    {"timestamp": 500, "session": "b", "input_length": 100, "output_length": 3, "hash_runs": [[7, 5], [20, 1]]},
    {"timestamp": 900, "session": "b", "input_length": 15, "output_length": 0, "hash_runs": []},
)
SESSIONS = as_text(
    {
        "session": "one",
        "block_size": 64,
        "tool_tokens": 10,
        "requests": [
            {"t": 0.0, "input_length": 130, "output_length": 9, "hash_runs": [[1, 2]], "agent": 0, "think_time": None},
            {"t": 2.5, "input_length": 200, "output_length": 0, "hash_runs": [[1, 2], [9, 1]], "agent": 0},
        ],
    },
    {"session": "none", "block_size": 64, "requests": []},
    {
        "session": "two",
        "block_size": 64,
        "requests": [{"t": 0.0, "input_length": 64, "output_length": 1, "hash_runs": [[1, 1]]}],
    },
)
PAGEDKV = as_text(
    {"format": "pagedkv-trace", "version": 1, "block_size": 16, "x_made_by": "hand"},
    {"arrival_s": 0, "input_length": 40, "output_length": 3, "block_runs": [[5, 2]]},
    {
        "arrival_s": 0.5,
        "session": "s",
        "input_length": 40,
        "output_length": 0,
        "num_samples": 2,
        "priority": -1,
        "block_ids": [5, 6, 9],
    },
    {"arrival_s": 0.5, "input_length": 16, "output_length": 1, "block_ids": [5], "x_model": {"name": "m"}},
    {"arrival_s": 0.75, "input_length": 7, "output_length": 1},
)
TOKENS = as_text(
    {"format": "pagedkv-trace", "version": 1},
    {"arrival_s": 0, "token_ids": [5, 6, 7, 8, 9], "output_token_ids": [1, 2]},
    {"arrival_s": 1.25, "input_length": 4, "token_ids": [5, 6, 7, 7], "output_length": 3},
)
LENGTHS = "arrived_s,input_length,output_length\n0.000,374,44\n4.315,396,0\n"


@dataclass(frozen=True)
class BrokenTrace:
    """A broken file, the line to blame (None: the whole file), and a piece of the reason that must be given."""

    content: bytes
    line: int | None
    reason: str


def _json(line: int, reason: str, *rows: object) -> BrokenTrace:
    return BrokenTrace(as_text(*rows).encode(), line, reason)


_IDS_ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
_RUNS_ROW = {"timestamp": 0, "session": "a", "input_length": 100, "output_length": 3, "hash_runs": [[0, 6]]}
_SESSION_REQUEST = {"t": 0.0, "input_length": 130, "output_length": 9, "hash_runs": [[1, 2]]}


_HEADER = {"format": "pagedkv-trace", "version": 1, "block_size": 16}
_OWN_ROW = {"arrival_s": 0, "input_length": 100, "output_length": 3, "block_runs": [[0, 6]]}


def _session(name: str = "s", **changes: object) -> dict[str, object]:
    return {"session": name, "block_size": 64, "requests": [_SESSION_REQUEST, _SESSION_REQUEST | changes]}


def _own(reason: str, **changes: object) -> BrokenTrace:
    """A row in our own format that is wrong after these changes, None taking a key away."""
    row = {key: value for key, value in (_OWN_ROW | changes).items() if value is not None}
    return _json(3, reason, _HEADER, _OWN_ROW, row)


_BAD_CHECKSUM = bytearray(gzip.compress(HASH_IDS.encode()))
_BAD_CHECKSUM[-8] ^= 0xFF

BROKEN = {
    "empty file": BrokenTrace(b"", None, "empty"),
    "blank lines only": BrokenTrace(b"\n\n  \n", None, "empty"),
    "empty gzip": BrokenTrace(gzip.compress(b""), None, "empty"),
    "gzip header cut": BrokenTrace(gzip.compress(HASH_IDS.encode())[:7], 1, "cut short"),
    "gzip without its end": BrokenTrace(gzip.compress(HASH_IDS.encode())[:-6], 4, "cut short"),
    "gzip damaged": BrokenTrace(bytes(_BAD_CHECKSUM), 4, "cannot be read"),
    "not UTF-8": BrokenTrace(HASH_IDS.encode() + b'{"\xff": 1}\n', 4, "byte 3 of the line is not UTF-8 (0xff)"),
    "not text at all": BrokenTrace(b"\x89PNG\r\n\x1a\n\x00", 1, "not UTF-8 (0x89)"),
    "line cut": BrokenTrace(HASH_IDS.encode()[:-20], 3, "not a whole JSON object"),
    "line cut, gzip": BrokenTrace(gzip.compress(HASH_RUNS.encode()[:-20]), 3, "not a whole JSON object"),
    "first line cut": BrokenTrace(b'{"timestamp": 0, "input_le', 1, "not a whole JSON object"),
    "line not an object": BrokenTrace(HASH_IDS.encode() + b"[1, 2]\n", 4, "Expected `object`, got `array`"),
    "unknown keys": _json(1, "no known trace format has the keys a, b", {"a": 1, "b": 2}),
    "no keys": _json(1, "no known trace format has the keys (none)", {}),
    "unknown header": BrokenTrace(b"time,in,out\n1,2,3\n", 1, "CSV whose columns are not known: time, in, out"),
    "array first": BrokenTrace(b"[]\n", None, "the file is empty"),
    "missing key": _json(2, "missing required field `output_length`", _IDS_ROW, {"input_length": 5, "hash_ids": []}),
    "text for a number": _json(2, "$.input_length", _IDS_ROW, _IDS_ROW | {"input_length": "600"}),
    "empty prompt": _json(2, "input_length is 0", _IDS_ROW, _IDS_ROW | {"input_length": 0, "hash_ids": []}),
    "negative length": _json(2, "input_length is -600", _IDS_ROW, _IDS_ROW | {"input_length": -600}),
    "absurd length": _json(2, "input_length is 10000000000000", _IDS_ROW, _IDS_ROW | {"input_length": 10**13}),
    "negative output": _json(3, "output_length is -1", _IDS_ROW, _IDS_ROW, _IDS_ROW | {"output_length": -1}),
    "absurd output": _json(2, "output_length is", _IDS_ROW, _IDS_ROW | {"output_length": 2**24 + 1}),
    "negative time": _json(2, "arrival in seconds is -0.001", _IDS_ROW, _IDS_ROW | {"timestamp": -1}),
    "absurd time": _json(2, "arrives 11,574,074,074 days from", _IDS_ROW, _IDS_ROW | {"timestamp": 1e18}),
    "infinite time": BrokenTrace(
        b'{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n', 1, "out of range"
    ),
    "too few ids": _json(2, "1 block ids do not fit a prompt of 600", _IDS_ROW, _IDS_ROW | {"hash_ids": [1]}),
    "too many ids": _json(1, "3 block ids do not fit a prompt of 600", _IDS_ROW | {"hash_ids": [1, 2, 3]}),
    "negative id": _json(1, "$.hash_ids", _IDS_ROW | {"hash_ids": [1, -1]}),
    "id beyond 63 bits": _json(1, "$.hash_ids", _IDS_ROW | {"hash_ids": [1, 2**63]}),
    "runs of the wrong length": _json(
        2, "5 block ids do not fit a prompt of 100 tokens at 16", _RUNS_ROW, _RUNS_ROW | {"hash_runs": [[0, 5]]}
    ),
    "no power of two": _json(1, "at any power of two", _RUNS_ROW | {"hash_runs": [[0, 5]]}),
    "more ids than tokens": _json(1, "at any power of two", _RUNS_ROW | {"hash_runs": [[0, 101]]}),
    "earlier row without ids": _json(
        2,
        "0 block ids do not fit a prompt of 16 tokens at 16",
        _RUNS_ROW | {"input_length": 15, "hash_runs": []},
        _RUNS_ROW | {"input_length": 16, "hash_runs": []},
        _RUNS_ROW | {"input_length": 9, "hash_runs": []},
        _RUNS_ROW,
    ),
    "empty run": _json(2, "hash_runs holds [3, 0]", _RUNS_ROW, _RUNS_ROW | {"hash_runs": [[0, 6], [3, 0]]}),
    "negative run": _json(1, "hash_runs holds [-3, 6]", _RUNS_ROW | {"hash_runs": [[-3, 6]]}),
    "absurd run": _json(2, "1000000000000 block ids", _RUNS_ROW, _RUNS_ROW | {"hash_runs": [[0, 10**12]]}),
    "run beyond 63 bits": _json(1, "hash_runs holds", _RUNS_ROW | {"hash_runs": [[2**63 - 5, 6]]}),
    "run of three": _json(1, "$.hash_runs", _RUNS_ROW | {"hash_runs": [[0, 3, 3]]}),
    "session request": _json(2, "request 2: output_length is -9", _session("r"), _session(output_length=-9)),
    "session ids": _json(1, "request 2: 3 block ids do not fit a prompt of 130", _session(hash_runs=[[1, 3]])),
    "session id negative": _json(2, "hash_runs holds [-1, 2]", _session("r"), _session(hash_runs=[[-1, 2]])),
    "session ids beyond 63 bits": _json(2, "hash_runs holds", _session("r"), _session(hash_runs=[[2**63 - 2, 2]])),
    "session time": _json(1, "request 2: the arrival in seconds is -1", _session(t=-1)),
    "session block size": _json(1, "block_size is 0", {"session": "s", "block_size": 0, "requests": []}),
    "session without requests": _json(1, "no request follows", {"session": "s", "block_size": 64, "requests": []}),
    "session twice": _json(2, "session 's' was on line 1 already", _session(), _session()),
    "session name too long": _json(1, "length <= 1000", _session("s" * 1001)),
    "session unsorted": _json(
        1,
        "request 2: arrives at 1.5 s, after the one before at 2.25 s",
        {
            "session": "s",
            "block_size": 64,
            "requests": [_SESSION_REQUEST | {"t": 2.25}, _SESSION_REQUEST | {"t": 1.5}],
        },
    ),
    "unsorted": _json(
        3,
        "arrives at 1.0 s, after line 2 at 2.0 s",
        _IDS_ROW,
        _IDS_ROW | {"timestamp": 2000},
        _IDS_ROW | {"timestamp": 1000},
    ),
    "unsorted runs": _json(
        2, "arrives at 1.0 s, after line 1 at 2.0 s", _RUNS_ROW | {"timestamp": 2000}, _RUNS_ROW | {"timestamp": 1000}
    ),
    "true for a number": _json(2, "Expected `int`, got `bool`", _IDS_ROW, _IDS_ROW | {"output_length": True}),
    "true for a time": _json(2, "Expected `float | str`, got `bool`", _IDS_ROW, _IDS_ROW | {"timestamp": True}),
    "true for an id": _json(2, "Expected `int`, got `bool`", _IDS_ROW, _IDS_ROW | {"hash_ids": [0, True]}),
    "fraction for a length": _json(2, "Expected `int`, got `float`", _IDS_ROW, _IDS_ROW | {"input_length": 600.0}),
    "time not a number": BrokenTrace(
        b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n', 1, "invalid character"
    ),
    "format of others": _json(1, "the format is 'other'", {"format": "other", "version": 1}),
    "format without version": _json(1, "missing required field `version`", {"format": "pagedkv-trace"}),
    "version to come": _json(
        1, "version 2 of pagedkv-trace is not known, only version 1", _HEADER | {"version": 2, "new": 1}, _OWN_ROW
    ),
    "header key": _json(1, "unknown field `blocksize`", {"format": "pagedkv-trace", "version": 1, "blocksize": 4}),
    "header block size": _json(1, "block_size is 0, but must be from 1", _HEADER | {"block_size": 0}, _OWN_ROW),
    "header alone": _json(1, "no request follows", _HEADER),
    "header missing": _json(1, "no known trace format has the keys arrival_s, block_runs", _OWN_ROW),
    "header twice": _json(2, "unknown field `format`", _HEADER, _HEADER, _OWN_ROW),
    "own line cut": BrokenTrace(as_text(_HEADER, _OWN_ROW).encode()[:-20], 2, "not a whole JSON object"),
    "own key": _own("unknown field `num_sample`", num_sample=2),
    "own key beside an extension": _own("unknown field `num_sample`", num_sample=2, x_note=1),
    "own without arrival": _own("missing required field `arrival_s`", arrival_s=None),
    "own without input": _own("has neither input_length nor token_ids", input_length=None),
    "own without output": _own("has neither output_length nor output_token_ids", output_length=None),
    "own input": _own("input_length is 0, but must be from 1", input_length=0),
    "own output": _own("output_length is -1, but must be from 0", output_length=-1),
    "own absurd output": _own("output_length is 100000000000000000000000", output_length=10**23),
    "own time": _own("arrival_s is -0.5", arrival_s=-0.5),
    "own absurd time": _own("arrival_s is 1e+18", arrival_s=1e18),
    "own samples": _own("num_samples is 0, but must be from 1 to 65536", num_samples=0),
    "own samples true": _own("Expected `int`, got `bool`", num_samples=True),
    "own priority": _own("priority is 2147483648", priority=2**31),
    "own session": _own("Expected `str | null`, got `int`", session=7),
    "own prompt twice": _own("has both block_runs and token_ids", token_ids=[1] * 100),
    "own run": _own("block_runs holds [3, 0]", block_runs=[[3, 0]]),
    "own absurd run": _own("1000000000000 block ids do not fit", block_runs=[[0, 10**12]]),
    "own too few ids": _own("5 block ids do not fit a prompt of 100 tokens at 16", block_runs=[[0, 5]]),
    "own too many ids": _own("8 block ids do not fit", block_runs=None, block_ids=[1] * 8),
    "own negative id": _own("$.block_ids", block_runs=None, block_ids=[0, -1]),
    "own tokens": _own("input_length is 100, but token_ids holds 2", block_runs=None, token_ids=[1, 2]),
    "own no tokens": _own("input_length is 0", block_runs=None, input_length=None, token_ids=[]),
    "own token beyond 31 bits": _own("$.token_ids", block_runs=None, token_ids=[2**31]),
    "own negative token": _own("$.output_token_ids", output_token_ids=[1, 2, -1]),
    "own output tokens": _own("output_length is 3, but output_token_ids holds 1", output_token_ids=[1]),
    "own ids without a block size": _json(
        2, "has block ids, but the header on line 1 names no block_size", _HEADER | {"block_size": None}, _OWN_ROW
    ),
    "own unsorted": _json(
        3,
        "arrives at 0.25 s, after line 2 at 0.5 s",
        _HEADER,
        _OWN_ROW | {"arrival_s": 0.5},
        _OWN_ROW | {"arrival_s": 0.25},
    ),
    "nested deeply": BrokenTrace(
        as_text(_IDS_ROW).encode() + b'{"other": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n", 2, "nested too deeply"
    ),
    "own nested deeply": BrokenTrace(
        as_text(_HEADER, _OWN_ROW).encode() + b'{"x_a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n", 3, "nested too deeply"
    ),
    "number of many digits": BrokenTrace(
        as_text(_IDS_ROW, _IDS_ROW).encode().replace(b"600", b"6" * 10**5), 1, "$.input_length"
    ),
    "csv number of many digits": BrokenTrace(LENGTHS.encode() + b"5," + b"1" * 10**5 + b",3\n", 4, "$.input_length"),
    "csv unsorted": BrokenTrace(LENGTHS.encode() + b"4.25,1,3\n", 4, "arrives at 4.25 s, after line 3 at 4.315 s"),
    "csv column twice": BrokenTrace(
        b"arrived_s,input_length,output_length,arrived_s\n1,2,3,4\n", 1, "two columns are named"
    ),
    "csv true": BrokenTrace(LENGTHS.encode() + b"5,true,3\n", 4, "$.input_length"),
    "csv header alone": BrokenTrace(b"arrived_s,input_length,output_length\n", 1, "no request follows"),
    "csv line cut": BrokenTrace(LENGTHS.encode()[:-4], 3, "2 columns, where the header has 3"),
    "csv number cut away": BrokenTrace(LENGTHS.encode()[:-2], 3, "$.output_length"),
    "csv text": BrokenTrace(LENGTHS.encode() + b"5,many,3\n", 4, "$.input_length"),
    "csv underscore": BrokenTrace(LENGTHS.encode() + b"5,1_000,3\n", 4, "$.input_length"),
    "csv fraction": BrokenTrace(LENGTHS.encode() + b"5,1.5,3\n", 4, "$.input_length"),
    "csv negative": BrokenTrace(LENGTHS.encode() + b"5,-1,3\n", 4, "input_length is -1"),
    "csv not a number": BrokenTrace(LENGTHS.encode() + b"nan,1,3\n", 4, "arriv"),
    "csv infinite": BrokenTrace(LENGTHS.encode() + b"inf,1,3\n", 4, "arriv"),
    "csv gzip cut": BrokenTrace(gzip.compress(LENGTHS.encode())[:-6], 4, "cut short"),
}
"""By name; every file but the first few is right up to the line that is blamed."""
