"""What compiled loops keep on disk, seen from processes of their own.

Each runs a small package: the modules that compile loops, and two loops in two files, of which one calls the other.
"""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from numba.extending import is_jitted

from pagedkv.compilation import compiled as compiling
from pagedkv.compilation.compiled import compiled, unsigned
from pagedkv.compilation.loop_cache import PACKAGE_FOLDER, SHIPPED, sources_of
from pagedkv.compilation.targets import EXACTLY, TARGETS, own_processor

COMPILED = "from pagedkv.compilation.compiled import compiled"
PLAIN_NUMBA = "import numba\ncompiled = numba.njit(cache=True)"

CALLEE = """
{decorator}
@compiled
def step(x: int) -> int:
    return x + {constant}
"""
CALLER = """
{decorator}
from pagedkv.callee import step
@compiled
def advance(x: int) -> int:
    return 10 * step(x)
"""

CALL = """
import json
from pagedkv.caller import advance
value, stats = advance(1), advance.stats
print(json.dumps({"value": value, "hits": sum(stats.cache_hits.values()), "folder": stats.cache_path}))
"""
NO_TEMPORARY_FOLDER = """
import tempfile
tempfile.tempdir = "/dev/null"
"""
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""
READ_ONLY_PACKAGE = """
import tempfile
writable = tempfile.TemporaryFile
def refusing(*args, dir, **kws):  # permissions would not do: root has them all
    if "__pycache__" in str(dir):
        raise PermissionError(13, "Permission denied")
    return writable(*args, dir=dir, **kws)
tempfile.TemporaryFile = refusing
"""
CALLEE_OF_ENVIRONMENT = """
import os
from pagedkv.compilation.compiled import compiled

ADDED = int(os.environ.get("ADDED", "1"))

@compiled
def step(x: int) -> int:
    return x + ADDED
"""
EDITED_SINCE_IMPORT = """
from pathlib import Path
import pagedkv.caller, pagedkv.callee
source = Path(pagedkv.callee.__file__)
source.write_text(source.read_text().replace("x + 1", "x + 200"))
"""


PAIR = """
from typing import NamedTuple
import numpy as np
class Pair(NamedTuple):
    numbers: np.ndarray
"""
BOUND = """
from dataclasses import dataclass
from pagedkv.compilation.compiled import inlined
from pagedkv.pair import Pair
@inlined
def change(pair, x):
    return pair.numbers[0] + {constant} * x
@dataclass
class Moments:
    change: object
class Bound(Pair):
    __slots__ = ()
    policy = Moments(change)
"""
ASKING = """
from pagedkv.compilation.compiled import chosen_by_policy
from pagedkv.compilation.compiled import compiled, inlined
@inlined
def default(pair, x):
    return x
change = chosen_by_policy("change", default)
@compiled
def ask(pair, x):
    return change(pair, x)
"""
ASK = """
import json
import numpy as np
from pagedkv.asking import ask
from pagedkv.bound import Bound
from pagedkv.pair import Pair
numbers = np.array([7], np.int32)
values = [int(ask(Pair(numbers), 5)), int(ask(Bound(numbers), 5))]
print(json.dumps({"values": values, "hits": sum(ask.stats.cache_hits.values())}))
"""


