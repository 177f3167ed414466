"""Small traces of every format, and every way in which one can be broken, with the line that is to blame."""

import gzip
import json
from dataclasses import dataclass

__all__ = ["BROKEN", "HASH_IDS", "HASH_RUNS", "LENGTHS", "SESSIONS", "BrokenTrace", "as_text"]


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


def _session(**changes: object) -> dict[str, object]:
    return {"session": "s", "block_size": 64, "requests": [_SESSION_REQUEST, _SESSION_REQUEST | changes]}


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
    "unknown header": BrokenTrace(b"time,in,out\n1,2,3\n", 1, "'time,in,out'"),
    "array first": BrokenTrace(b"[]\n", 1, "neither a JSON object nor"),
    "missing key": _json(2, "missing required field `output_length`", _IDS_ROW, {"input_length": 5, "hash_ids": []}),
    "text for a number": _json(2, "$.input_length", _IDS_ROW, _IDS_ROW | {"input_length": "600"}),
    "empty prompt": _json(2, "input_length is 0", _IDS_ROW, _IDS_ROW | {"input_length": 0, "hash_ids": []}),
    "negative length": _json(2, "input_length is -600", _IDS_ROW, _IDS_ROW | {"input_length": -600}),
    "absurd length": _json(2, "input_length is 10000000000000", _IDS_ROW, _IDS_ROW | {"input_length": 10**13}),
    "negative output": _json(3, "output_length is -1", _IDS_ROW, _IDS_ROW, _IDS_ROW | {"output_length": -1}),
    "absurd output": _json(2, "output_length is", _IDS_ROW, _IDS_ROW | {"output_length": 2**24 + 1}),
    "negative time": _json(2, "arrival in seconds is -0.001", _IDS_ROW, _IDS_ROW | {"timestamp": -1}),
    "absurd time": _json(2, "arrival in seconds is", _IDS_ROW, _IDS_ROW | {"timestamp": 1e18}),
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
    "session request": _json(2, "request 2: output_length is -9", _session(), _session(output_length=-9)),
    "session ids": _json(1, "request 2: 3 block ids do not fit a prompt of 130", _session(hash_runs=[[1, 3]])),
    "session id negative": _json(2, "hash_runs holds [-1, 2]", _session(), _session(hash_runs=[[-1, 2]])),
    "session ids beyond 63 bits": _json(2, "hash_runs holds", _session(), _session(hash_runs=[[2**63 - 2, 2]])),
    "session time": _json(1, "request 2: the arrival in seconds is -1", _session(t=-1)),
    "session block size": _json(1, "block_size is 0", {"session": "s", "block_size": 0, "requests": []}),
    "session without requests": _json(1, "no request follows", {"session": "s", "block_size": 64, "requests": []}),
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
