"""Without the packages of an extra: what needs none works, what needs them says which to install, in one sentence."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import pagedkv
from pagedkv.cli.app import SUMMARIES
from pagedkv.contract.extras import needing, to_install
from pagedkv.errors import MissingExtraError

pytestmark = pytest.mark.plain_only

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = str(Path(pagedkv.__file__).parents[1])

# Packages that are not there: no finder finds them, as on a machine that never had them.
WITHOUT: Final = """
import sys
missing = {missing!r}.split()
class Finder:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path = [Finder(finder) for finder in sys.meta_path]
"""

COMMAND_LINE: Final = "from pagedkv.cli import main; main()"

# Commands in one process: each imports what the ones before did not.
COMMANDS: Final = """
from typer.testing import CliRunner
from pagedkv.cli.app import app
for typed in sys.argv[1:]:
    ended = CliRunner().invoke(app, typed.split())
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    told = [line for line in ended.stderr.splitlines() if not line.endswith((" ...", " s so far"))]  # a start
    print(ended.exit_code, " ".join(told) or "fine")
"""

IMPORTS: Final = """
import importlib, pkgutil
from pathlib import Path
from pagedkv.errors import MissingExtraError
def names(folder, prefix):
    for module in pkgutil.iter_modules([str(folder)], prefix):
        yield module.name
        if module.ispkg:
            yield from names(folder / module.name.rpartition(".")[2], module.name + ".")
import pagedkv
for name in names(Path(pagedkv.__file__).parent, "pagedkv."):
    if not name.startswith(("pagedkv.cli.", "pagedkv.device.kernels.triton", "pagedkv.plugins.", "pagedkv.__main__")):
        try:
            importlib.import_module(name)
        except MissingExtraError as error:
            print(f"{name}: {error}")
