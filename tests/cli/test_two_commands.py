"""From a log of every shape to a report and to a plan, in one command each, and what both say against a count by hand.

Each sample is in the shape that its tool writes (``tests/traces/samples/SOURCES.md``). Beside it stand its requests,
the tokens of prompts and of answers, and the prompt tokens that an endless cache of blocks of 4 has: of a prompt that
goes on from an earlier one, all that was said there but the last token of the answer, which is never computed; in whole
blocks, and never the prompt's own last token.
"""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.choosing import long_but
from tests.cli.command import run
from tests.traces.test_samples import COLUMNS, FIELDS, SAMPLES

pytestmark = pytest.mark.plain_only

BLOCK_SIZE: Final = 4


class Counted(NamedTuple):
    """What a sample holds, counted by hand; no hits where it tells nothing of content."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int | None


COUNTS: Final = {
    "anthropic.jsonl": Counted(2, 12 + 22, 3 + 3, 12),  # of 12 + 3 - 1
    "azure.csv": Counted(2, 374 + 396, 44 + 109, None),
    "bailian.jsonl": Counted(2, 40 + 64, 132 + 3, 32),  # two ids of 16 tokens
    "batch-input.jsonl": Counted(2, 24 + 22, 100 + 100, 12),  # of 14 until "What" and "And"
    "batch-output.jsonl": Counted(2, 24 + 21, 9 + 5, None),
    "bedrock.jsonl": Counted(4, 24 + 40 + 21 + 90_000, 9 + 4 + 6 + 4, 32 + 12),  # of 24 + 9 - 1; of 13 until the text
    "bench.json": Counted(2, 128 + 64, 3 + 2, None),
    "burstgpt.csv": Counted(2, 472 + 1087, 18 + 230, None),
    "claude-code.jsonl": Counted(4, 1000 + 1084 + 1124 + 300, 60 + 12 + 5 + 3, 1000 + 1092),  # of 1084 + 12 - 1
    "codex.jsonl": Counted(3, 200 + 230 + 250, 40 + 9 + 2, 200 + 236),  # thoughts come first; of 230 + 9 - 1
    "columns.csv": Counted(2, 12 + 7, 3, None),
    "fields.jsonl": Counted(2, 1024 + 1041, 9 + 4, 1032),  # of 1024 + 9 - 1
    "helicone.jsonl": Counted(2, 24 + 40, 9 + 4, 0),  # the second one's body is not in the export
    "langfuse.json": Counted(2, 24 + 40, 9 + 4, 32),  # of 24 + 9 - 1
    "langfuse.jsonl": Counted(2, 24 + 40, 9 + 54, 32),
    "langsmith.jsonl": Counted(2, 24 + 40, 9 + 4, 32),
    "litellm.csv": Counted(2, 1024 + 1080, 9 + 4, None),
    "litellm.jsonl": Counted(2, 24 + 40, 9 + 4, 32),
    "mooncake.jsonl": Counted(2, 600 + 512, 52 + 26, 508),  # of 512, all of which another prompt had
    "openai.jsonl": Counted(2, 30 + 48, 10 + 2 * 5, 36),  # of 30 + 10 - 1
    "openinference.jsonl": Counted(2, 24 + 40, 9 + 4, 32),
    "otel.jsonl": Counted(3, 24 + 40 + 11, 9 + 4 + 5, 32),
    "responses.jsonl": Counted(3, 24 + 40 + 30, 9 + 54 + 3, 32),
    "sglang-level2.log": Counted(2, 806 + 5, 4 + 3, 0),
    "sglang.jsonl": Counted(2, 4 + 40, 2 + 2, 0),
    "sglang.log": Counted(2, 4 + 4, 2 + 2, 0),
    "sharegpt.json": Counted(3, 14 + 24 + 8, 2 + 4 + 3, 12),  # of 14 + 2 - 1
    "tracelab.jsonl": Counted(3, 24 + 40 + 50, 9 + 4 + 4, 32 + 20),  # as much as is stated
    "usage.jsonl": Counted(2, 120 + 90, 40, None),
    "vertex-batch.jsonl": Counted(2, 24 + 40, 9 + 4, 32),
    "vertex.jsonl": Counted(2, 24 + 40, 9 + 54, 32),
    "vllm-debug.log": Counted(2, 24 + 44, 12 + 3, 32),  # of 24 + 12 - 1
    "vllm.log": Counted(2, 6 + 7, 3 + 2 * 2, 0),
    "weka.json": Counted(4, 24 + 14 + 19 + 40, 9 + 3 + 2 + 4, 12 + 12 + 24),  # ids of 4 tokens
    "wildchat.jsonl": Counted(4, 12 + 31 + 8 + 19, 9 + 1 + 3 + 4, 20 + 8),  # of 12 + 9 - 1 and of 8 + 3 - 1
}
OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "batch-input.jsonl": ("--arrivals", "poisson:1"),
    "columns.csv": ("--columns", COLUMNS),
    "fields.jsonl": ("--fields", FIELDS),
}
EACH_TIME: Final = frozenset({"batch-input.jsonl", "fields.jsonl", "litellm.jsonl", "usage.jsonl", "vllm-debug.log"})
"""The others are reported and planned among the long tests: plots, and processes of a plan, take some seconds each."""
CHOSEN: Final = pytest.mark.parametrize("name", long_but(EACH_TIME, COUNTS))
SETTING: Final = ("--model", "llama-3.1-8b", "--gpu", "h100")


def reported(sample: Path, folder: Path, *options: object) -> dict[str, Any]:
    """Run a report; give what is behind the page, and the page's text."""
    page, behind = folder / "page.html", folder / "behind.json"
    result = run("report", sample, "-o", page, "--json", behind, "--block-size", BLOCK_SIZE, *SETTING, *options)
    assert result.exit_code == 0, result.stderr
    (shown,) = json.loads(behind.read_text())["runs"]
    return {**shown, "page": page.read_text()}


