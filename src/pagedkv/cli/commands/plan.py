"""``pagedkv plan``: many settings on one trace, and the recommended one.

All results are one document, for ``--json`` and for the page; a terminal shows a recommendation on one screen, and the
table of all points.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from pagedkv import __version__
from pagedkv.cli import options as opt
from pagedkv.cli.commands.report import import_page, require_page_output
from pagedkv.cli.options import command, flag, option
from pagedkv.cli.output_files import STANDARD_OUTPUT, atomic_file, command_line, require_writable, write_json
from pagedkv.cli.plan_axes import PlanAxes, PlannedPoint, token_cost
from pagedkv.cli.plan_runs import (
    IN_TURN,
    ONE_POOL,
    BesideRuns,
    LoadRuns,
    PointRunner,
    PointStore,
    again,
    default_folder,
    digest_of_files,
)
from pagedkv.cli.progress import working
from pagedkv.cli.serving import SecondsSource, mean_tokens, parts_as_dict, require_some_served, sample_of, shared_name
from pagedkv.cli.tables import print_first, print_warnings, show, show_parts
from pagedkv.cli.trace_options import SeveralTimedTracesOptions, TraceSources, name_of
from pagedkv.cli.user_errors import as_typed
from pagedkv.contract.space_config import GIB
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.errors import ConfigurationError, NoBlocksError
from pagedkv.planner.capacity.curve import CacheNeed, LiveNeed, MemoryNeed, cache_need, live_need, lru_capacity_for
from pagedkv.planner.capacity.references import ReferenceCollector
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import ContentBlocks
from pagedkv.report.documents import BesideDocument, Plan, PlanPointDocument, PlanSettingDocument
from pagedkv.report.tables import LATENCIES, OUTCOMES, cluster_table, point_table, points_at_best
from pagedkv.simulation.calibration.fitting import MOST_ERROR
from pagedkv.simulation.closed_loop import MOST_HELD_NBYTES, nbytes_of
from pagedkv.simulation.cluster import LATE
from pagedkv.simulation.cost import CostOrigin
from pagedkv.simulation.planning import Decision, LoadInterval, PointFigures, PointResult, decide, interval_of
from pagedkv.simulation.planning.decision import (
    GPU_AXIS,
    change_of,
    limits_of,
    num_gpus,
    num_replicas,
    reason_of,
    settings_of,
)
from pagedkv.simulation.planning.figures import FAILS, TOO_SHORT, busiest_and_quietest
from pagedkv.simulation.planning.searching import LoadSearch, limit_of

if TYPE_CHECKING:
    from pagedkv.cli.plan_ray import RayRunner


MOST_RESAMPLES: Final = 200


@dataclass(frozen=True, slots=True)
class PlanRuns:
    """How points are run, stored and printed; the options as typed."""

    jobs: opt.Jobs = None
    results: Annotated[Path | None, option("FOLDER", "Folder for figures of points. Default: the user's cache.")] = None
    ray: Annotated[
        bool, flag("Run points as Ray tasks, on the cluster that RAY_ADDRESS names if it is set; pagedkv\\[cluster].")
    ] = False
    fresh: Annotated[bool, flag("Run finished points again, too.")] = False
    resamples: Annotated[
        int, option("N", "Resampled arrivals for the headline's interval, some three points each; 0: no interval.")
    ] = 10
    every_load: Annotated[bool, flag("Print a row for each load that was run, not one for each setting.")] = False

    def require_valid(self) -> None:
        """Raises ConfigurationError."""
        if not 0 <= self.resamples <= MOST_RESAMPLES:
            raise ConfigurationError(f"--resamples must be 0 to {MOST_RESAMPLES}, got {self.resamples}")

    @property
    def num_processes(self) -> int:
        """Points run at once. Raises ConfigurationError."""
        return opt.num_jobs(self.jobs)

    def runner(self, traces: Sequence[str], reading: SeveralTimedTracesOptions) -> "PointRunner | RayRunner":
        """Return the runner of the points. Raises MissingExtraError: Ray is not installed."""
        if not self.ray:
            return PointRunner(traces, reading, self.num_processes)
        from pagedkv.cli.plan_ray import RayRunner  # noqa: PLC0415 - importing Ray takes a second

        return RayRunner(traces, reading, self.num_processes)


@command
def plan(
    traces: Annotated[list[str], typer.Argument(help=opt.LOGS)],
    *,
    axes: PlanAxes,
    runs: PlanRuns,
    page: Annotated[
        Path | None, option("FILE", "Also write an HTML page; needs pagedkv\\[report].", "--report")
    ] = None,
    json_file: opt.JsonFile = None,
) -> None:
    """Find the memory, block size, policy and batch limits for a trace: many settings, served by the simulator.

    Every combination of the lists is served, and choices are compared on the same requests. For each, the highest load
    that holds is searched, or the loads of --load are run. Finished points are stored, so that the same command
    continues after Ctrl-C, and a longer list runs only new points. docs/planning.md explains the figures.

    For example:

    pagedkv plan mooncake_conversation.jsonl.gz --model qwen3-32b --gpu 8xh100 --ttft 5 --tpot 0.1

    pagedkv plan ~/.claude/projects/mine --model qwen3-32b --gpu 2xh100

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100,2xh100 --eviction lru,adaptive,hazard --load 1,2,4

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100 --ttft 1 --tpot 0.05 --price h100=2.5

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100 --host-memory 0,64GiB,256GiB --eviction lru --load 1

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100 --replicas 2,4,8 --routing prefix,least-loaded

    pagedkv plan team-a.jsonl team-b.jsonl --model llama-3.1-8b --gpu h100 --isolate --window 09:00-18:00

    pagedkv plan recorded.jsonl --engine http://127.0.0.1:8000 --gpu h100

    pagedkv plan lengths.csv --model gemma-3-27b --memory 40,80 --cost-model cost.json --split need,0.8 --json -
    """
    if json_file is not None:
        require_writable(json_file, *traces)
    runs.require_valid()
    axes = axes.with_engine()
    _require_known_seconds(axes.origin)
    runner = runs.runner(traces, axes.trace)
    if page is not None:
        require_page_output(page, traces)
    if page is not None and page == json_file:
        raise ConfigurationError(f"--report and --json both go to {page}: name two files")
    with working("Reading the trace"):
        digest = digest_of_files(traces)
        axes = axes.with_loop(traces)
        facts = _planned(traces, axes)
        renderer = None if page is None else import_page("plan_page")
    store = PointStore(runs.results or default_folder(), digest, repr(asdict(axes.trace)))
    search = (lambda _: LoadSearch()) if axes.is_searched else None
    loads = LoadRuns(facts.planned, store, search=search, runs_again=runs.fresh)
    _run(runner, loads)
    found = loads.results()
    beside = BesideRuns(found, store, runs.fresh)
    _run(runner, beside)
    interval = _interval(runner, facts, axes, runs, found, store)
    most = max((figures for _, figures in found), key=lambda figures: figures.num_finished)
    num_blocks = max(max(each.point.config.space_config().blocks_by_pool().values()) for each, _ in found)
    require_some_served(most.num_requests, most.num_rejected, num_blocks)
    head = {"trace": name_of(traces) if len(traces) > 1 else traces[0], "command": command_line()}
    document = plan_document({**head, "read_as": facts.read_as}, axes, found, beside, facts.cache, interval)
    document["warnings"][:0] = facts.notes
    if json_file is not None:
        write_json(json_file, document)
    if page is not None and renderer is not None:
        with atomic_file(page) as file:
            file.write(renderer.render_plan(document, version=__version__).encode())
    if STANDARD_OUTPUT not in {json_file, page}:
        print_plan(document, has_every_load=runs.every_load)


def _require_known_seconds(origin: CostOrigin) -> None:
    """Refuse a cost model whose error was measured, and is too large for a plan. Raises ConfigurationError."""
    if origin.median is not None and origin.median > MOST_ERROR:
        raise ConfigurationError(
            f"the cost model is off by {origin.median:.0%} in the median of the steps to which it was fitted, above "
            f"{MOST_ERROR:.0%}: a plan would rest on nothing. Calibrate on other steps, or name a preset (--cost-model)"
        )


@dataclass(frozen=True, slots=True)
class _TraceFacts:
    """The facts of a trace.

    Args:
        read_as: its format.
        notes: warnings about it.
        planned: all points.
        cache: the cache that its hits need; None where that is unknown.
        nbytes: bytes of all requests in memory.
    """

    read_as: str
    notes: list[str]
    planned: list[PlannedPoint]
    cache: CacheNeed | None
    nbytes: int


def _planned(paths: Sequence[str], axes: PlanAxes) -> _TraceFacts:
    """Read the whole trace once, for its facts; memory is split by its first requests.

    Raises:
        ConfigurationError: a value is out of range, or a setting contradicts itself.
        TraceError: the trace cannot be read.
    """
    with TraceSources(paths, axes.trace, axes.trace.merging) as trace:
        nbytes = 0

        def counted() -> Iterator[Request]:
            nonlocal nbytes
            for request in trace.requests():
                nbytes += nbytes_of(request)
                yield request

        requests = counted()
        sample = sample_of(requests)
        longest = max((each.input_length for each in sample), default=0)
        has_content = any(each.has_content for each in sample)
        points = axes.points(mean_tokens(sample), longest, has_content=has_content)
        cache = _cache_need(trace.name, chain(sample, requests), points[0]) if has_content else None
        for _ in requests:
            pass
        return _TraceFacts(trace.recognised, trace.notes, points, cache, nbytes)


def _cache_need(name: str, requests: Iterator[Request], planned: PlannedPoint) -> CacheNeed | None:
    """Compute the cache that the hits of a trace need; None for models with windows or states, or without a block."""
    config = planned.point.config
    if not all(map(keeps_whole_prefix, config.group_specs)):
        return None
    collector = ReferenceCollector(name)
    for request, num_answer_blocks in ContentBlocks(config.block_size).with_answers(requests):
        collector.add(request, num_answer_blocks)
    try:
        references = collector.references()
    except NoBlocksError:
        return None
    nbytes = sum(config.block_nbytes[group.pool] / group.block_size for group in config.group_specs)
    capacity_for = lru_capacity_for(references)
    return cache_need(capacity_for, references.block_size, nbytes) if references.ideal_hits().any() else None


def _run(runner: "PointRunner | RayRunner", loads: LoadRuns | BesideRuns) -> None:
    """Run the points whose figures are unknown, and those of a search."""
    points = loads.first()
    if points:
        runner.run(points, loads.keep, lambda: loads.num_known)


def _interval(  # noqa: PLR0913, PLR0917 - a plan's parts so far
    runner: "PointRunner | RayRunner",
    facts: _TraceFacts,
    axes: PlanAxes,
    runs: PlanRuns,
    found: Sequence[tuple[PlannedPoint, PointFigures]],
    store: PointStore,
) -> LoadInterval | None:
    """Run the setting of the headline again for its interval; None if its limit is not known, or it is not wanted."""
    if not (axes.is_searched and runs.resamples):
        return None
    chosen = decide(_results(found), axes.bounds, is_searched=True).chosen
    own = [(planned, figures) for planned, figures in found if dict(planned.choices) == chosen]
    limit = limit_of((planned.load, figures.steadiness.verdict) for planned, figures in own)
    if limit.held is None or not limit.is_decided:
        return None
    planned = next(planned for planned, _ in own if planned.load == limit.held)
    num_resamples = runs.resamples if facts.nbytes <= MOST_HELD_NBYTES else 0
    searches = again(planned, axes.origin.error, num_resamples, store, runs_again=runs.fresh)
    _run(runner, searches)
    by_name: dict[str, list[tuple[float, PointFigures]]] = {}
    for each, figures in searches.results():
        by_name.setdefault(each.choices["again"], []).append((each.load, figures))
    return interval_of([(each.load, figures) for each, figures in own], by_name, axes.origin.error)


def _results(found: Sequence[tuple[PlannedPoint, PointFigures]]) -> list[PointResult]:
    return [PointResult(planned.choices, planned.load, figures) for planned, figures in found]


LOADS_SEARCHED: Final = "searched"
LOADS_GIVEN: Final = "given"


def plan_document(  # noqa: PLR0913, PLR0917 - all parts of a plan
    head: Mapping[str, str],
    axes: PlanAxes,
    found: Sequence[tuple[PlannedPoint, PointFigures]],
    beside: BesideRuns,
    cache: CacheNeed | None = None,
    interval: LoadInterval | None = None,
) -> Plan:
    """Make the document of a plan.

    Args:
        head: trace, command and read_as.
        axes: the options.
        found: all points with their figures.
        beside: runs for comparison with clusters.
        cache: the cache that the trace's hits need, where it is known.
        interval: the traffic that the headline's setting sustains, with its uncertainty; None: it was not searched.
    """
    results = _results(found)
    decision = decide(results, axes.bounds, is_searched=axes.is_searched, interval=interval)
    settings = _settings(axes, results, found, beside)
    seconds = _seconds(axes, decision, found)
    chosen = _chosen_figures(decision, settings, found)
    return {
        "trace": head["trace"],
        "command": head["command"],
        "read_as": head["read_as"],
        "model": str(found[0][0].point.config.model),
        "arrivals": _arrivals(axes),
        "bounds": axes.bounds.as_dict(),
        "seconds": seconds.as_dict(),
        "loads": LOADS_SEARCHED if axes.is_searched else LOADS_GIVEN,
        "prices": axes.prices,
        "warnings": list(_warnings(axes, found)),
        "need": MemoryNeed(_live(decision, found), cache).as_dict(),
        "headline": f"{decision.headline} (seconds: {seconds.in_short})",
        "reasons": [
            *_stops(decision, found),
            *_windows(chosen),
            *_cluster(chosen, decision, beside),
            *map(as_typed, decision.reasons),
            *_costs(axes, settings),
        ],
        "chosen": dict(decision.chosen),
        "interval": None if interval is None else interval.as_dict(),
        "effects": [effect.as_dict() for effect in decision.effects],
        "settings": settings,
        "points": [_point(each, figures, decision) for each, figures in found],
        "divided": parts_as_dict(chosen.divided),
    }


def _seconds(axes: PlanAxes, decision: Decision, found: Sequence[tuple[PlannedPoint, PointFigures]]) -> SecondsSource:
    """Return the source of the seconds of the headline's setting."""
    chosen = next(planned for planned, _ in found if dict(planned.choices) == decision.chosen)
    name = str(chosen.point.config.cost_model_name)
    return SecondsSource(name, axes.origin, axes.is_cost_model_assumed)