"""


def without(missing: str, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program where packages are missing; names are separated by blanks."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT.format(missing=missing) + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": SOURCES},
    )


TRACE: Final = ROOT / "examples" / "conversations.jsonl.gz"
EXTRAS: Final = ("cli", "hf", "record", "report", "server", "tiers")
CLI, HF, RECORD, REPORT, SERVER, TIERS = (f": {to_install(extra)}" for extra in EXTRAS)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_says_that_it_is_not_installed(missing: str) -> None:
    for typed in ("--help", "demo", "generate"):
        ended = without(missing, COMMAND_LINE, typed)
        told = f"pagedkv: the command line needs {missing}{CLI}\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", told)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (
            "torch",
            {
                "demo": f"pagedkv demo needs torch{HF}",
                "generate --model some/model --prompt x": f"pagedkv.engine needs torch{HF}",
                f"replay {TRACE} --engine": f"pagedkv replay --engine needs torch{HF}",
            },
        ),
        (
            "transformers",
            dict.fromkeys(
                ("demo", "generate --model some/model --prompt x", f"replay {TRACE} --engine"),
                f"pagedkv.engine needs transformers 5.16 or newer{HF}",
            ),
        ),
        (
            "tokenizers",
            {
                "generate --model some/model --prompt x": f"pagedkv.engine needs tokenizers{HF}",
                f"curve {TRACE} --tokenizer tokenizer.json": "--tokenizer needs the package tokenizers"
                f": {to_install('tokenizer')}, or give --chars-per-token instead",
            },
        ),
        *(
            pytest.param(
                missing,
                dict.fromkeys(("serve", f"replay {TRACE} --inspect"), f"pagedkv.server needs {missing}{SERVER}"),
                marks=() if missing == "fastapi" else pytest.mark.long,
            )
            for missing in ("fastapi", "httptools", "uvicorn", "prometheus_client")
        ),
        (
            "xxhash",
            dict.fromkeys(
                ("serve --tier host:1MiB", "generate --model demo --prompt x --tier folder:cache:1MiB"),
                f"--tier needs xxhash{TIERS}",
            ),
        ),
        ("redis", {"serve --tier redis://127.0.0.1:1/0": f"--tier needs redis{TIERS}"}),
        ("obstore", {"serve --tier s3://bucket/path": f"--tier needs obstore{TIERS}"}),
        ("zmq", {"record tcp://127.0.0.1:1": f"a stream of KV events needs zmq{RECORD}"}),
        ("jinja2", {f"report {TRACE} -o report.html": f"a report needs jinja2{REPORT}"}),
        (
            "matplotlib",
            dict.fromkeys(
                (f"report {TRACE} -o report.html", f"plan {TRACE} --report plan.html --model llama-3.1-8b --memory 16"),
                f"a report needs matplotlib{REPORT}",
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_says_what_to_install(
    missing: str, told: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = without(missing, COMMANDS, *told)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [f"2 pagedkv: {sentence}" for sentence in told.values()]
    assert list(tmp_path.iterdir()) == []


def test_every_command_that_reads_a_trace_or_a_log_says_that_msgspec_is_missing() -> None:
    names = ("replay", "curve", "plan", "report", "convert", "record", "calibrate")
    ended = without("msgspec", COMMANDS, *names)
    assert ended.stderr == ""
    told = {f"2 pagedkv: {what} needs msgspec{CLI}" for what in ("reading traces", "the command line")}
    assert len(ended.stdout.splitlines()) == len(names)
    assert set(ended.stdout.splitlines()) <= told


def test_help_does_without_the_extras_that_running_a_command_needs() -> None:
    ended = without(
        "torch transformers tokenizers zmq jinja2 matplotlib", COMMANDS, *(f"{name} --help" for name in SUMMARIES)
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["0 fine"] * len(SUMMARIES)


def test_the_library_needs_no_extra() -> None:
    program = (
        "from pagedkv import *; from pagedkv import models, simulation\nfrom pagedkv.planner import capacity, traces"
    )
    missing = "msgspec rich typer click torch transformers tokenizers safetensors zmq jinja2 markupsafe matplotlib"
    assert without(missing, program).stderr == ""


def test_the_server_needs_no_extra_but_its_own() -> None:
    """What an extra of a format, of a store or of spans needs is imported when one is asked for."""
    missing = "llguidance zmq redis obstore zstandard cryptography peft pyarrow jinja2 markupsafe matplotlib"
    told = without(missing, "from pagedkv.server import *; import pagedkv.server.engine_process").stderr
    assert told == ""
    assert "llguidance" in without("llguidance", "import pagedkv.server.grammars").stderr


@pytest.mark.parametrize(
    ("missing", "packages"),
    [
        pytest.param(
            "msgspec",
            {"pagedkv.planner.traces.reader", "pagedkv.planner.traces.writer", "pagedkv.wire"},
            marks=pytest.mark.long,
        ),
        (
            "torch",
            {
                "pagedkv.device",
                "pagedkv.attention",
                "pagedkv.engine",
                "pagedkv.engine.demo.serving",
            },
        ),
        pytest.param(
            "transformers",
            {"pagedkv.engine", "pagedkv.probe.compat", "pagedkv.engine.sampling"},
            marks=pytest.mark.long,
        ),
        pytest.param("tokenizers", {"pagedkv.engine"}, marks=pytest.mark.long),
        pytest.param("zmq", {"pagedkv.events"}, marks=pytest.mark.long),
        pytest.param("jinja2", {"pagedkv.report.page"}, marks=pytest.mark.long),
        pytest.param("matplotlib", {"pagedkv.report.page", "pagedkv.report.drawing"}, marks=pytest.mark.long),
    ],
)
def test_every_module_imports_or_says_what_to_install(missing: str, packages: set[str]) -> None:
    """Of the library: modules of the command line are behind its door."""
    ended = without(missing, IMPORTS)
    assert ended.stderr == ""
    told = dict(line.split(": ", maxsplit=1) for line in ended.stdout.splitlines())
    assert told.keys() >= packages
    for sentence in told.values():
        assert f" needs {missing}" in sentence
        assert "pip install '.[" in sentence


def test_a_module_of_ours_that_is_missing_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, needing("cli", "this"):
        import pagedkv.gone  # type: ignore[import-not-found] # noqa: F401, PLC0415
    assert not isinstance(caught.value, MissingExtraError)
