"""Steps out of a benchmark's result, of an engine whose steps are known: one prompt at a time, or decoding."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.simulation.calibration import MeasuredSteps, calibrate, read_steps, validate
from pagedkv.simulation.cost import CostModel, read_cost_model
from tests.cli.command import run

KNOWN = CostModel(fixed_s=1e-3, token_compute_s=3e-5, pair_compute_s=2e-9, weights_s=6e-3, context_token_s=5e-8)


@dataclass
class Sent:
    """A request under way: when it was sent, its lengths, and when its tokens came."""

    start_s: float
    num_prompt: int
    num_output: int
    token_s: list[float] = field(default_factory=list)


def served(requests: list[Sent], model: CostModel) -> dict[str, Any]:
    """Serve requests: a prompt alone before anything decodes on. What the benchmark would write of it."""
    now_s, waiting, running = 0.0, sorted(requests, key=lambda one: one.start_s), list[Sent]()
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0].start_s)
        if waiting and waiting[0].start_s <= now_s:
            one = waiting.pop(0)
            num = one.num_prompt
            now_s += model.step_s(num, num * (num + 1) // 2, num, 1)
            one.token_s.append(now_s)
            running.append(one)
        else:
            context = sum(one.num_prompt + len(one.token_s) for one in running)
            now_s += model.step_s(len(running), context, context, len(running))
            for one in running:
                one.token_s.append(now_s)
        running = [one for one in running if len(one.token_s) < one.num_output]
    return {
        "total_input_tokens": sum(one.num_prompt for one in requests),
        "request_throughput": 1.0,
        "start_times": [one.start_s for one in requests],
        "input_lens": [one.num_prompt for one in requests],
        "output_lens": [one.num_output for one in requests],
        "ttfts": [one.token_s[0] - one.start_s for one in requests],
        "itls": [np.diff(one.token_s).tolist() for one in requests],
        "errors": [""] * len(requests),
    }


def drawn(seed: int, per_s: float) -> list[Sent]:
    """Draw requests, the first thirty of which come one by one."""
    random = np.random.default_rng(seed)
    alone = [Sent(10.0 * number, int(random.integers(1, 2000)), 8) for number in range(30)]
    times_s = 400 + np.cumsum(random.exponential(1 / per_s, 60))
    return alone + [Sent(float(at_s), int(random.integers(1, 2000)), int(random.integers(1, 80))) for at_s in times_s]


def written(path: Path, result: dict[str, Any]) -> str:
    path.write_text(json.dumps(result) + "\n")
    return str(path)


def test_the_steps_of_a_known_engine_come_out_and_so_does_its_cost_model(tmp_path: Path) -> None:
    steps = read_steps(written(tmp_path / "bench.json", served(drawn(1, 8.0), KNOWN)))
    assert steps.source == "result of vllm bench serve"
    assert len(steps) > 200
    predicted = [
        KNOWN.step_s(*map(int, step))
        for step in zip(
            steps.num_new_tokens,
            steps.counts("num_attended_pairs"),
            steps.counts("num_context_tokens"),
            steps.counts("num_sequences"),
            strict=True,
        )
    ]
    assert steps.seconds == pytest.approx(predicted, rel=1e-9)
    assert set(steps.counts("num_sequences").tolist()) > {1, 2, 3}
    fitted = calibrate(steps).model
    other = read_steps(written(tmp_path / "other.json", served(drawn(2, 20.0), KNOWN)))
    assert validate(other, fitted).overall.p90 < 0.01
    assert validate(other, KNOWN).overall.p90 < 1e-9
    twice = CostModel(**{**KNOWN.as_dict(), **{name: 2 * getattr(KNOWN, name) for name in ("fixed_s", "weights_s")}})
    assert validate(other, twice).overall.bias > 0.2


def test_a_command_fits_and_another_tells_the_error(tmp_path: Path) -> None:
    bench = written(tmp_path / "bench.json", served(drawn(1, 8.0), KNOWN))
    other = written(tmp_path / "other.json", served(drawn(2, 20.0), KNOWN))
    assert run("calibrate", bench, "-o", tmp_path / "cost.json").exit_code == 0
    assert read_cost_model(str(tmp_path / "cost.json")).token_compute_s == pytest.approx(3e-5, rel=0.02)
    told = json.loads(run("validate", other, "--cost-model", tmp_path / "cost.json", "--json", "-").stdout)
    assert told["read_as"] == "result of vllm bench serve"
    assert told["errors"]["overall"]["p90"] < 0.01
    shown = " ".join(run("validate", other, "--cost-model", tmp_path / "cost.json").stdout.split())
    assert "Error of the cost model, relative to the measured seconds" in shown
    log = tmp_path / "steps.csv"
    log.write_text("num_new_tokens,seconds\n4,0.5\n")
    assert json.loads(run("validate", log, "--cost-model", "instant", "--json", "-").stdout)["errors"]["overall"] == {
        "least": 4,
        "most": 4,
        "num_steps": 1,
        "median": 1.0,
        "p90": 1.0,
        "bias": -1.0,
    }


def travelled_together(result: dict[str, Any], share: float) -> dict[str, Any]:
    """Let a share of the tokens arrive with the one behind it."""
    random = np.random.default_rng(5)
    together = []
    for itl_s in result["itls"]:
        arrived = list(itl_s)
        for place in np.flatnonzero(random.random(len(arrived) // 2) < share).tolist():
            both = arrived[2 * place] + arrived[2 * place + 1]
            arrived[2 * place : 2 * place + 2] = [both - 1e-4, 1e-4]
        together.append(arrived)
    return {**result, "itls": together}


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_tokens_that_travelled_together_are_no_short_steps(tmp_path: Path, share: float) -> None:
    steps = read_steps(written(tmp_path / "bench.json", travelled_together(served(drawn(1, 8.0), KNOWN), share)))
    assert steps.seconds.min() > 5e-3
    fitted = calibrate(steps)
    assert fitted.overall.p90 < 0.01
    other = read_steps(written(tmp_path / "other.json", served(drawn(2, 20.0), KNOWN)))
    assert validate(other, fitted.model).overall.p90 < 0.01


def test_drafts_make_one_step_of_several_tokens(tmp_path: Path) -> None:
    result = served([Sent(0.0, 100, 30)], KNOWN)
    result["itls"] = [[0.02, 0.0, 0.0] * 9 + [0.02, 0.0]]
    steps = read_steps(written(tmp_path / "bench.json", result))
    of_three = steps.num_new_tokens == 3
    assert of_three.sum() >= 8
    assert steps.seconds[of_three] == pytest.approx(0.02)
    assert len(steps) <= 11


def test_outliers_of_either_kind_do_not_move_a_fit() -> None:
    random = np.random.default_rng(3)
    sizes = random.integers(1, 3000, 600)
    seconds = np.asarray(5e-3 + 4e-5 * sizes, np.float64)
    seconds[::50] *= 100
    seconds[25::50] /= 100
    fitted = calibrate(MeasuredSteps(seconds, sizes)).model
    assert fitted.fixed_s + fitted.weights_s == pytest.approx(5e-3, rel=0.02)
    assert fitted.token_compute_s == pytest.approx(4e-5, rel=0.02)


def test_a_fit_that_is_off_by_more_than_a_quarter_is_refused() -> None:
    random = np.random.default_rng(4)
    sizes = random.integers(1, 3000, 400)
    with pytest.raises(ConfigurationError, match=r"off by \d+% in the median of 400 steps, above 25%"):
        calibrate(MeasuredSteps(np.exp(random.normal(-5, 1.5, 400)), sizes))


def test_requests_that_failed_or_came_in_lumps_are_left_out(tmp_path: Path) -> None:
    result = served(drawn(3, 8.0), KNOWN)
    result["itls"][3] = result["itls"][3][::2]
    result["ttfts"][4], result["output_lens"][4] = 0.0, 0
    steps = read_steps(written(tmp_path / "bench.json", result))
    assert steps.notes[-1] == "1 requests were left out, since their tokens did not arrive one by one"


@pytest.mark.parametrize(
    ("change", "reason"),
    [("itls", "the result has no itls. Write it with --save-result"), ("ttfts", "lists of different")],
)
def test_a_result_without_details_is_refused(tmp_path: Path, change: str, reason: str) -> None:
    result = served(drawn(3, 8.0), KNOWN)
    result[change] = None if change == "itls" else result[change][1:]
    with pytest.raises(TraceError, match=reason):
        read_steps(written(tmp_path / "bench.json", result))


def test_latencies_of_a_known_engine_are_predicted_as_it_has_them(tmp_path: Path) -> None:
    """Requests that never meet, so that the order in which an engine takes prompts and tokens does not matter."""
    requests = [Sent(20.0 * number, 64 * (number + 1), 3 + number % 9) for number in range(40)]
    result = served(requests, KNOWN) | {"p90_ttft_ms": 500.0, "median_tpot_ms": "?"}
    path, cost = tmp_path / "bench.json", tmp_path / "cost.json"
    cost.write_text(json.dumps(KNOWN.as_dict()))
    ended = run("validate", written(path, result), "--cost-model", cost, "--json", "-")
    assert ended.exit_code == 0, ended.stderr
    document = json.loads(ended.stdout)
    found = {(each["metric"], each["statistic"]): each for each in document["latencies"]}
    ttft_s = np.array(result["ttfts"])
    tpot_s = np.array([np.mean(each) for each in result["itls"]])
    itl_s = np.concatenate([np.array(each) for each in result["itls"]])
    for metric, times_s, tolerance in (("ttft", ttft_s, 1e-9), ("tpot", tpot_s, 1e-9), ("itl", itl_s, 0.01)):
        for statistic in ("mean", "p50", "p90", "p99"):
            own = times_s.mean() if statistic == "mean" else np.percentile(times_s, int(statistic[1:]))
            each = found[metric, statistic]
            assert each["predicted_s"] == pytest.approx(own, rel=tolerance)
            stated = 0.5 if (metric, statistic) == ("ttft", "p90") else own  # the file's word goes first
            assert each["stated_s"] == pytest.approx(stated)
            assert each["error"] == pytest.approx(each["predicted_s"] / stated - 1)
    assert "include no hits" in document["notes"][-1]
    shown = " ".join(run("validate", path, "--cost-model", cost).stdout.split())
    assert "Latencies of 40 requests, in seconds: stated, and predicted" in shown
    assert f"TTFT p90 0.5000 {found['ttft', 'p90']['predicted_s']:.4f} {found['ttft', 'p90']['error']:+.1%}" in shown


def test_a_slower_model_is_told_by_its_latencies_and_a_tighter_limit_by_the_queue(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({**KNOWN.as_dict(), "weights_s": 2 * KNOWN.weights_s, "fixed_s": 2 * KNOWN.fixed_s}))

    def latencies(requests: list[Sent], *options: object) -> dict[tuple[str, str], dict[str, float]]:
        path = written(tmp_path / "bench.json", served(requests, KNOWN))
        ended = run("validate", path, "--cost-model", cost, *options, "--json", "-")
        return {(each["metric"], each["statistic"]): each for each in json.loads(ended.stdout)["latencies"]}

    apart = latencies([Sent(20.0 * number, 100, 4) for number in range(30)])
    assert apart["tpot", "mean"]["error"] == pytest.approx(1, abs=0.01)  # hardly more than weights and a fixed time
    together = [Sent(0.0, 100, 4) for _ in range(30)]
    alone, beside = latencies(together, "--max-sequences", 1), latencies(together)
    assert alone["ttft", "p99"]["predicted_s"] > 4 * beside["ttft", "p99"]["predicted_s"]


def test_a_result_without_details_is_told_what_is_missing(tmp_path: Path) -> None:
    result = {"total_input_tokens": 5, "request_throughput": 1.0, "mean_ttft_ms": 3.0}
    ended = run("validate", written(tmp_path / "bench.json", result), "--cost-model", "instant")
    assert (ended.exit_code, "--save-detailed" in ended.stderr) == (2, True)