def _settings(
    axes: PlanAxes,
    results: Sequence[PointResult],
    found: Sequence[tuple[PlannedPoint, PointFigures]],
    beside: BesideRuns,
) -> list[PlanSettingDocument]:
    """Return the load limit of each setting, its cost, and the figures for comparison with a cluster."""
    best = settings_of(results)
    documents: list[PlanSettingDocument] = []
    for key, limit in limits_of(results).items():
        steady = best[key].figures.steadiness
        gpus = _all_gpus(best[key].choices, axes)
        cost = None if limit.held is None or gpus is None else token_cost(gpus, axes.prices, steady)
        documents.append(
            {
                "choices": dict(best[key].choices),
                "held": limit.held,
                "ended": limit.ended,
                "is_decided": limit.is_decided,
                "sustained_per_s": None if limit.held is None else steady.good_per_s,
                "cost": None if cost is None else cost.as_dict(),
                "beside": [_beside(name, each) for name, each in beside.of(best[key].choices).items()],
            }
        )
    assert len(documents) <= len(found), "a setting without a run"
    return documents


def _all_gpus(choices: Mapping[str, str], axes: PlanAxes) -> str | None:
    """Return the GPUs of a setting, those of all its replicas."""
    gpus = choices.get(GPU_AXIS, axes.gpus)
    if gpus is None or num_replicas(choices) == 1:
        return gpus
    name = gpus.removeprefix(f"{num_gpus(gpus)}x")
    return f"{num_gpus(gpus) * num_replicas(choices)}x{name}"


