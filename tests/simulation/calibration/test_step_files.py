"""Files of measured steps: what is read, what is left out, and what bad rows get."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pagedkv.errors import TraceError
from pagedkv.simulation.calibration import read_steps

RECORD = {
    "step_id": 1,
    "num_decoded": 3,
    "num_prefilled": 100,
    "num_sampled": 4,
    "num_admitted": 2,
    "num_used_blocks": 10,
    "schedule_seconds": 0.001,
    "forward_seconds": 0.02,
    "sample_seconds": 0.003,
    "finish_seconds": 0.0005,
}
THROUGHPUT = (
    "INFO 11-10 12:00:{second} [loggers.py:127] Engine 000: Avg prompt throughput: {prompt} tokens/s, Avg generation "
    "throughput: {generation} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: {usage}%, Prefix "
    "cache hit rate: 0.0%"
)


def written(folder: Path, text: str) -> str:
    path = folder / "steps"
    path.write_text(text)
    return str(path)


def test_columns_of_csv_come_in_any_order_and_others_are_ignored(tmp_path: Path) -> None:
    steps = read_steps(written(tmp_path, "seconds,engine,num_new_tokens,num_sequences\n0.5,a,3,2\n0.25,b,7,1\n"))
    assert steps.seconds.tolist() == [0.5, 0.25]
    assert steps.num_new_tokens.tolist() == [3, 7]
    assert steps.num_sequences is not None
    assert steps.num_sequences.tolist() == [2, 1]
    assert steps.num_context_tokens is None


def test_records_count_blocks_and_sequences(tmp_path: Path) -> None:
    idle = RECORD | {"num_decoded": 0, "num_prefilled": 0}
    decode = RECORD | {"num_prefilled": 0, "num_admitted": 0}
    steps = read_steps(written(tmp_path, "".join(json.dumps(row) + "\n" for row in (RECORD, idle, decode))), 16)
    assert steps.seconds.tolist() == pytest.approx([0.0245, 0.0245])
    assert steps.num_new_tokens.tolist() == [103, 3]
    assert steps.counts("num_context_tokens").tolist() == [160, 160]
    assert steps.counts("num_sequences").tolist() == [5, 3]


def test_the_engines_own_records_are_read(tmp_path: Path) -> None:
    records = pytest.importorskip("pagedkv.engine.outputs")
    names = records.StepRecord.__dataclass_fields__
    record = records.StepRecord(**{name: 0.5 if name.endswith("_seconds") else 2 for name in names})
    steps = read_steps(written(tmp_path, json.dumps(asdict(record)) + "\n"))
    assert (steps.seconds.tolist(), steps.num_new_tokens.tolist()) == ([2.0], [6])


def test_a_vllm_log_tells_steps_of_intervals_in_which_the_same_sequences_decode(tmp_path: Path) -> None:
    rows = [
        "INFO 11-10 12:00:00 [kv_cache_utils.py:864] GPU KV cache size: 100,000 tokens",
        THROUGHPUT.format(second=10, prompt="900.0", generation="50.0", running=8, usage="10.0"),
        THROUGHPUT.format(second=20, prompt="0.0", generation="400.0", running=8, usage="20.0"),
        "INFO 11-10 12:00:25 something else",
        THROUGHPUT.format(second=30, prompt="0.0", generation="300.0", running=6, usage="15.0"),  # two have ended
        THROUGHPUT.format(second=40, prompt="5.0", generation="300.0", running=6, usage="15.0"),  # a prompt
        THROUGHPUT.format(second=50, prompt="0.0", generation="0.0", running=0, usage="0.0"),
    ]
    steps = read_steps(written(tmp_path, "\n".join(rows) + "\n"))
    assert steps.seconds.tolist() == [8 / 400]
    assert steps.num_new_tokens.tolist() == [8]
    assert steps.counts("num_context_tokens").tolist() == [15_000]
    assert "steps come from 1 of 5 intervals between lines of throughput" in steps.notes[0]


def test_lines_of_throughput_may_say_more_as_those_of_vllm_0_33_do(tmp_path: Path) -> None:
    """In the order of ``vllm/v1/metrics/loggers.py`` there."""
    line = (
        "(APIServer pid=7) INFO 05-01 12:30:{second} [loggers.py:342] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
        "Avg generation throughput: 160.0 tokens/s, Running: 4 reqs, Waiting: 2 reqs, Deferred: 1 reqs, KV fetch: 0 "
        "waiting to start, 1 in progress, 0 completed waiting, Preemptions: 3, GPU KV cache usage: 25.0%, Prefix cache "
        "hit rate: 41.2%, External prefix cache hit rate: 3.0%, MM cache hit rate: 0.0%"
    )
    size = "(EngineCore pid=9) INFO 05-01 12:29:58 [kv_cache_utils.py:864] GPU KV cache size: 80,000 tokens"
    steps = read_steps(written(tmp_path, "\n".join([size, *(line.format(second=at) for at in (10, 20, 30))]) + "\n"))
    assert steps.seconds.tolist() == [4 / 160] * 2
    assert steps.counts("num_context_tokens").tolist() == [20_000] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty. Give a CSV file"),
        ("tokens,seconds\n1,2\n", ":1: a header with no column num_new_tokens: tokens, seconds"),
        ("seconds,seconds,num_new_tokens\n1,2,3\n", ":1: a header with a column twice"),
        ("num_new_tokens,seconds\n", "the file has no steps"),
        ("num_new_tokens,seconds\n1,0.5\n3,-0.25\n", ":3: a step of -0.25 seconds. Give positive seconds"),
        ("num_new_tokens,seconds\n1,0\n", ":2: a step of 0 seconds"),
        ("num_new_tokens,seconds\n1,nan\n", ":2: a step of nan seconds"),
        ("num_new_tokens,seconds\n0,1\n", ":2: num_new_tokens is 0, but must be from 1"),
        ("num_new_tokens,seconds\nmany,1\n", ":2: Expected `int`"),
        ("num_new_tokens,seconds\n1\n", ":2: 1 cells under 2 columns"),
        (json.dumps(RECORD | {"forward_seconds": -1}) + "\n", ":1: a step of -0.9"),
        (json.dumps({"num_decoded": 1}) + "\n", ":1: Object missing required field"),
        (
            "INFO 11-10 12:00:00 nothing of throughput\n",
            "has no steps; steps come from 0 of 0 intervals",
        ),
        ('{"messages": [], "usage": {}}\n', ":1: the row has no field of a step. Give a CSV file with the columns"),
    ],
)
def test_bad_files_are_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as refused:
        read_steps(written(tmp_path, text))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
