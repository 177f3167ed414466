"""The package as a whole: what importing it costs, and that the drawing of its errors is true."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
import pytest

import pagedkv
from pagedkv import errors
from tests.compiling import needs_compiled_loops

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"

# Not scipy: Numba looks for it by itself.
OPTIONAL_PACKAGES = frozenset(
    {
        "click",
        "hypothesis",
        "matplotlib",
        "msgspec",
        "pandas",
        "pydantic",
        "pytest",
        "rich",
        "torch",
        "transformers",
        "triton",
        "typer",
        "zmq",
    },
)

# A finder that finds nothing but sees each search: so an import that is tried and caught is noticed even
# where the package is not installed.
RECORD_IMPORTS = """
import json, sys
tried = set()
class Recorder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        tried.add(name)
sys.meta_path.insert(0, Recorder)
{statements}
print(json.dumps(sorted(name.partition(".")[0] for name in tried | set(sys.modules))))
"""

# Numba announces each function that it compiles; a recorder counts them.
COUNT_COMPILED = """
from numba.core import event
with event.install_recorder("numba:compile") as recorder:
    {statements}
print(len(recorder.buffer))
"""


def run_python(program: str) -> str:
    """Run a program in a fresh interpreter and return what it printed."""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def optional_packages_imported_by(statements: str) -> frozenset[str]:
    names: list[str] = json.loads(run_python(RECORD_IMPORTS.format(statements=statements)))
    return OPTIONAL_PACKAGES.intersection(names)


def test_import_loads_nothing_optional() -> None:
    assert optional_packages_imported_by("from pagedkv import BlockSpace") == set()


def test_import_alone_loads_neither_numpy_nor_numba() -> None:
    program = "import sys, pagedkv; print(pagedkv.__version__, {'numba', 'numpy'} & set(sys.modules))"
    assert run_python(program) == f"{pagedkv.__version__} set()\n"


def test_public_names_are_found_however_they_are_asked_for() -> None:
    run_python("import pagedkv; assert 'BlockSpace' in dir(pagedkv); pagedkv.BlockSpace; pagedkv.space.BlockSpace")
    run_python("from pagedkv import *; BlockSpace")


def test_dir_lists_what_users_import_and_nothing_that_the_package_uses_itself() -> None:
    listed = {name for name in dir(pagedkv) if not name.startswith("__")}
    assert not {name for name in listed if name.startswith("_")} | listed & {"importlib", "typing", "public", "blocks"}
    documented = re.findall(r"automodule:: pagedkv\.(\w+)", "".join(page.read_text() for page in API.glob("*.md")))
    assert set(documented) | set(pagedkv.__all__) <= listed
    run_python("import pagedkv; assert pagedkv.space.BlockSpace; from pagedkv import tiers; tiers.FolderBody")


def test_a_module_whose_extra_is_missing_is_no_attribute_and_tells_why_when_it_is_imported() -> None:
    run_python("""
import sys
sys.modules["torch"] = None
import pagedkv
assert not hasattr(pagedkv, "device") and "device" in dir(pagedkv)
try:
    from pagedkv import device
except ImportError as problem:
    assert "torch" in str(problem), problem
else:
    raise AssertionError("device needs torch")
""")


def test_help_names_types_and_does_not_spell_them_out() -> None:
    methods = inspect.getmembers(pagedkv.BlockSpace, inspect.isfunction)
    signatures = {name: str(inspect.signature(method)) for name, method in methods if not name.startswith("_")}
    assert len(signatures) > 50
    assert not [name for name, written in signatures.items() if "ndarray" in written or "numpy." in written]
    assert "token_ids: 'TokenIds | None'" in signatures["append"]


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'pagedkv' has no attribute 'BlockSpaces'"):
        getattr(pagedkv, "BlockSpaces")  # noqa: B009 - mypy knows that there is none


@pytest.mark.parametrize(
    ("statements", "noticed"),
    [
        ("import hypothesis", "hypothesis"),
        ("try:\n    import msgspec\nexcept ImportError:\n    pass", "msgspec"),
    ],
    ids=["installed", "tried and caught"],
)
def test_an_optional_import_would_be_noticed(statements: str, noticed: str) -> None:
    assert noticed in optional_packages_imported_by(statements)


def num_compiled_by(statements: str) -> int:
    return int(run_python(COUNT_COMPILED.format(statements=statements)))


@needs_compiled_loops
def test_import_compiles_nothing() -> None:
    """What importing costs is Numba's own import and ours: `python -m benchmarks --only import` times it."""
    assert num_compiled_by("from pagedkv import BlockSpace") == 0
    assert num_compiled_by("import numba; numba.njit(lambda: 1)()") > 0


