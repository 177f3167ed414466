"""``pagedkv plan``: many settings on one trace, and the recommended one."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv import __version__
from pagedkv.cli import options as opt
from pagedkv.cli.commands.report import import_page, require_page_output
from pagedkv.cli.option_groups import command
from pagedkv.cli.output_files import STANDARD_OUTPUT, atomic_file, command_line, require_writable, write_json
from pagedkv.cli.planning.axes import PlanAxes, PlannedPoint
from pagedkv.cli.planning.document import plan_document
from pagedkv.cli.planning.loads import BesideRuns, LoadRuns, PointStore, default_folder, digest_of_files
from pagedkv.cli.planning.runs import PointRunner
from pagedkv.cli.planning.tables import print_plan
from pagedkv.cli.progress import working
from pagedkv.cli.serving import mean_tokens, require_some_served, sample_of
from pagedkv.cli.trace_options import SeveralTimedTracesOptions
from pagedkv.cli.trace_sources import TraceSources, name_of
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.errors import ConfigurationError, NoBlocksError
from pagedkv.planner.capacity.curve import lru_capacity_for
from pagedkv.planner.capacity.memory_need import CacheNeed, cache_need
from pagedkv.planner.capacity.references import ReferenceCollector
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import ContentBlocks

if TYPE_CHECKING:
    from pagedkv.cli.planning.ray_runs import RayRunner

__all__ = ["plan"]


@dataclass(frozen=True, slots=True)
class PlanRuns:
    """How points are run, stored and printed; the options as typed."""

    jobs: opt.Jobs = None
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for figures of points. Default: the user's cache."),
    ] = None
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Run points as Ray tasks, on the cluster that RAY_ADDRESS names if it is set; pagedkv\\[cluster].",
        ),
    ] = False
    fresh: Annotated[bool, typer.Option("--fresh", help="Run finished points again, too.")] = False
    every_load: Annotated[
        bool, typer.Option("--every-load", help="Print a row for each load that was run, not one for each setting.")
    ] = False

    @property
    def num_processes(self) -> int:
        """Points run at once. Raises ConfigurationError."""
        return opt.num_jobs(self.jobs)

    def runner(self, traces: Sequence[str], reading: SeveralTimedTracesOptions) -> "PointRunner | RayRunner":
        """Return the runner of the points. Raises MissingExtraError: Ray is not installed."""
        if not self.ray:
            return PointRunner(traces, reading, self.num_processes)
        from pagedkv.cli.planning.ray_runs import RayRunner  # noqa: PLC0415 - importing Ray takes a second

        return RayRunner(traces, reading, self.num_processes)


@command
def plan(
    traces: Annotated[list[str], typer.Argument(help="Trace file; several are one, a tenant each.")],
    *,
    axes: PlanAxes,
    runs: PlanRuns,
    page: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also write an HTML page; needs pagedkv\\[report].")
    ] = None,
    json_file: opt.JsonFile = None,
) -> None:
    """Find the memory, block size, policy and batch limits for a trace: many settings, served by the simulator.

    Every combination of the lists is served, and choices are compared on the same requests. For each, the highest load
    that holds is searched, or the loads of --load are run. Finished points are stored, so that the same command
    continues after Ctrl-C, and a longer list runs only new points. docs/planning.md explains the figures.

    For example:

    pagedkv plan mooncake_conversation.jsonl.gz --model qwen3-32b --gpu 8xh100 --ttft 5 --tpot 0.1

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100,2xh100 --eviction lru,adaptive,hazard --load 1,2,4

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100 --ttft 1 --tpot 0.05 --price h100=2.5

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100 --host-memory 0,64GiB,256GiB --eviction lru --load 1

    pagedkv plan trace.jsonl.gz --model llama-3.1-8b --gpu h100 --replicas 2,4,8 --routing prefix,least-loaded

    pagedkv plan team-a.jsonl team-b.jsonl --model llama-3.1-8b --gpu h100 --isolate --window 09:00-18:00

    pagedkv plan lengths.csv --model gemma-3-27b --memory 40,80 --cost-model cost.json --split need,0.8 --json -
    """
    if json_file is not None:
        require_writable(json_file, *traces)
    runner = runs.runner(traces, axes.trace)
    if page is not None:
        require_page_output(page, traces)
    if page is not None and page == json_file:
        raise ConfigurationError(f"--report and --json both go to {page}: name two files")
    with working("Reading the trace"):
        digest = digest_of_files(traces)
        facts = _planned(traces, axes)
        renderer = None if page is None else import_page("plan_page")
    store = PointStore(runs.results or default_folder(), digest, repr(asdict(axes.trace)))
    loads = LoadRuns(facts.planned, store, is_searched=axes.is_searched, runs_again=runs.fresh)
    _run(runner, loads)
    found = loads.results()
    beside = BesideRuns(found, store, runs.fresh)
    _run(runner, beside)
    most = max((figures for _, figures in found), key=lambda figures: figures.num_finished)
    num_blocks = max(max(each.point.config.space_config().blocks_by_pool().values()) for each, _ in found)
    require_some_served(most.num_requests, most.num_rejected, num_blocks)
    head = {"trace": name_of(traces) if len(traces) > 1 else traces[0], "command": command_line()}
    document = plan_document({**head, "read_as": facts.read_as}, axes, found, beside, facts.cache)
    document["warnings"][:0] = facts.notes
    if json_file is not None:
        write_json(json_file, document)
    if page is not None and renderer is not None:
        with atomic_file(page) as file:
            file.write(renderer.render_plan(document, version=__version__).encode())
    if STANDARD_OUTPUT not in {json_file, page}:
        print_plan(document, has_every_load=runs.every_load)


@dataclass(frozen=True, slots=True)
class _TraceFacts:
    """The facts of a trace.

    Args:
        read_as: its format.
        notes: warnings about it.
        planned: all points.
        cache: the cache that its hits need; None where that is unknown.
    """

    read_as: str
    notes: list[str]
    planned: list[PlannedPoint]
    cache: CacheNeed | None


def _planned(paths: Sequence[str], axes: PlanAxes) -> _TraceFacts:
    """Read the whole trace once, for its facts; memory is split by its first requests.

    Raises:
        ConfigurationError: a value is out of range, or a setting contradicts itself.
        TraceError: the trace cannot be read.
    """
    with TraceSources(paths, axes.trace, axes.trace.merging) as trace:
        requests = trace.requests()
        sample = sample_of(requests)
        longest = max((each.input_length for each in sample), default=0)
        has_content = any(each.has_content for each in sample)
        points = axes.points(mean_tokens(sample), longest, has_content=has_content)
        cache = _cache_need(trace.name, chain(sample, requests), points[0]) if has_content else None
        for _ in requests:
            pass
        return _TraceFacts(trace.recognised, trace.notes, points, cache)


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
