"""Plans of replicas: what is run, what it is compared with, and the same points as tasks of Ray."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

import pagedkv
from pagedkv.cli.plan_axes import PlanAxes
from pagedkv.cli.plan_runs import one_pool
from pagedkv.errors import ConfigurationError
from pagedkv.simulation import ServingConfig, SimulatedTier
from tests.cli.command import run
from tests.report.page_reader import read_page
from tests.traces.trace_files import as_text

pytestmark = pytest.mark.plain_only

NUM_SESSIONS: Final = 5
SETTING: Final = (
    *("--model", "llama-3.1-8b", "--gpu", "h100", "--memory", "0.5", "--block-size", "64", "--eviction", "lru"),
    *("--load", "1", "-j", "1"),
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations whose turns come in turn, so that two replicas in turn miss what another one has."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    rows = [
        {
            "timestamp": 400 * n,
            "input_length": 1200,
            "output_length": 5,
            "hash_ids": [n % NUM_SESSIONS, 10 + n, 1000 + n],
        }
        for n in range(40)
    ]
    path.write_text(as_text(*rows))
    return path


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def planned(trace: Path, results: Path, *more: object) -> dict[str, Any]:
    result = run("plan", trace, *SETTING, "--results", results, *more, "--json", "-")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_each_number_of_replicas_meets_each_way_of_routing(trace: Path, results: Path) -> None:
    plan = planned(trace, results, "--replicas", "2,1", "--routing", "prefix,round-robin,least-loaded")
    choices = [tuple(point["choices"].values()) for point in plan["points"]]
    assert choices[:3] == [("0.5 GiB", "2 replicas", way) for way in ("prefix", "round-robin", "least-loaded")]
    assert choices[3] == ("0.5 GiB", "1 replica", "prefix")
    prefix, in_turn, _, single, *_ = plan["points"]
    assert prefix["kv_gib"] == pytest.approx(1.0, rel=0.02)
    assert single["kv_gib"] == pytest.approx(0.5, rel=0.02)
    assert prefix["figures"]["hit_ratio"] > in_turn["figures"]["hit_ratio"]
    assert in_turn["figures"]["cluster"]["num_by_reason"] == {"it was its turn": 40}
    assert "cluster" not in single["figures"]
    beside = {each["name"]: each for each in plan["settings"][0]["beside"]}
    assert beside["round-robin"]["hit_ratio"] == in_turn["figures"]["hit_ratio"]
    assert beside["round-robin"]["imbalance"] == in_turn["figures"]["cluster"]["imbalance"]
    assert beside["one pool"]["hit_ratio"] >= prefix["figures"]["hit_ratio"]
    assert (beside["one pool"]["imbalance"], beside["one pool"]["ttft_s"]) == (None, None)
    assert plan["settings"][3]["beside"] == []
    assert any("100 ms late" in warning for warning in plan["warnings"])
    assert any("in one pool with the memory of all" in reason for reason in plan["reasons"])
    assert any(
        reason.startswith("2 replicas instead of 1 replica") or "1 replica instead" in reason
        for reason in plan["reasons"]
    )


def test_one_replica_is_one_server(trace: Path, results: Path) -> None:
    (alone,) = planned(trace, results, "--replicas", "1")["points"]
    (same, *_) = planned(trace, results)["points"]
    assert alone["figures"] == same["figures"]


def test_terminal_and_page_show_what_a_cluster_is_compared_with(trace: Path, results: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    command = ("plan", trace, *SETTING, "--results", results, "--replicas", "2", "--price", "h100=2")
    result = run(*command, "--report", page)
    assert result.exit_code == 0, result.stderr
    assert "one pool" in result.stdout
    assert "imbalance" in result.stdout
    text = read_page(page.read_text())
    assert "Replicas" in text.texts("h2")
    assert "one pool" in text.texts("td")


def test_a_router_cannot_go_by_content_that_is_not_known(tmp_path: Path, results: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("arrived_s,input_length,output_length\n" + "".join(f"{n / 5},300,5\n" for n in range(20)))
    plan = planned(trace, results, "--replicas", "2", "--routing", "prefix,least-loaded")
    assert [point["choices"] for point in plan["points"]] == [{"memory": "0.5 GiB", "replicas": "2 replicas"}]
    assert plan["settings"][0]["beside"][1]["hit_ratio"] is None


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that Ray starts import the package that is under test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(pagedkv.__file__).parents[1]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.long  # some twenty seconds, since Ray starts its processes twice
@pytest.mark.usefixtures("importable")
def test_points_are_the_same_as_tasks_of_ray(trace: Path, results: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with_ray = planned(trace, tmp_path, "--replicas", "2", "--ray")
    without = planned(trace, results, "--replicas", "2")
    assert with_ray["points"] == without["points"]
    assert with_ray["settings"] == without["settings"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--routing", "prefix"), "--routing routes requests to replicas: give --replicas as well"),
        (("--replicas", "0"), "--replicas: each must be from 1 to 64, got 0"),
        (("--replicas", "2,2"), "--replicas must be a list of different values"),
        (
            ("--replicas", "2", "--routing", "random"),
            "--routing: each must be one of prefix, least-loaded",
        ),
        (("--replicas", "2", "--closed-loop"), "--closed-loop has one server: leave it out, or --replicas"),
    ],
)
def test_what_makes_no_sense_gets_one_line(options: tuple[str, ...], message: str, trace: Path, results: Path) -> None:
    result = run("plan", trace, *SETTING, "--results", results, *options)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_one_memory_is_not_halved_and_doubled_for_replicas() -> None:
    axes = PlanAxes("llama-3.1-8b", memory="8", replicas="2", loads="1", block_sizes="16", evictions="lru")
    (point,) = axes.points(2000.0, 8000, has_content=True)
    assert dict(point.choices) == {"memory": "8 GiB", "replicas": "2 replicas"}
    with pytest.raises(ConfigurationError, match="--replicas"):
        PlanAxes("llama-3.1-8b", memory="8", replicas="65").points(2000.0, 8000, has_content=True)


def test_one_pool_has_the_memory_of_all() -> None:
    config = ServingConfig(num_blocks=101, max_sequences=8, load=2.0, tiers=(SimulatedTier("host", 2**30, 1e9),))
    pooled = one_pool(config, 4)
    assert (pooled.num_blocks, pooled.max_sequences, pooled.load) == (401, 32, 0.5)
    assert pooled.tiers[0].nbytes == 2**32
