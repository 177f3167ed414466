"""The sources that loops can reach: every import that the language sees, and no source that is not imported."""

import ast
from pathlib import Path

from pagedkv.compilation.loop_cache import PACKAGE_FOLDER, sources_of

ROOT = PACKAGE_FOLDER.parent


def modules() -> dict[str, Path]:
    """All modules of the package, by name."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in PACKAGE_FOLDER.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def imported(file: Path) -> set[str]:
    """Names that a file imports, as the language reads it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import, which loop_cache.py does not follow"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_every_import_of_every_loop_is_followed_and_nothing_else() -> None:
    known = modules()
    imports = {file: {known[name] for name in imported(file) if name in known} for file in known.values()}
    loops = [file for file in imports if any(name.endswith(".compiled") for name in imported(file))]
    assert len(loops) > 10
    for loop in loops:
        reached, unread = {loop}, [loop]
        while unread:
            new = imports[unread.pop()] - reached
            reached |= new
            unread += new
        assert set(sources_of(loop)) == reached
