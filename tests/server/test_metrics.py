"""Metrics and the request log: the numbers are those of the outputs, and what is written is what the planner reads."""

import asyncio
import json
import re
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from pagedkv.cli.app import app
from pagedkv.cli.server_building import log_requests
from pagedkv.engine import Breakpoint, Completion, RequestOutput, SamplingParams
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.server import Caller, RequestLog
from pagedkv.server.anthropic.messages import as_usage
from pagedkv.server.cache_hints import CacheHints
from pagedkv.server.engines import EngineFacts
from pagedkv.server.generation import Generation, GenerationRequest, PreparedPrompt, usage_of
from pagedkv.server.metrics import TokenGaps
from pagedkv.server.parsing import PlainParser
from pagedkv.server.service import Served
from pagedkv.tiers import HostTier
from tests.server.conftest import Running
from tests.server.serving import Script, local_engine, make_service, running

PREFIX = "the same beginning of all questions, again and again, so that blocks are hit: " * 3


def numbers(text: str) -> dict[str, float]:
    """Read values by name and the label beside model and engine."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            more = [value for name, value in sample.labels.items() if name not in {"model_name", "engine", "le"}]
            found["/".join([sample.name, *more])] = sample.value
    return found


def ask(url: str, text: str, **more: object) -> httpx.Response:
    """Ask a question."""
    body = {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 5, **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_numbers_are_those_of_usage(tmp_path: Path) -> None:
    script = Script()
    script.write("the same beginning", "abc")
    service = make_service(script)
    path = tmp_path / "served.jsonl"
    with log_requests(service, path, writes_tokens=False), running(service) as url:
        assert numbers(httpx.get(f"{url}/metrics").text)["vllm:num_requests_running"] == 0
        usages = [ask(url, f"{PREFIX}{number}", n=2).json()["usage"] for number in range(4)]
        assert ask(url, "x", temperature=9).status_code == 400
        assert ask(url, PREFIX, deadline_s=1e-6).status_code == 504
        told = numbers(httpx.get(f"{url}/metrics").text)
        opened = httpx.get(f"{url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert told["vllm:prompt_tokens_total"] == told["vllm:prefix_cache_queries_total"] == prompt
    assert told["vllm:prompt_tokens_cached_total"] == told["vllm:prefix_cache_hits_total"] == cached > 0
    assert told["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert told["vllm:request_success_total/stop"] == 8
    assert told["pagedkv:request_errors_total/504"] == 1
    assert told["vllm:time_to_first_token_seconds_count"] == 4
    missed = [value for name, value in told.items() if name.startswith("pagedkv:prefix_cache_missed_tokens_total")]
    assert sum(missed) == prompt - cached
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [row["x_status"] for row in rows] == ["answered"] * 4 + ["error 504"]
    assert [row.get("num_samples") for row in rows[:4]] == [2] * 4
    assert sum(row.get("x_num_cached_tokens", 0) for row in rows) == cached
    assert PREFIX[:20] not in path.read_text()


def test_counters_exist_from_the_start() -> None:
    """A dashboard's rate of a counter that appears with its first value shows nothing of it."""
    with running(make_service(Script())) as url:
        told = numbers(httpx.get(f"{url}/metrics").text)
        assert told["vllm:cache_config_info/16/True/599"] == 1
        for name in (
            "vllm:generation_tokens_total",
            "vllm:num_preemptions_total",
            "vllm:request_success_total/stop",
            "vllm:request_success_total/aborted",
            "vllm:prompt_tokens_by_source_total/external_kv_transfer",
            "vllm:num_requests_waiting_by_reason/capacity",
            "vllm:num_requests_waiting_by_reason/deferred",
            "vllm:request_queue_time_seconds_count",
            "vllm:admission_rejections_total/max_num_queued_reqs",
            "pagedkv:slow_connections_total/write",
        ):
            assert told[name] == 0, name


def test_times_of_a_request_add_up() -> None:
    with running(make_service(Script())) as url:
        for number in range(3):
            ask(url, f"{PREFIX}{number}", ignore_eos=True)
        told = numbers(httpx.get(f"{url}/metrics").text)
    times = {
        name: told[f"vllm:{name}_seconds_sum"]
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "e2e_request_latency",
        )
    }
    assert times["request_prefill_time"] + times["request_decode_time"] == pytest.approx(
        times["request_inference_time"]
    )
    assert times["request_queue_time"] + times["request_inference_time"] == pytest.approx(times["e2e_request_latency"])
    assert told["vllm:iteration_tokens_total_sum"] >= told["vllm:prompt_tokens_by_source_total/local_compute"] > 0
    assert told["vllm:iteration_tokens_total_count"] == told["pagedkv:steps_total"]
    assert told["vllm:prompt_tokens_by_source_total/local_cache_hit"] == told["vllm:prompt_tokens_cached_total"] > 0
    assert told["vllm:request_params_max_tokens_sum"] == 15
    assert told["vllm:request_params_n_count"] == told["vllm:request_max_num_generation_tokens_count"] == 3