def planned(sample: Path, folder: Path, *options: object) -> dict[str, Any]:
    """Run a plan of one load."""
    given = ("--block-size", BLOCK_SIZE, "--eviction", "lru", "--load", 1, "-j", 1, "--results", folder / "kept")
    result = run("plan", sample, *SETTING, *given, *options, "--json", "-")
    assert result.exit_code == 0, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


def test_every_sample_is_counted() -> None:
    assert set(COUNTS) == {path.name for path in SAMPLES.iterdir()} - {"SOURCES.md"}


def found_in(replay: dict[str, Any]) -> Counted:
    """What a replay counted."""
    requests, hits = replay["requests"], replay["hits"]
    known = hits["token_hit_ratio"] is not None
    if known:
        assert hits["token_hit_ratio"] == pytest.approx(hits["num_hit_tokens"] / requests["num_prompt_tokens"])
    return Counted(
        requests["num_requests"],
        requests["num_prompt_tokens"],
        requests["num_output_tokens"],
        hits["num_hit_tokens"] if known else None,
    )


@pytest.mark.parametrize("name", COUNTS)
def test_a_log_is_replayed_with_the_figures_counted_by_hand(name: str) -> None:
    given = ("--block-size", BLOCK_SIZE, *SETTING, *OPTIONS.get(name, ()), "--json", "-")
    result = run("replay", SAMPLES / name, *given)
    assert result.exit_code == 0, result.stderr
    replay = json.loads(result.stdout)
    assert found_in(replay) == COUNTS[name]
    assert replay["read_as"]


@CHOSEN
def test_a_log_becomes_a_report_whose_figures_are_those_counted_by_hand(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    shown = reported(SAMPLES / name, tmp_path, *OPTIONS.get(name, ()))
    expected = COUNTS[name]
    assert found_in(shown["replay"]) == expected
    assert shown["replay"]["read_as"]
    assert (expected.num_hit_tokens is None) == ("The hit ratio is unknown" in shown["page"])
    if expected.num_hit_tokens is None:
        return
    if shown["curve"] is not None:
        # Nothing is evicted in either; but a whole prompt may hit in the curve, which the last token never does here.
        assert shown["curve"]["ideal_hits"] * shown["curve"]["block_size"] >= expected.num_hit_tokens


@CHOSEN
def test_a_log_becomes_a_plan_whose_figures_are_those_counted_by_hand(tmp_path: Path, name: str) -> None:
    plan = planned(SAMPLES / name, tmp_path, *OPTIONS.get(name, ()))
    expected = COUNTS[name]
    for point in plan["points"]:
        figures = point["figures"]
        assert figures["num_requests"] == expected.num_requests
        if expected.num_hit_tokens is None:
            assert figures["hit_ratio"] is None
        else:
            assert figures["hit_ratio"] == pytest.approx(expected.num_hit_tokens / expected.num_prompt_tokens)
    assert plan["read_as"]
    assert "too short to determine" in plan["headline"], "a few requests are no capacity"
    assert any("computed from the GPU's data sheet and not measured" in warning for warning in plan["warnings"])