def test_a_checkout_that_was_never_installed_imports(tmp_path: Path) -> None:
    """Without site packages there is no metadata to ask for a version: only what the package needs is linked in."""
    for needed in (np, numba, llvmlite):
        assert needed.__file__ is not None
        folder = Path(needed.__file__).parent
        (tmp_path / folder.name).symlink_to(folder)
        libraries = folder.with_name(f"{folder.name}.libs")
        if libraries.is_dir():
            (tmp_path / libraries.name).symlink_to(libraries)
    program = f"""
import sys
sys.path[:0] = {[str(ROOT / "src"), str(tmp_path)]!r}
from importlib.metadata import PackageNotFoundError, version
try:
    version("pagedkv")
except PackageNotFoundError:
    import pagedkv
    print(pagedkv.__file__, pagedkv.__version__)
"""
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    assert process.stdout.split() == [str(ROOT / "src" / "pagedkv" / "__init__.py"), pagedkv.__version__]


def test_the_public_names_are_exactly_those_of_all() -> None:
    public = {name for name, value in vars(pagedkv).items() if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(pagedkv, name), ModuleType)}
    assert public - modules == set(pagedkv.__all__)


@pytest.mark.parametrize("name", pagedkv.__all__)
def test_every_public_name_is_described(name: str) -> None:
    """By a docstring of its own (a frozen value gets one made of its fields), or, if it has none, in the documents."""
    value = getattr(pagedkv, name)
    documents = "".join((ROOT / path).read_text(encoding="utf-8") for path in ("docs/guide.md", "docs/design.md"))
    if inspect.isclass(value) or inspect.isfunction(value):
        assert len(value.__doc__ or "") > 0
        assert not (value.__doc__ or "").startswith(f"{name}(")
    else:
        assert f"`{name}`" in documents


def drawn_tree(drawing: str) -> dict[str, str | None]:
    """Read a tree drawn in ASCII: the parent of each class, None for the root."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for branches, name in re.findall(r"^ {4}((?:[|` ] {3})*(?:[|`]-- )?)(\w+Error)\b", drawing, re.MULTILINE):
        depth = len(branches) // 4
        del path[depth:]
        parents[name] = path[-1] if path else None
        path.append(name)
    return parents


def real_tree() -> dict[str, str | None]:
    """Read the same from the classes."""
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.PagedKVError)
    ]
    return {
        cls.__name__: next((base.__name__ for base in cls.__bases__ if issubclass(base, errors.PagedKVError)), None)
        for cls in classes
    }


def test_errors_are_as_drawn() -> None:
    assert drawn_tree(errors.__doc__ or "") == real_tree()


def test_all_errors_are_exported() -> None:
    assert set(errors.__all__) == set(real_tree())


def test_a_wrong_drawing_would_be_noticed() -> None:
    drawing = errors.__doc__ or ""
    moved = drawing.replace("|   `-- LostSequenceError", "|-- LostSequenceError")
    assert drawn_tree(moved) not in (drawn_tree(drawing), real_tree())


SIGNALS = {
    "pagedkv.cli.interrupting.Terminated": "SIGTERM, as KeyboardInterrupt is Ctrl-C",
    "pagedkv.engine.answer_stream.OutletClosedError": "between threads of the engine",
    "pagedkv.planner.capacity.pool_hits.StoppedError": "ends the other measurements beside a failed one",
    "pagedkv.server.http.ClientGoneError": "ends the work for a client that has gone",
    "pagedkv.server.http.ApiError": "the response that a client gets",
}
"""Exceptions that never leave the room that raises them, and why there are such."""


def exceptions_of(source: str) -> list[str]:
    """List the public classes of a module that derive from an exception, by their bases' names."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [
        node.name
        for node in classes
        if not node.name.startswith("_")
        and any(ast.unparse(base).endswith(("Error", "Exception", "Warning", "Interrupt")) for base in node.bases)
    ]


def test_every_error_has_its_home_in_one_public_module() -> None:
    sources = ROOT / "src"
    elsewhere = {
        f"{'.'.join(file.relative_to(sources).with_suffix('').parts)}.{name}"
        for file in sources.rglob("*.py")
        for name in exceptions_of(file.read_text(encoding="utf-8"))
        if file != sources / "pagedkv" / "errors.py"
    }
    assert elsewhere == set(SIGNALS)
    assert exceptions_of("class A(ValueError): pass\nclass _B(KeyError): pass\nclass C(D): pass") == ["A"]


def test_the_tree_of_errors_is_imported_by_itself() -> None:
    """Whoever catches an error of the engine needs neither the engine nor NumPy."""
    program = """
import sys
from pagedkv.errors import RequestError, TraceError, UnsupportedModelError
print({"numpy", "numba", "torch"} & set(sys.modules))
"""
    assert run_python(program) == "set()\n"


@pytest.mark.long
def test_the_first_program_is_clean_under_strict_types(tmp_path: Path) -> None:
    """The first lines of README, as someone types them into an editor."""
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    program = tmp_path / "first.py"
    for lines, num_errors in ((first, 0), (first.replace("first.row", "first.rows"), 2)):  # of both possible answers
        program.write_text(lines)
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", str(program)]
        ran = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=False)
        errors_of_it = [line for line in ran.stdout.splitlines() if line.startswith(f"{program}:") and "error:" in line]
        assert len(errors_of_it) == num_errors, ran.stdout