def test_the_planner_reads_the_log(tmp_path: Path) -> None:
    script = Script()
    script.write("the same beginning", "abc")
    service = make_service(script)
    path, curve = tmp_path / "served.jsonl", tmp_path / "curve.json"
    with log_requests(service, path, writes_tokens=False), running(service) as url:
        usages = [
            ask(url, f"{number} {PREFIX if number % 2 else PREFIX[::-1]}").json()["usage"] for number in (0, 1) * 3
        ]
    result = CliRunner().invoke(app, ["curve", str(path), "--eviction", "lru", "--json", str(curve)])
    assert result.exit_code == 0, result.output
    document = json.loads(curve.read_text())
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    assert document["ideal_hits"] * document["block_size"] == cached, "of a cache that holds all, as the server's did"


def test_tokens_are_written_only_where_they_were_asked_for(tmp_path: Path) -> None:
    script = Script()
    script.write("the same beginning", "abc")
    service = make_service(script)
    path = tmp_path / "served.jsonl"
    with log_requests(service, path, writes_tokens=True), running(service) as url:
        ask(url, PREFIX)
    row = json.loads(path.read_text().splitlines()[1])
    assert len(row["token_ids"]) == row["input_length"]
    assert len(row["output_token_ids"]) == row["output_length"] == 4


def test_the_dashboard_asks_for_numbers_that_are_there(server: Running) -> None:
    """Of a fresh server as well: a panel without data looks like a fault."""
    offered = {
        sample.name
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        for sample in family.samples
    } | {family.name for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)}
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|pagedkv):\w+", target["expr"])
    }
    assert len(asked) > 15
    missing = {
        name
        for name in asked
        if name not in offered and name.removesuffix("_total").removesuffix("_bucket") not in offered
    }
    assert not missing
    families = {family.name for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)}
    drawn = {name.removesuffix("_total").removesuffix("_bucket") for name in asked}
    assert {name for name in families - drawn if not name.endswith("_created")} == set(), "all are on the dashboard"


def test_a_log_that_is_there_is_not_written_over(tmp_path: Path, server: Running) -> None:
    path = tmp_path / "served.jsonl"
    path.write_text("yesterday's")
    with (
        pytest.raises(ConfigurationError, match="already exists"),
        log_requests(server.service, path, writes_tokens=False),
    ):
        pass
    assert path.read_text() == "yesterday's"


def test_refusals_are_counted_by_reason(server: Running) -> None:
    """With requests that reached no engine: those of the queue are in test_exchange.py."""
    before = numbers(httpx.get(f"{server.url}/metrics").text)
    assert ask(server.url, "x", temperature=9).status_code == 400
    assert ask(server.url, "x" * 9000).status_code == 400
    assert ask(server.url, "x", model="other").status_code == 404
    told = numbers(httpx.get(f"{server.url}/metrics").text)
    reasons = ("invalid", "context_length_exceeded", "model_not_found")
    names = [f"pagedkv:refused_requests_total/{reason}" for reason in reasons]
    assert [told[name] - before.get(name, 0) for name in names] == [1, 1, 1]