def _beside(name: str, figures: PointFigures) -> BesideDocument:
    return {
        "name": name,
        "hit_ratio": figures.hit_ratio,
        "imbalance": None if figures.cluster is None else figures.cluster.imbalance,
        "ttft_s": None if figures.cluster is None else dict(figures.ttft_s),
    }


def _cluster(figures: PointFigures, decision: Decision, beside: BesideRuns) -> Iterator[str]:
    """Describe the hits and the balance of the headline's cluster, compared with one pool and with routing in turn."""
    others = beside.of(decision.chosen)
    if figures.cluster is None or not others:
        return
    if figures.hit_ratio is not None:
        ratios = [
            f"{each.hit_ratio:.1%} {where}"
            for name, where in (
                (IN_TURN, "with requests routed in turn"),
                (ONE_POOL, "in one pool with the memory of all"),
            )
            if (each := others[name]).hit_ratio is not None
        ]
        yield f"{figures.hit_ratio:.1%} of the prompt tokens hit, {' and '.join(ratios)}"
    yield f"the busiest replica computes {figures.cluster.imbalance:.2f} times the mean of all in a minute"


def _chosen_figures(
    decision: Decision,
    settings: Sequence[PlanSettingDocument],
    found: Sequence[tuple[PlannedPoint, PointFigures]],
) -> PointFigures:
    """Return the figures of the headline's setting, at the highest load that holds, else at the lowest."""
    held = next(each["held"] for each in settings if each["choices"] == decision.chosen)
    own = {planned.load: figures for planned, figures in found if dict(planned.choices) == decision.chosen}
    return own[min(own) if held is None else held]


