"""The table of AgentX: figures as AIPerf exports them, and a server that does not tell its hits."""

from pathlib import Path

import pytest

from benchmarks.server.agentx import SCENARIO, asking, figures_of, parser_of, rows_of, servers_of

pytestmark = pytest.mark.plain_only

EXPORTED = {
    "request_count": {"avg": 50.0},
    "benchmark_duration": {"avg": 100.0},
    "total_usage_completion_tokens": {"avg": 1000.0},
    "total_usage_prompt_tokens": {"avg": 200_000.0},
    "total_usage_prompt_cache_read_tokens": {"avg": 150_000.0},
    "time_to_first_token": {"avg": 9.0, "p50": 80.0, "p90": 300.0},
    "inter_token_latency": {"avg": 9.0, "p50": 12.0, "p90": 20.0},
}


def test_rounds_are_summed_and_a_server_may_not_tell_its_hits() -> None:
    silent = {name: value for name, value in EXPORTED.items() if "cache" not in name}
    failing = {**silent, "error_request_count": {"avg": 2.0}}
    rounds = [figures_of("one", EXPORTED, 20.0), figures_of("other", failing, 40.0), figures_of("one", EXPORTED, 30.0)]
    _, one, other = rows_of(rounds)
    assert one == ("one", "100", "0", "10.0", "80", "300", "12.0", "400,000", "75.0 %", "50", "25")
    assert other == ("other", "50", "2", "10.0", "80", "300", "12.0", "200,000", "not told", "40", "40")


def test_the_scenario_is_named_but_for_a_server_that_refuses_its_field(tmp_path: Path) -> None:
    folders = ["--traces", "t", "--aiperf", "a", "--vllm", "v", "--transformers", "h"]
    arguments = parser_of().parse_args(["model", *folders])
    commands = {
        server.name: asking(server, arguments, tmp_path, tmp_path / "results") for server in servers_of(arguments)
    }
    assert list(commands) == ["pagedkv", "vLLM", "transformers serve"]
    assert [SCENARIO in command for command in commands.values()] == [True, True, False]
    assert "ignore_eos" not in (tmp_path / "results.json").read_text()
