"""``pagedkv report``: detects the kind of each source, runs the traces, and writes the page.

A source is a trace, or the JSON that ``pagedkv replay --json`` wrote; its content determines which. Mistakes, and a
missing ``report`` extra, are reported before the first trace runs, which takes long. Help works without the extra.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final, cast

import msgspec
import typer

from pagedkv import __version__
from pagedkv.cli import options as opt
from pagedkv.cli.commands.curve import below_of, curve_of_trace, has_content, parse_capacities
from pagedkv.cli.options import command, option
from pagedkv.cli.output_files import STANDARD_OUTPUT, atomic_file, command_line, require_writable, write_json
from pagedkv.cli.progress import working
from pagedkv.cli.serving import ServingOptions, serve_trace
from pagedkv.errors import ConfigurationError, NoBlocksError, TraceError
from pagedkv.report.documents import Curve, Replay, ReportRun
from pagedkv.simulation import ServingResult

HTML_SUFFIX: Final = ".html"
RESULT_KEYS: Final = frozenset({"pools", "timeline"})
"""Keys that only a replay's result has; no line of a trace has them."""
LONGEST_FIRST_LINE: Final = 2**26
"""In bytes. A result in one line has a few hundred thousand, so a longer line belongs to a trace, and is not read
here."""
WRITE_AGAIN: Final = "Write it again with pagedkv replay --json"
AS_RESULT: Final = "Name a trace, or a file that pagedkv replay --json wrote"
FROM_JSON: Final = (
    "This run was read from a JSON result, which holds no capacity curve; name the trace itself to have one."
)
NO_CONTENT: Final = (
    "The trace has lengths and no content, neither block ids nor tokens nor texts, so which blocks requests share is "
    "unknown: it has no capacity curve."
)
"""Reasons for a missing curve."""


@command
def report(
    sources: Annotated[
        list[str], typer.Argument(help="Traces, or results of pagedkv replay --json; several are compared, 8 at most.")
    ],
    *,
    output: Annotated[Path, option("FILE", "The page, *.html, or - for stdout.", "--output", "-o")],
    capacities: Annotated[str | None, option("C,C,...", "Blocks of the cache, as in pagedkv curve.")] = None,
    serving: ServingOptions,
    json_file: opt.JsonFile = None,
) -> None:
    """Write one HTML page about a trace, or one that compares several runs: needs no network, opens from a file.

    A trace is replayed, and its capacity curve measured, with the options given; see pagedkv replay --help.

    For example:

    pagedkv report mooncake_conversation.jsonl.gz -o report.html --model llama-3.1-8b --gpu 8xh100

    pagedkv replay trace.jsonl --num-blocks 1000 --json small.json

    pagedkv replay trace.jsonl --num-blocks 2000 --json large.json

    pagedkv report small.json large.json -o compared.html

    pagedkv report trace.jsonl -o report.html --json behind.json
    """
    recognised: list[str] = []

    def run_trace(path: str) -> ReportRun:
        served = serve_trace(path, serving)
        recognised.append(f"{Path(path).name} read as {served.read_as}")
        replay = {"trace": path, "command": command_line(), **served.as_dict()}
        curve, without = _curve_beside(path, served.result, serving, capacities)
        return as_run(Path(path).name, replay, curve, without)

    if capacities is not None:
        parse_capacities(capacities)
    serving.configuration()
    for source in sources:
        if not Path(source).exists():
            serving.trace.open(source)  # raises before the drawing modules are imported
    if json_file is not None:
        require_writable(json_file, *sources)
        if output == json_file:
            raise ConfigurationError(f"--output and --json both go to {output}: name two files")
    shown = write_report(sources, output, run_trace, version=__version__, command=command_line())
    if json_file is not None:
        runs = [{"name": each.name, "replay": each.replay, "curve": each.curve} for each in shown]
        write_json(json_file, {"command": command_line(), "runs": runs})
    if output != STANDARD_OUTPUT:
        typer.echo("; ".join([f"{output} written", *recognised]), err=True)


def _curve_beside(
    path: str, result: ServingResult, serving: ServingOptions, capacities: str | None
) -> tuple[Mapping[str, object] | None, str]:
    """Measure the curve of a replayed trace, or return the reason why it has none. Raises as curve_of_trace."""
    if not has_content(path, serving.trace):
        return None, NO_CONTENT
    wanted = None if capacities is None else parse_capacities(capacities)
    num_tokens, size = _pool_tokens(result), serving.block_size
    try:
        below = below_of(serving.configuration()[0])
        curve = curve_of_trace(path, wanted, options=serving.trace, num_tokens=num_tokens, block_size=size, below=below)
    except NoBlocksError as error:
        return None, f"There is no capacity curve: {error.reason}."
    return curve.as_dict(), ""