def _live(decision: Decision, found: Sequence[tuple[PlannedPoint, PointFigures]]) -> LiveNeed:
    """Return the blocks of requests in flight: of the headline's setting, nearest to the recorded traffic."""
    own = [each for each in found if dict(each[0].choices) == decision.chosen]
    planned, figures = min(own, key=lambda each: abs(math.log(each[0].load)))
    config = planned.point.config
    number = num_replicas(planned.choices)
    sizes = {
        pool: number * (count - 1) for pool, count in config.space_config(is_watched=False).blocks_by_pool().items()
    }
    traffic = "the recorded traffic" if planned.load == 1 else f"{planned.load:g} times the recorded traffic"
    setting = ", ".join(planned.choices.values())
    return live_need(figures.peak_live, sizes, config.block_nbytes, f"a simulation of {setting} at {traffic}")


def _windows(figures: PointFigures) -> Iterator[str]:
    """Describe the figures of the busiest and the quietest window, if there are several."""
    extremes = busiest_and_quietest(figures.divided)
    if extremes is None:
        return
    texts = []
    for name, part in zip(("busiest", "quietest"), extremes, strict=True):
        seconds = part.ttft_s["p99"]
        began = "nothing is answered" if seconds is None else f"TTFT p99 {seconds:.3g} s"
        good = part.num_good / part.num_requests if part.num_requests else 1.0
        hits = "" if part.hit_ratio is None else f", {part.hit_ratio:.1%} of the prompt tokens hit"
        texts.append(f"{name} window, {part.name}, {good:.1%} of the answers are good, {began}{hits}")
    yield f"in the {texts[0]}; in the {texts[1]}"


