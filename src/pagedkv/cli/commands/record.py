"""``pagedkv record``: follows a running engine's KV events, and joins them with its request log into a trace.

Ctrl-C and SIGTERM end a recording like a limit: results so far are printed, and the trace is written whole.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.option_groups import command
from pagedkv.cli.output_files import (
    STANDARD_OUTPUT,
    atomic_file,
    command_line,
    maybe_compressed,
    require_writable,
    write_json,
)
from pagedkv.cli.recording_tables import print_recording, recording_document
from pagedkv.cli.trace_options import SourceOptions
from pagedkv.cli.typed_names import as_typed
from pagedkv.errors import ConfigurationError, OutputError, RecordingError, TraceError
from pagedkv.planner.recording.joining import JoinCounts, LogClock, joined
from pagedkv.planner.recording.metrics import MetricsFollower
from pagedkv.planner.recording.recorder import Bounds, Ending, Recorder
from pagedkv.planner.traces.clocks import rebased
from pagedkv.planner.traces.merging import sorted_by_arrival
from pagedkv.planner.traces.writer import TraceWriter

__all__ = ["Publisher", "record"]

ENGINE: Final = "Engine"
REQUESTS: Final = "Requests"


@dataclass(frozen=True, slots=True)
class Publisher:
    """The publisher to follow, and the limits of the recording, as typed.

    Raises:
        ConfigurationError: a limit or an interval is not positive.
    """

    replay: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="Where the engine sends missed messages again.", rich_help_panel=ENGINE),
    ] = None
    topic: Annotated[
        str, typer.Option(metavar="TEXT", help="Required beginning of topics.", rich_help_panel=ENGINE)
    ] = ""
    bind: Annotated[
        bool,
        typer.Option("--bind", help="The engine connects to us: its endpoint names a machine.", rich_help_panel=ENGINE),
    ] = False
    metrics: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The engine's metrics page: usage, hits.", rich_help_panel=ENGINE),
    ] = None
    metrics_interval: Annotated[
        float, typer.Option(metavar="S", help="Seconds between two readings.", rich_help_panel=ENGINE)
    ] = 15.0
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Stop after S seconds. Default: at Ctrl-C.", rich_help_panel=ENGINE),
    ] = None
    limit: Annotated[int | None, typer.Option(metavar="N", help="Stop after N messages.", rich_help_panel=ENGINE)] = (
        None
    )
    patience: Annotated[
        float, typer.Option(metavar="S", help="Stop after S seconds without a publisher.", rich_help_panel=ENGINE)
    ] = 30.0

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

    log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Request log of the engine, or of the gateway before it.", rich_help_panel=REQUESTS
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="Trace to write; .gz is compressed.", rich_help_panel=REQUESTS
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(metavar="B", help="Tokens a block of the trace. Default: the engine's.", rich_help_panel=REQUESTS),
    ] = None
    keep_tokens: Annotated[
        bool,
        typer.Option(
            "--keep-tokens",
            help="Write tokens instead of block ids, so that prompts hit blocks of answers.",
            rich_help_panel=REQUESTS,
        ),
    ] = False
    utc_offset: Annotated[
        float,
        typer.Option(metavar="H", help="Hours that the log's dates are ahead of UTC.", rich_help_panel=REQUESTS),
    ] = 0.0
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