def write_report(
    sources: Sequence[str], output: Path, run_trace: Callable[[str], ReportRun], *, version: str, command: str
) -> list[ReportRun]:
    """Write the report of one source, or of several side by side.

    Args:
        sources: traces and JSON results; all are compared with the first.
        output: an .html file, or - for the standard output.
        run_trace: replays a trace and measures its curve; its errors are passed on.
        version: version of this program.
        command: the command line, as typed.

    Returns:
        The runs that the page shows.

    Raises:
        ConfigurationError: the output is not an .html file; there are too many sources.
        MissingExtraError: the report extra is not installed.
        TraceError: a source cannot be read, or is neither a trace nor a result.
        OutputError: the output cannot be written, or is a source.
    """
    require_page_output(output, sources)
    for source in sources:
        if Path(source).exists() and not Path(source).is_file() and not Path(source).is_dir():
            reason = "is a pipe or a device, but a report reads a trace more than once"
            raise TraceError(source, None, reason, "Save it to a file first")
    results = [_read_result(source) for source in sources]
    page = import_page("page")
    page.require_num_runs(len(sources))
    runs = [
        run_trace(source) if result is None else ReportRun(Path(source).name, result, without_curve=FROM_JSON)
        for source, result in zip(sources, results, strict=True)
    ]
    with working("Drawing"):
        text: str = page.render_report(runs, version=version, command=command)
    with atomic_file(output) as file:
        file.write(text.encode())
    return runs


def as_run(
    name: str,
    replay: Mapping[str, object],
    curve: Mapping[str, object] | None = None,
    without_curve: str = NO_CONTENT,
) -> ReportRun:
    """Make a run from the JSON documents of a replay and a curve.

    Raises:
        msgspec.ValidationError: the documents differ from what the report expects, which is a fault of this library.
    """
    return ReportRun(
        name,
        msgspec.convert(replay, type=Replay),
        None if curve is None else msgspec.convert(curve, type=Curve),
        without_curve,
    )


def require_page_output(output: Path, sources: Sequence[str]) -> None:
    """Refuse an invalid target of a page, before the work. Raises ConfigurationError and OutputError."""
    if output == STANDARD_OUTPUT:
        return
    if output.suffix != HTML_SUFFIX:
        raise ConfigurationError(f"the report is a page: name an {HTML_SUFFIX} file, or -, got {output}")
    require_writable(output, *sources)


def _pool_tokens(result: ServingResult) -> int | None:
    """Return the tokens of a replay's only pool, for the gain of a larger one; None with several pools."""
    if len(result.pools) != 1:
        return None
    (pool,) = result.pools.values()
    return int(pool["num_blocks"]) * int(result.config["block_size"])


def import_page(name: str) -> ModuleType:
    """Import a module of the report that needs the report extra, after sources and targets are checked.

    Raises:
        MissingExtraError: the extra is not installed.
    """
    return import_module(f"pagedkv.report.{name}")


def _read_result(source: str) -> Replay | None:
    """Read a source that is a result; None for all others, which are read as traces.

    Raises:
        TraceError: the source is one JSON document, but not a result.
    """
    path = Path(source)
    if not path.is_file():
        return None  # a pipe can be read only once; the reader of traces reports a missing file
    try:
        with path.open("rb") as file:
            first_line = file.readline(LONGEST_FIRST_LINE)
        if not first_line.lstrip().startswith(b"{"):
            return None
        keys = _keys(first_line)
        if keys is not None and not keys >= RESULT_KEYS:
            return None
        document = path.read_bytes()
    except OSError as error:
        raise TraceError(source, None, f"cannot be read: {error.strerror or error}", AS_RESULT) from error
    return _decode_result(source, document)


def _decode_result(source: str, document: bytes) -> Replay:
    keys = _keys(document)
    if keys is not None and not keys >= RESULT_KEYS:
        missing = ", ".join(sorted(RESULT_KEYS - keys))
        raise TraceError(source, None, f"a JSON document, but no replay's result: it has no {missing}", AS_RESULT)
    try:
        replay = msgspec.json.decode(document, type=Replay)
    except msgspec.DecodeError as error:  # the base class of ValidationError
        reason = f"not a replay's result in whole JSON: {error}"
        raise TraceError(source, None, reason, WRITE_AGAIN) from error
    uneven = list(_uneven_lists(replay))
    if uneven:
        raise TraceError(source, None, f"lists of {uneven[0]} differ in length", WRITE_AGAIN)
    return replay


def _uneven_lists(replay: Replay) -> Iterator[str]:
    """Yield the sections of a result whose lists differ in length."""
    timeline, pools = cast("dict[str, object]", replay["timeline"]), replay["pools"]
    sections: dict[str, Mapping[str, object]] = {"the timeline": timeline}
    for name, pool in replay["timeline"]["pools"].items():
        sections[f"pool {name} in the timeline"] = {**pool, "time_s": timeline["time_s"]}
    for name, one in pools.items():
        sections[f"hits by age of pool {name}"] = one["hits_by_age"]
        sections[f"evictions by age of pool {name}"] = one["evictions_by_age"]
    for name, section in sections.items():
        if len({len(values) for values in section.values() if isinstance(values, list)}) > 1:
            yield name


def _keys(text: bytes) -> frozenset[str] | None:
    """Return the keys of a JSON object; None if the text is not a whole JSON object."""
    try:
        return frozenset(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        return None