def _stops(decision: Decision, found: Sequence[tuple[PlannedPoint, PointFigures]]) -> Iterator[str]:
    """Explain why the headline's setting takes no more load, with a remedy."""
    ended = [
        (planned, figures)
        for planned, figures in found
        if dict(planned.choices) == decision.chosen and figures.steadiness.verdict == FAILS
    ]
    if ended:
        planned, figures = min(ended, key=lambda each: each[0].load)
        bounds = planned.point.bounds
        yield f"at {planned.load:g} times the recorded traffic that setting {as_typed(reason_of(figures, bounds))}"
        yield f"remedy: {as_typed(change_of(figures, planned.point))}"


def _costs(axes: PlanAxes, settings: Sequence[PlanSettingDocument]) -> Iterator[str]:
    """Describe the least cost of a million generated tokens, for each number of GPUs."""
    if not axes.prices:
        return
    by_gpus: dict[str, float] = {}
    for setting in settings:
        gpus, cost = _all_gpus(setting["choices"], axes), setting["cost"]
        if gpus is not None and cost is not None and (each := cost["a_million_output_tokens"]) is not None:
            by_gpus[gpus] = min(by_gpus.get(gpus, each), each)
    typed = ", ".join(f"{name}={price:g}" for name, price in axes.prices.items())
    if not by_gpus:
        yield f"the cost of tokens is unknown (--price {typed}): no load is known to hold on these GPUs"
        return
    costs = ", ".join(f"{each:.3g} on {gpus}" for gpus, each in by_gpus.items())
    cheapest = min(by_gpus, key=lambda gpus: by_gpus[gpus])
    least = f"; {cheapest} costs the least" if len(by_gpus) > 1 else ""
    yield f"a million generated tokens of good answers cost, sustained, by --price {typed} an hour: {costs}{least}"


def _arrivals(axes: PlanAxes) -> str:
    if axes.closed_loop:
        return (
            "closed loop: sessions begin as recorded, each further turn a pause after the answers for which it waits "
            f"(as recorded; else the recorded gap less the answer at {axes.answer_speed:g} tokens a second)"
        )
    return "open loop: requests arrive as recorded, however long the answers before them take"


