"""``pagedkv record``: follows a running engine's KV events, and joins them with its request log into a trace.

Ctrl-C and SIGTERM end a recording like a limit: results so far are printed, and the trace is written whole.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, ClassVar, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.options import command, flag, option
from pagedkv.cli.output_files import (
    STANDARD_OUTPUT,
    atomic_file,
    command_line,
    maybe_compressed,
    require_writable,
    write_json,
)
from pagedkv.cli.tables import print_numbers, print_table, print_warnings
from pagedkv.cli.trace_options import SourceOptions
from pagedkv.cli.user_errors import as_typed
from pagedkv.errors import ConfigurationError, OutputError, RecordingError, TraceError
from pagedkv.planner.recording.joining import JoinCounts, LogClock, joined
from pagedkv.planner.recording.metrics import EngineMetrics, MetricsFollower
from pagedkv.planner.recording.recorder import LIFETIME_EDGES_S, Bounds, Ending, MediumRecord, Recorder
from pagedkv.planner.traces.clocks import rebased
from pagedkv.planner.traces.merging import sorted_by_arrival
from pagedkv.planner.traces.writer import TraceWriter

ENGINE: Final = "Engine"
REQUESTS: Final = "Requests"


@dataclass(frozen=True, slots=True)
class Publisher:
    """The publisher to follow, and the limits of the recording, as typed.

    Raises:
        ConfigurationError: a limit or an interval is not positive.
    """

    PANEL: ClassVar = ENGINE
    replay: Annotated[str | None, option("ENDPOINT", "Where the engine sends missed messages again.")] = None
    topic: Annotated[str, option("TEXT", "Required beginning of topics.")] = ""
    bind: Annotated[bool, flag("The engine connects to us: its endpoint names a machine.")] = False
    metrics: Annotated[str | None, option("URL", "The engine's metrics page: usage, hits.")] = None
    metrics_interval: Annotated[float, option("S", "Seconds between two readings.")] = 15.0
    seconds: Annotated[float | None, option("S", "Stop after S seconds. Default: at Ctrl-C.")] = None
    limit: Annotated[int | None, option("N", "Stop after N messages.")] = None
    patience: Annotated[float, option("S", "Stop after S seconds without a publisher.")] = 30.0

    @property
    def bounds(self) -> Bounds:
        """The limits of the recording. Raises ConfigurationError."""
        return Bounds(self.seconds, self.limit, self.patience)

    def follower(self) -> MetricsFollower | None:
        """Make the reader of the metrics page, if there is one. Raises ConfigurationError."""
        return None if self.metrics is None else MetricsFollower(self.metrics, self.metrics_interval)


GENERATED: Final = (
    "{:,} of {:,} blocks of prompts are of earlier answers, which engines keep: the trace has ids of prompts alone, so "
    "they never hit there the first time; --keep-tokens writes tokens"
)


@dataclass(frozen=True, slots=True)
class RequestLog:
    """The source of requests, and the output, as typed.

    Raises:
        ConfigurationError: a trace is requested without a log, or a number is out of range.
    """

    PANEL: ClassVar = REQUESTS
    log: Annotated[str | None, option("FILE", "Request log of the engine, or of the gateway before it.")] = None
    output: Annotated[Path | None, option("OUT", "Trace to write; .gz is compressed.", "--output", "-o")] = None
    block_size: Annotated[int | None, option("B", "Tokens a block of the trace. Default: the engine's.")] = None
    keep_tokens: Annotated[bool, flag("Write tokens instead of block ids, so that prompts hit blocks of answers.")] = (
        False
    )
    utc_offset: Annotated[float, option("H", "Hours that the log's dates are ahead of UTC.")] = 0.0
    source: SourceOptions = SourceOptions()  # noqa: RUF009 - a value: frozen

    def __post_init__(self) -> None:
        """Refuse invalid options before the recording begins."""
        if self.output is not None and self.log is None:
            raise ConfigurationError(
                "--output is a trace of requests, which events do not show: give the engine's request log, too (--log)"
            )
        if self.log is not None and self.output is None:
            raise ConfigurationError("--log is joined into a trace: name the file to write (--output)")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigurationError(f"--block-size must be at least 1 token, got {self.block_size}")
        LogClock(self.utc_offset, 0.0)

    def require_usable(self) -> None:
        """Refuse a log that cannot be opened, and a target that cannot be written. Raises TraceError, OutputError."""
        if self.log is not None and self.output is not None:
            require_writable(self.output, self.log)
            with self.source.open(self.log, None):
                pass


@command
def record(
    endpoint: Annotated[str, typer.Argument(help="Endpoint of KV events, as in tcp://127.0.0.1:5557.")],
    *,
    requests: RequestLog,
    publisher: Publisher,
    json_file: opt.JsonFile = None,
) -> None:
    """Record a running vLLM or SGLang: its KV events, and with its request log a trace to curve and replay.

    Events show the stored and removed blocks: how full the cache was, and how long blocks stay. Requests, their times,
    lengths and tokens are those of the log. docs/recording.md gives the source of each figure.

    For example:

    pagedkv record tcp://127.0.0.1:5557 --seconds 60

    pagedkv record tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --log server.log -o trace.jsonl.gz

    pagedkv record tcp://127.0.0.1:5557 --metrics http://127.0.0.1:8000/metrics --json recording.json
    """
    from pagedkv.events import Endpoints, Subscription  # noqa: PLC0415 - help works without its extra

    bounds, follower = publisher.bounds, publisher.follower()
    endpoints = Endpoints(endpoint, publisher.replay, publisher.topic, publisher.bind)
    requests.require_usable()
    if json_file == requests.output == STANDARD_OUTPUT:
        raise ConfigurationError("--json and --output cannot both be the standard output: name a file for one of them")
    if json_file is not None:
        require_writable(json_file, *([] if requests.log is None else [requests.log]))
    if follower is not None:
        follower.begin()
    with Subscription(endpoints) as subscription, _signals() as is_over:
        typer.echo(f"recording {endpoint}; Ctrl-C ends it", err=True)
        recorder = Recorder(subscription, time.time)
        failure: Exception | None
        ending, failure = _run(recorder, bounds, is_over, follower)
    if follower is not None:
        follower.read_once_more()
    counts = None
    try:
        counts = _write_trace(requests, recorder)
    except (TraceError, ConfigurationError, OutputError) as error:
        failure = failure or error
    found = (recorder, ending, counts, None if follower is None else follower.metrics)
    if json_file is not None:
        write_json(json_file, {"endpoint": endpoint, "command": command_line(), **recording_document(*found)})
    if STANDARD_OUTPUT not in {json_file, requests.output}:
        print_recording(f"Recording of {endpoint}", *found)
    if failure is not None:
        raise failure


def _run(
    recorder: Recorder, bounds: Bounds, is_over: Callable[[], bool], follower: MetricsFollower | None
) -> tuple[Ending | None, RecordingError | None]:
    """Record; an error after the first results is returned."""
    try:
        each_tick = (lambda _now_s: None) if follower is None else follower.tick
        return recorder.run(bounds, is_over=is_over, each_tick=each_tick), None
    except RecordingError as error:
        if not recorder.num_messages:
            raise
        return None, error


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """End the recording at Ctrl-C and SIGTERM instead of the process, so that results are still written."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write_trace(log: RequestLog, recorder: Recorder) -> JoinCounts | None:
    """Join the log with the recording; the trace is written whole or not at all.

    Raises:
        TraceError: the log cannot be read, or has no request of that time.
        ConfigurationError: the log has blocks of several sizes.
        OutputError: the trace cannot be written.
    """
    if log.log is None or log.output is None:
        return None
    counts = JoinCounts()
    window_s = (recorder.began_s, recorder.ended_s)
    clock = LogClock(log.utc_offset, sum(window_s) / len(window_s))
    size = log.block_size or recorder.contents.block_size
    with log.source.open(log.log, None, any_order=True) as trace:
        requests = rebased(
            joined(
                log.source.in_time(sorted_by_arrival(trace)),
                window_s,
                recorder.contents,
                clock,
                counts,
                block_size=size,
                keeps_tokens=log.keep_tokens,
            )
        )
        first = next(requests, None)
        if first is None:
            raise _none_in_time(log.log, counts, window_s)
        with (
            atomic_file(log.output) as file,
            maybe_compressed(file, log.output) as sink,
            TraceWriter(sink) as writer,
        ):
            writer.write(first)
            for request in requests:
                writer.write(request)
        recognised, notes = as_typed(trace.recognised), [as_typed(note) for note in trace.notes]
    if counts.num_generated and not log.keep_tokens:
        notes = [*notes, GENERATED.format(counts.num_generated, counts.num_blocks)]
    for note in notes:
        typer.echo(f"warning: {note}", err=True)
    typer.echo(f"{counts.num_taken:,} requests written to {log.output}, read as {recognised}", err=True)
    return counts