@dataclass
class Package:
    """A copy of the package in a folder of its own, beside a home and a folder for temporary files."""

    root: Path

    @property
    def folder(self) -> Path:
        """Where the modules are."""
        return self.root / "src" / "pagedkv"

    @property
    def home(self) -> Path:
        """The user's home."""
        return self.root / "home"

    def write(self, constant: int, decorator: str = COMPILED) -> None:
        """Write the loop that is called, which adds the constant; and the caller, unless it stands there already."""
        (self.folder / "callee.py").write_text(CALLEE.format(decorator=decorator, constant=constant))
        caller = self.folder / "caller.py"
        if not caller.exists() or caller.read_text() != CALLER.format(decorator=decorator):
            caller.write_text(CALLER.format(decorator=decorator))

    def forbid_own_folder(self) -> None:
        """Let nothing be written beside the modules. Permissions would not do: root has them all."""
        (self.folder / "__pycache__").write_text("a file")

    def start(self, program: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program that imports this package."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
        own = {
            "PYTHONPATH": str(self.folder.parent),
            "PYTHONDONTWRITEBYTECODE": "1",  # Python's own cache takes two edits within a second for one
            "HOME": str(self.home),
            "TMPDIR": str(self.root / "tmp"),
        }
        return subprocess.Popen(
            [sys.executable, "-W", "always::RuntimeWarning", "-c", program],
            env=inherited | own | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str = CALL, **environment: str) -> dict[str, Any]:
        """Run a program; answer what it printed, and its warnings."""
        return result(self.start(program, **environment))


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    answer: dict[str, Any] = json.loads(output)
    return answer | {"warnings": [line for line in errors.splitlines() if "RuntimeWarning: " in line]}


@pytest.fixture
def package(tmp_path: Path) -> Package:
    package = Package(tmp_path)
    package.home.mkdir()
    (tmp_path / "tmp").mkdir()
    for source in sources_of(Path(compiling.__file__)):
        copy = package.folder / source.relative_to(PACKAGE_FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    for folder in [package.folder, *(path for path in package.folder.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()
    package.write(constant=1)
    return package


def test_what_a_class_binds_is_compiled_into_loops_that_do_not_import_it_anew_once_it_is_edited(
    package: Package,
) -> None:
    choice = "compilation/compiled.py"
    (package.folder / choice).write_bytes((PACKAGE_FOLDER / choice).read_bytes())
    (package.folder / "pair.py").write_text(PAIR)
    (package.folder / "asking.py").write_text(ASKING)
    (package.folder / "bound.py").write_text(BOUND.format(constant=10))
    first = package.run(ASK)
    assert first == {"values": [5, 57], "hits": 0, "warnings": []}
    assert package.run(ASK) == first | {"hits": 2}
    (package.folder / "bound.py").write_text(BOUND.format(constant=20))
    assert package.run(ASK) == first | {"values": [5, 107], "hits": 1}
    (package.folder / "bound.py").write_text(BOUND.format(constant=10))
    assert package.run(ASK) == first | {"hits": 2}


def test_an_edited_callee_is_compiled_into_its_callers_anew_and_an_old_one_is_found_again(package: Package) -> None:
    first, second = package.run(), package.run()
    assert first == {
        "value": 20,
        "hits": 0,
        "folder": str(package.folder / "__pycache__/pagedkv-loops"),
        "warnings": [],
    }
    assert second == first | {"hits": 1}
    package.write(constant=2)
    assert package.run() == first | {"value": 30}
    package.write(constant=1)
    assert package.run() == second


def test_negative_control_numbas_own_cache_would_call_the_old_callee(package: Package) -> None:
    package.write(constant=1, decorator=PLAIN_NUMBA)
    assert package.run()["value"] == 20
    package.write(constant=2, decorator=PLAIN_NUMBA)
    assert package.run()["value"] == 20


def test_a_source_edited_since_it_was_imported_is_not_taken_for_what_runs(package: Package) -> None:
    assert package.run(EDITED_SINCE_IMPORT + CALL)["value"] == 20
    assert package.run() | {"folder": None} == {"value": 2010, "hits": 0, "folder": None, "warnings": []}


def test_a_chosen_folder_goes_before_all_others(package: Package) -> None:
    chosen = str(package.root / "chosen")
    assert package.run(NUMBA_CACHE_DIR=chosen)["folder"] == f"{chosen}/pagedkv-loops"
    assert package.run(NUMBA_CACHE_DIR=chosen)["hits"] == 1
    assert not (package.folder / "__pycache__").exists()


def test_without_the_packages_folder_the_users_is_taken(package: Package) -> None:
    package.forbid_own_folder()
    answer = package.run()
    assert Path(answer["folder"]).is_relative_to(package.home)
    assert not answer["warnings"]


def test_without_the_packages_and_the_users_folder_a_private_temporary_one_is_taken(package: Package) -> None:
    package.forbid_own_folder()
    first = package.run(HOME="/dev/null")
    assert Path(first["folder"]).parent == package.root / "tmp"
    assert Path(first["folder"]).stat().st_mode & 0o777 == 0o700
    assert first["value"] == 20
    assert package.run(HOME="/dev/null") == first | {"hits": 1}
    assert not first["warnings"]


def test_where_nothing_can_be_written_loops_are_compiled_each_time_with_one_warning(package: Package) -> None:
    package.forbid_own_folder()
    answer = package.run(NO_TEMPORARY_FOLDER + CALL, HOME="/dev/null")
    assert answer["value"] == 20
    assert answer["folder"] is None
    [warning] = answer["warnings"]
    for folder in (package.folder / "__pycache__", "/dev/null/.cache", "/dev/null/pagedkv-loops"):
        assert str(folder) in warning
    assert "Set NUMBA_CACHE_DIR" in warning


def test_on_a_full_disk_loops_run_with_one_warning_and_leave_nothing_behind(package: Package) -> None:
    answer = package.run(FULL_DISK + CALL)
    assert answer["value"] == 20
    [warning] = answer["warnings"]
    assert answer["folder"] in warning
    assert not list(Path(answer["folder"]).iterdir())


def test_from_an_archive_loops_run_with_one_warning(package: Package) -> None:
    archive = package.root / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in package.folder.rglob("*.py"):
            file.write(path, path.relative_to(package.folder.parent))
    answer = package.run(PYTHONPATH=str(archive))
    assert answer["value"] == 20
    [warning] = answer["warnings"]
    assert f"no sources in {archive}" in warning


def test_processes_that_compile_at_once_do_not_disturb_each_other(package: Package) -> None:
    racing = [package.start(CALL) for _ in range(2)]
    assert [result(process)["value"] for process in racing] == [20, 20]
    assert package.run()["hits"] == 1


def test_entries_in_a_package_that_cannot_be_written_are_read(package: Package) -> None:
    package.run()
    answer = package.run(READ_ONLY_PACKAGE + CALL)
    assert answer["hits"] == 1
    assert Path(answer["folder"]).is_relative_to(package.home)


def test_entries_that_were_installed_with_the_package_are_read_whatever_folder_is_chosen(package: Package) -> None:
    package.run()
    (package.folder / "__pycache__/pagedkv-loops").rename(package.folder / SHIPPED)
    chosen = str(package.root / "chosen")
    assert package.run(NUMBA_CACHE_DIR=chosen) == {
        "value": 20,
        "hits": 1,
        "folder": f"{chosen}/pagedkv-loops",
        "warnings": [],
    }


TARGET = next((target for target in TARGETS["x86_64"] if target.runs_on(own_processor())), None)
needs_target = pytest.mark.skipif(TARGET is None or not is_jitted(unsigned), reason="no target of this processor")


@needs_target
def test_entries_for_a_target_are_loaded_under_another_processor_and_own_ones_go_before_them(package: Package) -> None:
    """What is added is decided when a loop is compiled, so the value tells whose machine code ran."""
    assert TARGET is not None
    (package.folder / "callee.py").write_text(CALLEE_OF_ENVIRONMENT)
    assert package.run(ADDED="7", **TARGET.environment)["value"] == 80
    for name in ({}, {"NUMBA_CPU_NAME": "skylake"}):  # whatever the host is called
        found = package.run(**name)
        assert (found["value"], found["hits"]) == (80, 1)
    exactly = package.run(**{EXACTLY: "1"})
    assert (exactly["value"], exactly["hits"]) == (20, 0)
    assert package.run()["value"] == 20
    assert package.run(NUMBA_CPU_NAME="skylake")["value"] == 80


@needs_target
def test_entries_for_a_target_are_refused_where_one_of_its_features_is_missing(package: Package) -> None:
    assert TARGET is not None
    package.run(**TARGET.environment)
    has, lacks = (",".join(f"+{each}" for each in features) for features in (TARGET.features, TARGET.features[:-1]))
    assert package.run(NUMBA_CPU_NAME="skylake", NUMBA_CPU_FEATURES=f"{has},+sha")["hits"] == 1
    assert package.run(NUMBA_CPU_NAME="skylake", NUMBA_CPU_FEATURES=f"{lacks},+sha")["hits"] == 0


def test_interpreted_loops_look_for_no_folder(package: Package) -> None:
    program = "import json; from pagedkv.caller import advance; print(json.dumps({'value': advance(1)}))"
    assert package.run(program, NUMBA_DISABLE_JIT="1") == {"value": 20, "warnings": []}
    assert not (package.folder / "__pycache__").exists()


@pytest.mark.skipif(not is_jitted(unsigned), reason="nothing is compiled")
def test_a_function_that_closes_over_variables_is_not_kept() -> None:
    def adding(amount: int) -> Callable[[int], int]:
        @compiled
        def add(x: int) -> int:
            return x + amount

        return add

    assert [adding(1)(1), adding(2)(1)] == [2, 3]
    assert cast("Any", adding(1)).stats.cache_path is None