def _warnings(axes: PlanAxes, found: Sequence[tuple[PlannedPoint, PointFigures]]) -> Iterator[str]:
    names = ", ".join(dict.fromkeys(shared_name(str(planned.point.config.cost_model_name)) for planned, _ in found))
    yield from SecondsSource(names, axes.origin, axes.is_cost_model_assumed).warnings(
        "--gpu or --cost-model", str(found[0][0].point.config.model)
    )
    everything = [figures for _, figures in found]
    if any(planned.point.cluster is not None for planned, _ in found):
        yield (
            f"the router is assumed to receive events {1e3 * LATE.delay_s:g} ms late, and to lose {LATE.loss:.0%} of "
            "them; this is not measured"
        )
    short = [figures for figures in everything if figures.steadiness.verdict == TOO_SHORT]
    if len(short) == len(everything):
        reason = as_typed(reason_of(short[0], axes.bounds))
        yield (
            f"the trace is too short to find the sustained load ({reason}): answers a second are the speed of this "
            "run, not a capacity"
        )
    elif short:
        least = min(planned.load for planned, figures in found if figures.steadiness.verdict == TOO_SHORT)
        yield f"from {least:g} times the recorded traffic on, the trace is too short to decide whether the load holds"
    if not everything[0].has_content:
        yield "the trace has lengths but no content: hits are unknown, and no blocks are shared"
    num_rejected = max(figures.num_rejected for figures in everything)
    if num_rejected:
        yield (
            f"with some settings up to {num_rejected:,} of {everything[0].num_requests:,} requests were rejected, "
            "being too large for the pools"
        )


def _point(planned: PlannedPoint, figures: PointFigures, decision: Decision) -> PlanPointDocument:
    config = planned.point.config
    num_blocks = dict(config.space_config(is_watched=False).blocks_by_pool())
    nbytes = sum(count * config.block_nbytes.get(pool, 0) for pool, count in num_blocks.items())
    nbytes *= num_replicas(planned.choices)
    return {
        "choices": dict(planned.choices),
        "load": planned.load,
        "is_chosen": dict(planned.choices) == decision.chosen,
        "num_blocks": num_blocks,
        "kv_gib": nbytes / GIB,
        "cost_model_name": shared_name(str(config.cost_model_name)),
        "verdict": figures.steadiness.verdict,
        "binds": list(figures.steadiness.binds),
        "reason": as_typed(reason_of(figures, planned.point.bounds)),
        "change": as_typed(change_of(figures, planned.point)),
        "figures": figures.as_dict(),
    }


CLUSTERS: Final = (
    "Clusters, at the highest load that holds, else the lowest that was run, compared with the same requests routed in "
    "turn and with one pool of all their memory; imbalance: tokens computed in a minute, the largest over the mean"
)
INTERVALS: Final = (
    "In brackets: 95 % intervals of paired differences, by eighths of the trace. --json has those of both halves."
)


def print_plan(plan: Plan, *, has_every_load: bool) -> None:
    """Print the results.

    Args:
        plan: the document.
        has_every_load: whether the table has all loads that were run; else each setting has one row.
    """
    print_first(plan["need"]["sentence"])
    print_warnings(plan["warnings"])
    console = Console()
    console.print()
    console.print(f"[bold]{escape(plan['headline'])}.[/bold]", highlight=False)
    console.print()
    for reason in plan["reasons"]:
        console.print(f"- {escape(reason[:1].upper() + reason[1:])}.", highlight=False)
    console.print()
    console.print(f"Arrivals: {escape(plan['arrivals'])}. {INTERVALS}", style="dim", highlight=False)
    console.print()
    console.print(f"The trace was read as {plan['read_as']}.", highlight=False, markup=False)
    console.print()
    points = plan["points"] if has_every_load else points_at_best(plan)
    which = "at each load" if has_every_load else "at the highest load that holds, else the lowest that was run"
    left_out = len(plan["points"]) - len(points)
    more = f" (--every-load has {left_out:,} more)" if left_out else ""
    explained = "holds: yes, or the cause if not; answers/s as in the headline"
    show(point_table(f"Settings for {plan['model']}, {which}{more}; {explained}", OUTCOMES, points))
    show(point_table("Latencies of the same", LATENCIES, points))
    compared = cluster_table(CLUSTERS, plan)
    if compared is not None:
        show(compared)
    show_parts(plan["divided"], has_bounds=any(bound is not None for bound in plan["bounds"].values()))
