"""``pagedkv calibrate``: a cost model from steps of a file or of a server, for ``--cost-model``; the speed of a tier.

``pagedkv validate``: compares a cost model with measured steps.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.options import command, option
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.progress import prepare, progress_bars, working
from pagedkv.cli.tables import print_numbers, print_table, print_warnings
from pagedkv.cli.user_errors import as_typed
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.lines import Line
from pagedkv.simulation import compile_loops
from pagedkv.simulation.calibration import (
    BenchLatencies,
    Calibration,
    ComparedLatency,
    ErrorSummary,
    MeasuredSteps,
    Validation,
    bench_result_in,
    calibrate as fitted,
    compare_latencies,
    measure_tier,
    read_steps,
    steps_of_bench,
    validate as validated,
)
from pagedkv.simulation.cost import CALIBRATION_KEY, OF_SUMS, CostModel, read_cost_model
from pagedkv.tiers import parse_tier

GB = 1e9
MEASURED_S: Final = 120.0


@command
def calibrate(  # noqa: PLR0913 - its parameters are the options
    steps: Annotated[
        str | None,
        typer.Argument(help="CSV of steps, a step log, a vLLM log or bench result. Not with --url or --tier."),
    ] = None,
    *,
    url: Annotated[
        str | None,
        option("URL", "Measure this server instead, which serves nothing else meanwhile; pagedkv\\[route]."),
    ] = None,
    seconds: Annotated[float, option("S", "With --url: how long it is measured.")] = MEASURED_S,
    api_key: Annotated[str | None, option("KEY", "With --url: a key of the server.")] = None,
    output: Annotated[
        Path | None, option("FILE", "The cost model, as --cost-model takes it.", "-o", "--output")
    ] = None,
    tier: Annotated[
        str | None,
        option("TIER", "Measure this tier instead: folder:PATH:10GiB, redis://HOST:PORT/DB, s3://BUCKET/PATH."),
    ] = None,
    base: Annotated[
        str | None, option("NAME", "Cost model for parameters that the steps do not determine. Default: they are 0.")
    ] = None,
    block_size: Annotated[int, option("B", "Tokens a block, for StepRecords, which count blocks.")] = 16,
    json_file: opt.JsonFile = None,
) -> None:
    """Fit a cost model to measured steps of an engine, and show its error.

    Steps come from a file, or are measured: --url sends a server random prompts, alone and in batches. A CSV file
    has a header and a step a line: num_new_tokens and seconds, and if you can count them num_attended_pairs,
    num_context_tokens and num_sequences. At least 20 steps, of different sizes. docs/models-and-costs.md explains each.

    For example:

    pagedkv calibrate steps.csv -o cost.json

    pagedkv calibrate vllm.log --base llama-3.1-8b/h100 -o cost.json

    pagedkv calibrate bench.json -o cost.json

    pagedkv calibrate --url http://127.0.0.1:8000 -o cost.json

    pagedkv calibrate --tier folder:/var/cache/pagedkv:10GiB

    pagedkv replay trace.jsonl.gz --model llama-3.1-8b --memory 40 --cost-model cost.json
    """
    if tier is not None:
        if steps is not None or url is not None or output is not None or base is not None:
            raise ConfigurationError("--tier measures a tier, and takes no steps, --url, --output or --base")
        _measure(tier, json_file)
        return
    if output is None:
        raise ConfigurationError("give --output for a cost model, or --tier to measure a tier")
    _require_consistent(steps, url, output, json_file)
    if url is None and (seconds != MEASURED_S or api_key is not None):
        raise ConfigurationError("--seconds and --api-key are for measuring a server: give --url as well")
    if not 1 <= block_size <= 2**20:
        raise ConfigurationError(f"--block-size must be from 1 to {2**20:,} tokens, got {block_size}")
    start = None if base is None else read_cost_model(base)
    measured = read_steps(steps, block_size) if steps is not None else _served_steps(str(url), seconds, api_key)
    calibration = fitted(measured, start)
    calibration = replace(calibration, notes=tuple(map(as_typed, calibration.notes)))
    fit = {"read_as": measured.source, **calibration.overall.as_dict(), OF_SUMS: calibration.of_sums}
    write_json(output, {**calibration.model.as_dict(), CALIBRATION_KEY: fit})
    if json_file is not None:
        head = {"steps": steps or url, "command": command_line(), "read_as": measured.source, "base": base}
        write_json(json_file, {**head, **calibration.as_dict()})
    if STANDARD_OUTPUT not in {output, json_file}:
        _print(measured.source if steps is None else Path(steps).name, measured, calibration, output)


def _require_consistent(steps: str | None, url: str | None, output: Path, json_file: Path | None) -> None:
    """Refuse wrong sources and targets. Raises ConfigurationError, OutputError."""
    if (steps is None) == (url is None):
        raise ConfigurationError("give STEPS, or --url of a server that is to be measured")
    if output == STANDARD_OUTPUT and json_file == STANDARD_OUTPUT:
        raise ConfigurationError("--output and --json cannot both be the standard output: name a file")
    for path in (output, json_file):
        if path is not None:
            require_writable(path, *([] if steps is None else [steps]))


def _served_steps(url: str, seconds: float, api_key: str | None) -> MeasuredSteps:
    from pagedkv.simulation.calibration.running_server import measure_server  # noqa: PLC0415 - an extra of its own

    with progress_bars() as progress:
        task = progress.add_task("measuring", total=seconds, so_far="")
        return measure_server(
            url, seconds, api_key=api_key, show=lambda so_far_s: progress.update(task, completed=so_far_s)
        )


def _measure(tier: str, json_file: Path | None) -> None:
    """Measure a tier, and print what a simulation takes."""
    if json_file is not None:
        require_writable(json_file)
    rate = measure_tier(parse_tier(tier))
    options = f"--disk-bandwidth {rate.read_bandwidth / GB:.3g}GB --disk-latency {rate.latency_s:.2g}"
    if json_file is not None:
        write_json(json_file, {"command": command_line(), **rate.as_dict(), "options": options})
    if json_file != STANDARD_OUTPUT:
        facts = [
            ("read", f"{rate.read_bandwidth / GB:.3g} GB/s"),
            ("written", f"{rate.write_bandwidth / GB:.3g} GB/s"),
            ("one entry of 4 KiB", f"{rate.latency_s * 1e3:.3g} ms"),
            ("measured with", f"{rate.nbytes / 2**20:,.0f} MiB in entries of 4 MiB"),
            ("for replay and plan", options),
        ]
        print_table(f"Tier {rate.name}", facts)


def _print(name: str, steps: MeasuredSteps, calibration: Calibration, output: Path) -> None:
    print_warnings(calibration.notes)
    facts = [
        ("read as", steps.source),
        ("steps", f"{len(steps):,}"),
        ("error of many steps together", f"{calibration.of_sums:.1%}, of a tenth of them in a row"),
        ("written to", f"{output}, for --cost-model"),
    ]
    print_table(f"Cost model fitted to {name}", facts)
    values = calibration.model.as_dict()
    rows = [
        (key, f"{value:.4g}", "fitted" if key in calibration.fitted else "kept")
        for key, value in values.items()
        if value or key in calibration.fitted
    ]
    print_numbers("Parameters, in seconds", ("parameter", "value", "from"), rows)
    title = "Error on steps that were left out of the fit, relative to the measured seconds"
    headings = ("tokens of a step", "steps", "median", "p90", "bias")
    print_numbers(title, headings, error_rows(calibration))


def error_rows(calibration: Calibration | Validation) -> Iterable[tuple[str, ...]]:
    """Return rows of errors by the tokens of a step, and over all steps."""
    for each in calibration.by_tokens:
        sizes = f"{each.least:,}" if each.least == each.most else f"{each.least:,} to {each.most:,}"
        yield _error_row(sizes, each)
    yield _error_row("all", calibration.overall)


def _error_row(label: str, errors: ErrorSummary) -> tuple[str, ...]:
    return label, f"{errors.num_steps:,}", f"{errors.median:.1%}", f"{errors.p90:.1%}", f"{errors.bias:+.1%}"


NO_SHARING: Final = (
    "predicted latencies include no hits, since the result does not show what prompts share, and neither network nor "
    "server, which the stated ones include"
)


@command
def validate(  # noqa: PLR0913 - typer needs a parameter for each option
    steps: Annotated[str, typer.Argument(help="Measured steps: CSV, StepRecords, a vLLM log or bench result.")],
    *,
    cost_model: Annotated[str, option("NAME|FILE", "A preset such as llama-3.1-8b/h100, or a JSON file.")],
    block_size: Annotated[int, option("B", "Tokens a block, for StepRecords, which count blocks.")] = 16,
    max_sequences: opt.MaxSequences = 256,
    max_batched_tokens: opt.MaxBatchedTokens = 8192,
    json_file: opt.JsonFile = None,
) -> None:
    """Show the error of a cost model on measured steps of an engine.

    The requests of a result of vllm bench serve are also served on the virtual clock, and its TTFT, TPOT and ITL are
    shown beside the predicted ones; give the engine's limits of a step (--max-sequences, --max-batched-tokens).

    Calibrate on one measurement and validate on another one: the error of a fit does not hold for other loads.

    For example:

    pagedkv validate bench.json --cost-model llama-3.1-8b/h100

    pagedkv validate vllm.log --cost-model cost.json
    """
    if json_file is not None:
        require_writable(json_file, steps)
    model = read_cost_model(cost_model)
    bench = bench_result_in(steps)
    measured = read_steps(steps, block_size) if bench is None else steps_of_bench(*bench)
    found = validated(measured, model) if len(measured) else None
    latencies = None if bench is None else _latencies(*bench, model, max_sequences, max_batched_tokens)
    notes = [as_typed(note) for note in (*measured.notes, *(() if latencies is None else (NO_SHARING,)))]
    if json_file is not None:
        head = {"steps": steps, "command": command_line(), "read_as": measured.source, "cost_model": cost_model}
        compared = {} if latencies is None else {"latencies": [each.as_dict() for each in latencies.compared]}
        errors = {"errors": None} if found is None else found.as_dict()
        write_json(json_file, {**head, **errors, "notes": list(notes), **compared})
    if json_file == STANDARD_OUTPUT:
        return
    print_warnings(notes)
    facts = [("read as", measured.source), ("steps", f"{len(measured):,}"), ("cost model", cost_model)]
    print_table(f"Steps of {Path(steps).name}", facts)
    if found is not None:
        title = "Error of the cost model, relative to the measured seconds"
        print_numbers(title, ("tokens of a step", "steps", "median", "p90", "bias"), error_rows(found))
    if latencies is not None:
        title = (
            f"Latencies of {latencies.num_requests:,} requests, in seconds: stated, and predicted on the virtual clock"
        )
        print_numbers(title, ("", "stated", "predicted", "error"), map(_row, latencies.compared))


def _latencies(
    line: Line, result: dict[str, Any], model: CostModel, max_sequences: int, max_batched_tokens: int
) -> BenchLatencies:
    with working("Serving the requests of the result"):
        prepare(compile_loops)
        return compare_latencies(line, result, model, max_sequences, max_batched_tokens)


def _row(each: ComparedLatency) -> tuple[str, str, str, str]:
    label = f"{each.metric.upper()} {each.statistic}"
    return label, f"{each.stated_s:.4f}", f"{each.predicted_s:.4f}", f"{each.error:+.1%}"