def test_tokens_of_a_client_that_left_are_counted_and_logged(tmp_path: Path) -> None:
    service = make_service(Script())
    path = tmp_path / "served.jsonl"
    with log_requests(service, path, writes_tokens=True), running(service) as url:
        wish = {"model": "small", "messages": [{"role": "user", "content": "left"}], "max_tokens": 1500}
        wish |= {"stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=wish, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert [next(lines) for _ in range(5)]
        while service.under_way:
            threading.Event().wait(0.01)
        told = numbers(httpx.get(f"{url}/metrics").text)
    row = json.loads(path.read_text().splitlines()[1])
    assert row["x_status"] == "left"
    assert row["output_length"] == len(row["output_token_ids"]) >= 3
    assert told["pagedkv:left_generation_tokens_total"] == told["vllm:generation_tokens_total"] == row["output_length"]
    assert told["pagedkv:requests_left_total"] == told["vllm:request_success_total/aborted"] == 1


def test_leases_are_counted(server: Running) -> None:
    before = numbers(httpx.get(f"{server.url}/metrics").text)
    marked = [{"type": "text", "text": PREFIX, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    answer = ask(server.url, "", messages=[{"role": "user", "content": marked}]).json()
    told = numbers(httpx.get(f"{server.url}/metrics").text)
    name = "pagedkv:breakpoint_leases_total/taken"
    assert told[name] - before.get(name, 0) == 1
    assert told["pagedkv:leased_blocks"] >= len(PREFIX) // 16
    assert "cache_leases_refused" not in answer


FACTS = EngineFacts(64, 64, 16, 16, frozenset(), True, False, 100, frozenset(), "")  # noqa: FBT003 - of an engine


def test_a_refused_lease_is_told_and_has_no_created_tokens() -> None:
    breakpoints = (Breakpoint(16, 300.0), Breakpoint(32, 3600.0))
    prompts, hints = [PreparedPrompt(range(40))], CacheHints(breakpoints)
    request = GenerationRequest("/", "1", Caller(None), prompts, SamplingParams(), str, PlainParser, hints=hints)
    generation = Generation(request, [])
    completion = Completion(0, (1, 2), "length")
    output = RequestOutput(0, tuple(range(40)), (completion,), 0, 0, 0, 0.1, 0.2, breakpoint_tokens=(16, 0))
    generation.outputs = [output]
    assert generation.leased == breakpoints[:1]
    assert generation.leases_refused == {"cache_leases_refused": 1}
    told = as_usage(usage_of([output], FACTS), generation.leased)
    assert told["cache_creation"] == {"ephemeral_5m_input_tokens": 16, "ephemeral_1h_input_tokens": 0}
    assert told["input_tokens"] == 24


def test_gaps_between_tokens_count_each_sequence() -> None:
    gaps = TokenGaps("gaps", (1.0, 2.0), {"model_name": "small"})
    for now_s, num_decoded in ((0.0, 5), (0.5, 3), (2.5, 2), (9.0, 1), (100.0, 0), (100.5, 4)):
        gaps.note(now_s, num_decoded)
    (family,) = gaps.collect()
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert values["gaps_bucket", "1.0"] == 3 + 4
    assert values["gaps_bucket", "2.0"] == 3 + 4 + 2
    assert values["gaps_bucket", "+Inf"] == values["gaps_count", None] == 3 + 4 + 2 + 1
    assert values["gaps_sum", None] == pytest.approx(3 * 0.5 + 2 * 2.0 + 6.5 + 4 * 0.5)


def test_hits_from_tiers_are_counted_by_medium(tmp_path: Path) -> None:
    script, path = Script(), tmp_path / "served.jsonl"
    service = make_service(script, tiers=(HostTier("16MiB", loads="always"),))
    with log_requests(service, path, writes_tokens=False), running(service) as url:
        details = []
        for _ in range(2):
            answer = ask(url, PREFIX)
            assert answer.status_code == 200
            details.append(answer.json()["usage"]["prompt_tokens_details"])
            assert asyncio.run(local_engine(service).between_steps(lambda llm: llm.flush_tiers(30.0)))
            asyncio.run(local_engine(service).between_steps(lambda llm: llm.core.space.reset_prefix_cache()))
        told = numbers(httpx.get(f"{url}/metrics").text)
    assert told["pagedkv:tier_hits_total/host"] == told["pagedkv:tier_tokens_total/loaded/host"] > 0
    assert told["pagedkv:tier_entries/host"] > 0
    assert told["pagedkv:tier_out_of_service/host"] == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert "x_hits_by_medium" not in rows[0]
    by_medium = rows[1]["x_hits_by_medium"]
    assert by_medium["host"] == told["pagedkv:tier_hits_total/host"]
    assert sum(by_medium.values()) == rows[1]["x_num_cached_tokens"]
    assert "x_cached_tokens_by_medium" not in details[0]
    assert details[1]["x_cached_tokens_by_medium"] == by_medium
    assert sum(by_medium.values()) == details[1]["cached_tokens"]
    with TraceReader(path) as reader:
        assert len(list(reader)) == 2, "the planner reads the log"


def test_a_long_request_holds_few_rows_back(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    times = iter(range(100))
    log = RequestLog(path, 16, num_so_far=lambda _: 7, most_held=3, clock=lambda: float(next(times)))
    asks = [
        GenerationRequest(
            "/", f"{number}", Caller(None), [PreparedPrompt([1, 2, 3])], SamplingParams(), str, PlainParser
        )
        for number in range(6)
    ]
    for each in asks:
        log.arrived(each)
    for each in asks[1:5]:
        log.served(Served(each, 0.0, 1.0, [], None))
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [(row["arrival_s"], row["x_status"]) for row in rows] == [
        (1, "under way"),
        *((number, "answered") for number in (2, 3, 4, 5)),
    ]
    assert rows[0]["output_length"] == 7
    log.served(Served(asks[0], 0.0, 9.0, [], None))
    log.served(Served(asks[5], 0.0, 9.0, [], None))
    log.close()
    assert [json.loads(line)["arrival_s"] for line in path.read_text().splitlines()[1:]] == [1, 2, 3, 4, 5, 6]


def test_what_a_full_disk_did_not_take_is_told_with_the_name_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "served.jsonl"
    service = make_service(Script())
    log = RequestLog(path, 16)
    log._file.close()
    log._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the log closes it
    service.on_arrived.append(log.arrived)
    service.on_served.append(log.served)
    with running(service) as url:
        wish = {"model": "small", "prompt": "first", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=wish, timeout=60).status_code == 200
    assert "No space left on device: '/dev/full'" in caplog.text
    with pytest.raises(OSError, match="/dev/full"):
        log.close()