def _none_in_time(path: str, counts: JoinCounts, window_s: tuple[float, float]) -> TraceError:
    first_s, last_s = counts.first_s or 0.0, counts.last_s or 0.0
    reason = (
        f"none of its {counts.num_read:,} requests arrived during the recording: they arrived from {first_s:.3f} to "
        f"{last_s:.3f} s since 1970, the recording lasted from {window_s[0]:.3f} to {window_s[1]:.3f} s"
    )
    return TraceError(path, None, reason, "Name the log of the same time, or give its time zone: --utc-offset")


EVENTS_ALONE: Final = (
    "events show stored and removed blocks, never requests, hits or arrivals: without a request log (--log) there is "
    "no trace"
)
SHOWN_GAPS: Final = 5
MEDIAN: Final = 0.5
TAIL: Final = 0.9
UNKNOWN: Final = "unknown"


def recording_warnings(
    recorder: Recorder, ending: Ending | None, counts: JoinCounts | None, metrics: EngineMetrics | None
) -> list[str]:
    """List warnings about the figures; ``ending`` is None after a failure."""
    return [*_of_events(recorder, ending), *_of_log(counts), *_of_metrics(metrics)]


def recording_document(
    recorder: Recorder, ending: Ending | None, counts: JoinCounts | None, metrics: EngineMetrics | None
) -> dict[str, object]:
    """Return all figures as a JSON document; unknown ones are null."""
    residency, contents = recorder.residency, recorder.contents
    return {
        "began_s": recorder.began_s,
        "ended_s": recorder.ended_s,
        "rank": recorder.rank,
        "ended_by": "failure" if ending is None else ending.name.lower(),
        "messages": {
            "num_messages": recorder.num_messages,
            "num_asked_again": recorder.num_requested_again,
            "num_restarts": recorder.num_restarts,
            "num_snapshots": recorder.num_snapshots,
            "num_gaps": recorder.num_gaps,
            "gaps": [asdict(gap) for gap in recorder.gaps],
            "unknown_kinds": dict(recorder.unknown_kinds),
        },
        "blocks": {name: _medium_document(medium) for name, medium in sorted(residency.media.items())},
        "num_clears": residency.num_clears,
        "num_censored": residency.num_censored + residency.num_open,
        "content": {
            "num_by_block_size": {str(size): num for size, num in sorted(contents.num_by_block_size.items())},
            "num_unknown": contents.num_unknown,
            "num_with_keys": contents.num_with_keys,
            "num_with_lookahead": contents.num_with_lookahead,
        },
        "metrics": None if metrics is None else {**asdict(metrics), "token_hit_ratio": metrics.hit_ratio},
        "log": None if counts is None else asdict(counts),
        "warnings": recording_warnings(recorder, ending, counts, metrics),
    }


