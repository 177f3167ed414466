"""Paths that users import, as pages and examples show them: all are there, and give what the rooms have."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

import pagedkv

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = Path(pagedkv.__file__).parent
PAGES: Final = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.py")),
)
IMPORTED: Final = re.compile(r"^\s*from (pagedkv[\w.]*) import (\([^)]*\)|[^\n(#]+)", re.MULTILINE)
MENTIONED: Final = re.compile(r"\bpagedkv(?:\.[A-Za-z_]\w*)+")


def paths_in(text: str) -> set[str]:
    """Collect the dotted paths that a text shows: what it imports, name by name, and what it mentions."""
    imported = {
        f"{module}.{name.strip().partition(' as ')[0]}"
        for module, names in IMPORTED.findall(text)
        for name in names.strip("()\n").split(",")
        if name.strip()
    }
    return imported | set(MENTIONED.findall(text))


SHOWN: Final = sorted(set().union(*(paths_in(page.read_text(encoding="utf-8")) for page in PAGES)))


def found(path: str) -> object:
    """Find what a path names: a module, or a name in one.

    Raises:
        ModuleNotFoundError, AttributeError: it names nothing.
    """
    parent, _, name = path.rpartition(".")
    try:
        return import_module(path)
    except ModuleNotFoundError as problem:
        if not path.startswith(problem.name or path):
            raise  # what the module itself imports is missing
    return getattr(found(parent), name)


def is_of_a_room(value: object) -> bool:
    """Tell whether a class or function is the one that its module has under its name; other values have no home."""
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return True
    module, name = str(value.__module__), str(getattr(value, "__qualname__", ""))
    return module.startswith("pagedkv.") and getattr(import_module(module), name) is value


@pytest.mark.parametrize("path", SHOWN)
def test_a_path_that_is_shown_names_what_its_room_has(path: str) -> None:
    try:
        value = found(path)
    except ModuleNotFoundError as problem:
        if not path.startswith("pagedkv.plugins."):
            raise
        pytest.skip(f"a plug-in of {problem.name}, which is not installed")
    assert path == getattr(value, "__name__", None) or path == "pagedkv.__version__" or is_of_a_room(value)


def test_paths_are_collected() -> None:
    assert len(SHOWN) > 50
    assert {"pagedkv.device.KVStorage", "pagedkv.engine.unfoldings.read_unfoldings", "pagedkv.BlockSpace"} <= set(SHOWN)
    text = (
        "from pagedkv.a import (\n    One,\n    Two as Deux,\n)\nfrom pagedkv import b, C  # two\nsee `pagedkv.d.E()`"
    )
    assert paths_in(text) == {"pagedkv.a", "pagedkv.a.One", "pagedkv.a.Two", "pagedkv.b", "pagedkv.C", "pagedkv.d.E"}


@pytest.mark.parametrize("path", ["pagedkv.gone", "pagedkv.device.Gone", "pagedkv.engine.gone.name"])
def test_a_path_that_is_gone_is_noticed(path: str) -> None:
    with pytest.raises(AttributeError):
        found(path)


def test_another_object_under_a_shown_name_is_noticed() -> None:
    class KVStorage:
        pass

    assert is_of_a_room(pagedkv.BlockSpace)
    assert not is_of_a_room(KVStorage)


@pytest.mark.long
def test_shown_paths_are_typed(tmp_path: Path) -> None:
    """Strict mypy knows every name that is shown, and not one that is not there."""
    named = [path for path in SHOWN if path.rpartition(".")[2][0].isupper() or callable(found(path))]
    lines = [f"from {module} import {name}" for module, _, name in (path.rpartition(".") for path in named)]
    program = tmp_path / "user.py"
    program.write_text("\n".join([*lines, "from pagedkv.device import Gone"]))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", str(program)]
    ran = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    errors = [line for line in ran.stdout.splitlines() if line.startswith(str(program)) and ": error: " in line]
    assert len(errors) == 1, ran.stdout
    assert f"user.py:{len(lines) + 1}: " in errors[0]
