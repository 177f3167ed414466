"""What ``pagedkv report`` does with sources and outputs: each told by its content, mistakes found before the work."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pagedkv.cli.commands.report import as_run, write_report
from pagedkv.errors import ConfigurationError, OutputError, TraceError
from pagedkv.report import ReportRun
from tests.cli.command import run
from tests.report.page_reader import Page, read_page
from tests.report.sample_runs import empty_run
from tests.traces.trace_files import HASH_IDS, LENGTHS

pytestmark = pytest.mark.plain_only

TRACES = {
    "pretty first line": b'{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}\n',
    "session": b'{"session": "a", "block_size": 16, "requests": []}',
    "header": b'{"format": "pagedkv-trace", "version": 1}\n{"arrival_s": 0}\n',
    "lengths": b"arrived_s,input_length,output_length\n0,1,1\n",
    "gzip": b"\x1f\x8b\x08\x00not really",
    "empty": b"",
    "blank": b"\n\n",
    "garbage": b"\xff\xfe\x00",
}


def no_trace(path: str) -> ReportRun:
    raise AssertionError(f"{path} was run as a trace")


def report(sources: list[Path | str], output: Path, run_trace: Callable[[str], ReportRun] = no_trace) -> Page:
    """Write a report, and read it."""
    write_report(list(map(str, sources)), output, run_trace, version="1.2.3", command="pagedkv report <&>")
    return read_page(output.read_text(encoding="utf-8"))


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A JSON result as ``pagedkv replay --json`` writes it."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(empty_run("empty").replay, indent=2) + "\n")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def test_a_result_is_shown_under_its_file_name(result: Path, output: Path) -> None:
    page = report([result], output)
    assert page.texts("p")[0].endswith(" of a replay of result.json")
    assert page.texts("pre")[-1] == "pagedkv report <&>"
    assert any("name the trace itself" in text for text in page.texts("p"))
    assert "pagedkv 1.2.3" in page.texts("p")[0]


def test_a_result_in_one_line_is_a_result_too(result: Path, output: Path) -> None:
    result.write_text(json.dumps(json.loads(result.read_text())))
    assert report([result], output).texts("p")[0].endswith(" of a replay of result.json")


def test_fields_that_the_report_does_not_know_do_no_harm(result: Path, output: Path) -> None:
    result.write_text(json.dumps(json.loads(result.read_text()) | {"new": [1]}))
    assert report([result], output).texts("p")[0].endswith(" of a replay of result.json")


@pytest.mark.parametrize("content", TRACES.values(), ids=TRACES)
def test_everything_else_is_left_to_the_reader_of_traces(tmp_path: Path, output: Path, content: bytes) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(content)
    asked: list[str] = []

    def run_trace(path: str) -> ReportRun:
        asked.append(path)
        return empty_run("as the runner named it")

    assert report([trace], output, run_trace).texts("p")[0].endswith(" of as the runner named it")
    assert asked == [str(trace)]


def test_traces_and_results_stand_side_by_side_in_their_order(tmp_path: Path, result: Path, output: Path) -> None:
    page = report([result, tmp_path / "missing", result], output, lambda _: empty_run("a trace"))
    assert page.texts("li")[:3] == ["result.json", "a trace", "result.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"policies": {}, "gaps": {}}, "a JSON document, but no replay's result: it has no pools, timeline"),
        ({"pools": {}, "trace": 1}, "a JSON document, but no replay's result: it has no timeline"),
        (
            {"pools": {}, "timeline": {}},
            r"not a replay's result in whole JSON: .*missing .* at `\$\.timeline`",
        ),
    ],
)
def test_json_of_something_else_is_refused_before_any_trace_runs(
    tmp_path: Path, output: Path, content: dict[str, object], message: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content, indent=2))
    with pytest.raises(TraceError, match=f"other.json: {message}.*pagedkv replay --json"):
        report([tmp_path / "missing", path], output)
    assert not output.exists()


def test_a_result_that_is_cut_off_is_refused(result: Path, output: Path) -> None:
    result.write_text(result.read_text()[:-20])
    with pytest.raises(TraceError, match=r"not a replay's result in whole JSON.*Write it again"):
        report([result], output)


def test_a_wrong_number_is_named_by_its_place(result: Path, output: Path) -> None:
    result.write_text(result.read_text().replace('"num_rejected": 7', '"num_rejected": "7"'))
    with pytest.raises(TraceError, match=r"Expected `int`, got `str` - at `\$\.requests\.num_rejected`"):
        report([result], output)


def test_lists_of_different_lengths_are_refused(result: Path, output: Path) -> None:
    document = json.loads(result.read_text())
    document["timeline"]["num_running"].append(1.0)
    result.write_text(json.dumps(document, indent=2))
    with pytest.raises(TraceError, match=r"lists of the timeline differ in length\. Write it again"):
        report([result], output)


def test_the_command_runs_traces_with_and_without_block_ids(tmp_path: Path, output: Path) -> None:
    (tmp_path / "ids.jsonl").write_text(HASH_IDS)
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    for name, has_curve in (("ids.jsonl", True), ("lengths.csv", False)):
        result = run("report", tmp_path / name, "-o", output, "--num-blocks", 300, "--eviction", "hazard")
        assert (result.exit_code, result.stdout) == (0, "")
        assert " ".join(result.stderr.split()).startswith(f"{output} written; {name} read as ")
        page = read_page(output.read_text(encoding="utf-8"))
        assert page.texts("p")[0].endswith(f" of a replay of {name}")
        assert any("no capacity curve" in text for text in page.texts("p")) != has_curve


@pytest.mark.parametrize("options", [["--eviction", "oldest"], ["--num-blocks", "1"], ["--capacities", "0"]])
def test_a_bad_option_gets_one_line_and_no_page(tmp_path: Path, output: Path, options: list[str]) -> None:
    (tmp_path / "ids.jsonl").write_text(HASH_IDS)
    result = run("report", tmp_path / "ids.jsonl", "-o", output, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert not output.exists()


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path, output: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"is a pipe or a device, .*Save it to a file first"):
        report([tmp_path / "pipe"], output)


def test_an_output_that_is_no_page_is_refused(tmp_path: Path, result: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"name an \.html file, or -, got .*report\.pdf"):
        report([result], tmp_path / "report.pdf")
    with pytest.raises(OutputError, match="there is no folder"):
        report([result], tmp_path / "missing" / "report.html")


def test_a_source_is_never_overwritten(tmp_path: Path, result: Path) -> None:
    source = result.rename(tmp_path / "source.html")
    (tmp_path / "link.html").symlink_to(source)
    before = source.read_bytes()
    for target in ("source.html", "link.html"):
        with pytest.raises(OutputError, match="would overwrite a file"):
            report([source], tmp_path / target)
    assert source.read_bytes() == before


def test_too_many_sources_are_refused_before_any_runs(tmp_path: Path, output: Path) -> None:
    with pytest.raises(ConfigurationError, match="a report shows 1 to 8 runs, got 9"):
        report([tmp_path / "missing"] * 9, output)


def test_a_failed_run_leaves_the_old_page(tmp_path: Path, output: Path) -> None:
    output.write_text("old")
    with pytest.raises(ZeroDivisionError):
        report([tmp_path / "trace"], output, lambda _: empty_run(str(1 // 0)))
    assert output.read_text() == "old"


def test_the_page_goes_to_the_standard_output(result: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_report([str(result)], Path("-"), no_trace, version="1", command="")
    assert read_page(capfdbinary.readouterr().out.decode()).texts("p")[0].endswith(" of a replay of result.json")


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_extra_is_named(result: Path, output: Path, package: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from pathlib import Path\n"
        "from pagedkv.cli.commands.report import write_report\n"
        "from pagedkv.cli.user_errors import reported\n"
        "with reported():\n"
        f"    write_report([{str(result)!r}], Path({str(output)!r}), print, version='', command='')\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install '.[report]'" in finished.stderr
    assert not output.exists()


def test_the_command_line_starts_without_the_extra() -> None:
    program = "import sys; import pagedkv.cli.commands.report; print({'matplotlib', 'jinja2'} & set(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == "set()\n"


def test_documents_are_checked_when_they_become_a_run() -> None:
    run = empty_run("name")
    assert as_run("name", run.replay, without_curve=run.without_curve) == run
    with pytest.raises(msgspec.ValidationError, match="trace"):
        as_run("name", {})


def test_the_curve_of_a_trace_has_the_tiers_of_its_replay(tmp_path: Path, output: Path) -> None:
    trace, behind = tmp_path / "trace.jsonl", tmp_path / "behind.json"
    trace.write_text(HASH_IDS)
    result = run("report", trace, "-o", output, "--num-blocks", "2000", "--host-memory", "64GiB", "--json", behind)
    assert (result.exit_code, "written" in result.stderr) == (0, True)
    (below,) = json.loads(behind.read_text())["runs"][0]["curve"]["tiers"]
    assert below["tiers"] == {"host": {"nbytes": 64 * 2**30, "admission": "always"}}
    assert "lru with host" in output.read_text(encoding="utf-8")
    run("report", trace, "-o", output, "--num-blocks", "2000")
    assert "lru with host" not in output.read_text(encoding="utf-8")