def print_recording(
    title: str, recorder: Recorder, ending: Ending | None, counts: JoinCounts | None, metrics: EngineMetrics | None
) -> None:
    """Print the results of a recording."""
    print_warnings(recording_warnings(recorder, ending, counts, metrics))
    print_table(title, _figures(recorder, counts))
    if recorder.residency.media:
        headings = ("medium", "stored", "removed", "at the end", "mean", "peak", "half removed in", "90% removed in")
        media = sorted(recorder.residency.media.items())
        print_numbers("Blocks", headings, [(name, *_cells(medium)) for name, medium in media])
    if metrics is not None:
        print_table("Metrics of the engine", _metric_rows(metrics))


def _of_events(recorder: Recorder, ending: Ending | None) -> Iterator[str]:
    if ending is Ending.GONE:
        yield f"the publisher disconnected after message {recorder.num_messages:,}; the results end there"
    if recorder.num_messages == 0:
        yield (
            "no message was received, so the cache is unknown: check that the engine serves requests, and that its "
            "topic begins with that of --topic; --replay requests earlier messages"
        )
    for gap in recorder.gaps[:SHOWN_GAPS]:
        which = f"message {gap.first:,} on" if gap.last is None else f"messages {gap.first:,} to {gap.last:,}"
        yield f"{which}: {gap.reason}; the content of the cache from there on is unknown until it is cleared"
    if recorder.num_gaps > SHOWN_GAPS:
        yield f"{recorder.num_gaps - SHOWN_GAPS:,} more gaps"
    if recorder.num_restarts:
        yield f"the engine was started again {recorder.num_restarts:,} times; each time its cache began empty"
    if recorder.unknown_kinds:
        kinds = ", ".join(f"{num:,} {kind[:40]}" for kind, num in sorted(recorder.unknown_kinds.items())[:SHOWN_GAPS])
        yield f"events of unknown kinds were skipped: {kinds}"
    if recorder.num_messages and not recorder.residency.was_exact:
        yield "the recording began in the middle, and the cache was not cleared: its occupancy is unknown"
    if recorder.contents.num_with_keys:
        yield (
            f"{recorder.contents.num_with_keys:,} blocks belong to adapters, salts or images, which a trace does not "
            "distinguish: equal tokens count as equal"
        )
    if recorder.contents.num_with_lookahead:
        yield (
            f"{recorder.contents.num_with_lookahead:,} blocks depend on the tokens after them, too: a prompt "
            "may hit one block less than its tokens suggest"
        )


def _of_log(counts: JoinCounts | None) -> Iterator[str]:
    if counts is None:
        yield EVENTS_ALONE
        return
    if counts.has_own_clock:
        yield "the log's times do not count from 1970: all of its requests are taken, whatever their times"
    if counts.num_outside:
        yield f"{counts.num_outside:,} of {counts.num_read:,} requests of the log arrived before or after the recording"
    if counts.num_without_content:
        yield f"the tokens of {counts.num_without_content:,} of {counts.num_taken:,} requests are unknown"
    if counts.num_blocks and not counts.num_stored:
        yield (
            "no event stored a block of the log's prompts: were they cached before, or are the log's tokens not the "
            "engine's (--tokenizer; marks of chat templates)?"
        )


def _of_metrics(metrics: EngineMetrics | None) -> Iterator[str]:
    if metrics is not None and metrics.num_failures:
        yield f"the metrics page could not be read {metrics.num_failures:,} times, last: {metrics.last_failure}"


def _figures(recorder: Recorder, counts: JoinCounts | None) -> Iterator[tuple[str, str]]:
    yield "began", _date(recorder.began_s)
    yield "ended", _date(recorder.ended_s)
    if recorder.rank is not None:
        yield "data-parallel rank", f"{recorder.rank}"
    again = f", {recorder.num_requested_again:,} of them requested again" if recorder.num_requested_again else ""
    yield "messages", f"{recorder.num_messages:,}{again}"
    yield "gaps", f"{recorder.num_gaps:,}"
    sizes = sorted(recorder.contents.num_by_block_size)
    yield "tokens a block", ", ".join(f"{size:,}" for size in sizes) or UNKNOWN
    yield "stored blocks of unknown content", f"{recorder.contents.num_unknown:,}"
    yield "blocks whose removal was not seen", f"{recorder.residency.num_censored + recorder.residency.num_open:,}"
    if counts is not None:
        yield "requests taken from the log", f"{counts.num_taken:,} of {counts.num_read:,}"
        if counts.num_blocks:
            ratio = counts.num_stored / counts.num_blocks
            yield (
                "blocks of their prompts that events stored",
                f"{ratio:.1%} ({counts.num_stored:,} of {counts.num_blocks:,})",
            )


def _date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _cells(medium: MediumRecord) -> tuple[str, ...]:
    return (
        f"{medium.num_stored:,}",
        f"{medium.num_removed + medium.num_removed_unseen:,}",
        f"{medium.num_blocks:,}",
        UNKNOWN if medium.mean is None else f"{medium.mean:,.1f}",
        UNKNOWN if medium.mean is None else f"{medium.peak:,}",
        _removed_within(medium, MEDIAN),
        _removed_within(medium, TAIL),
    )


def _removed_within(medium: MediumRecord, share: float) -> str:
    """Return the edge within which a share of the removed blocks were removed."""
    if not medium.num_removed:
        return UNKNOWN
    below = 0
    for edge_s, count in zip(LIFETIME_EDGES_S, medium.lifetimes, strict=False):
        below += count
        if below >= share * medium.num_removed:
            return f"<={edge_s:,g}s"
    return f">{LIFETIME_EDGES_S[-1]:,g}s"


def _medium_document(medium: MediumRecord) -> Mapping[str, object]:
    return {
        "num_stored": medium.num_stored,
        "num_copies": medium.num_copies,
        "num_removed": medium.num_removed,
        "num_removed_unseen": medium.num_removed_unseen,
        "num_blocks": medium.num_blocks,
        "mean": medium.mean,
        "peak": None if medium.mean is None else medium.peak,
        "exact_s": medium.seconds,
        "lifetimes": {"upper_edges_s": [*LIFETIME_EDGES_S, None], "num_blocks": medium.lifetimes},
        "timeline": {
            "time_s": [time_s for time_s, _ in medium.timeline],
            "num_blocks": [num_blocks for _, num_blocks in medium.timeline],
        },
    }


def _metric_rows(metrics: EngineMetrics) -> Iterator[tuple[str, str]]:
    yield "pages read", f"{metrics.num_pages:,}"
    ratio = metrics.hit_ratio
    hits, queries = metrics.gained.get("hits", 0.0), metrics.gained.get("queries", 0.0)
    hit_ratio = UNKNOWN if ratio is None else f"{ratio:.2%} ({hits:,.0f} of {queries:,.0f})"
    yield "hit ratio by token, of the engine", hit_ratio
    for name, heading in (("usage", "share of the cache in use"), ("running", "running"), ("waiting", "waiting")):
        if name in metrics.means:
            form = ".1%" if name == "usage" else ",.1f"
            yield f"{heading}, mean", format(metrics.means[name], form)
            yield f"{heading}, peak", format(metrics.peaks[name], form)
    if "preemptions" in metrics.gained:
        yield "preemptions", f"{metrics.gained['preemptions']:,.0f}"
    if metrics.num_blocks is not None:
        yield "blocks of the cache", f"{metrics.num_blocks:,}"
