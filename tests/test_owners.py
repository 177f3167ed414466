"""Every column of a block's and of a row's record is written by one module."""

from pathlib import Path

import pytest

import pagedkv
from pagedkv.memory.tables.owners import OWNERS
from tests.writes import ALL_COLUMNS, Write, writes_in

ROOT = Path(pagedkv.__file__).parent
MEMORY = ROOT / "memory"
ROOMS = (
    *(f"memory/{room}" for room in ("pool", "tables", "space", "scheduling", "classic", "warming")),
    "planner/capacity",
    "planner/simulation",
    "serving/engine",
)


def owner_of(write: Write) -> str | None:
    """Tell which module may make a write; none may write any column of records whose columns have several owners."""
    if write.array in OWNERS:
        return OWNERS[write.array]
    return None if write.column == ALL_COLUMNS else OWNERS[f"{write.array}.{write.column}"]


def is_part_of(module: str, owner: str | None) -> bool:
    return owner is not None and (module == owner or module.startswith(owner + "."))


def foreign_writes(module: str, source: str) -> list[str]:
    return [
        f"{module}:{write.line}: {write.source} ({write.array}.{write.column})"
        for write in writes_in(source)
        if not is_part_of(module, owner_of(write))
    ]


def module_of(path: Path) -> str:
    """Name a module from its room on, as owners are named."""
    _wing, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


@pytest.mark.parametrize("room", ROOMS)
def test_every_column_is_written_by_its_owner_alone(room: str) -> None:
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        found += foreign_writes(module_of(path), path.read_text())
    assert not found, "\n".join(found)


def test_every_owner_writes_what_it_owns() -> None:
    written = set()
    for path in [*(MEMORY / "pool").rglob("*.py"), *(MEMORY / "tables").rglob("*.py")]:
        for write in writes_in(path.read_text()):
            written |= {(write.array, module_of(path)), (f"{write.array}.{write.column}", module_of(path))}
    files = {entry: owner for entry, owner in OWNERS.items() if owner != "pool.eviction"}  # where rows are handed on
    assert files.items() <= written, f"owners that write nothing of theirs: {files.items() - written}"


PLANTED = {
    "by its name": "def f(pool, block):\n    pool.records[block, REF_COUNT] = 1\n",
    "added to": "def f(pool, block):\n    pool.records[block, REF_COUNT] += 1\n",
    "by a raw number": "def f(pool, block):\n    pool.records[block, 4] = 1\n",
    "by a slice": "def f(pool, block):\n    pool.records[1:, QUEUE] = 1\n",
    "a whole row": "def f(pool, block):\n    pool.records[block] = 0\n",
    "all of it": "def f(pool):\n    pool.records[:] = 0\n",
    "through another name": "def f(pool, block):\n    known = pool.records\n    known[block, QUEUE] = 1\n",
    "through a row": "def f(pool, block):\n    record = pool.records[block]\n    record[QUEUE] = 1\n",
    "through one name of two": "def f(pool, b):\n    x, y = pool.records, pool.counts\n    y[NUM_FREE] -= 1\n",
    "one target of two": "def f(pool, block):\n    a, pool.records[block, NEXT] = 1, 2\n",
    "several columns": "def f(pool, b):\n    pool.records[b, (NEXT, QUEUE)] = 0\n",
    "another array's column": "def f(pool, b, column):\n    pool.records[b, column] = 0\n",
    "an alias of a column": "def f(pool, b):\n    pool.records[b, KEPT] |= 1\n",
    "of a row": "def f(state, row):\n    state.rows[row, STATUS] = 1\n",
    "of a row, a group's": "def f(rows, row, at):\n    rows[row, at + TAIL] = 1\n",
    "an entry of a table": "def f(group, row):\n    group.table[row, 0] = 1\n",
    "a part of a table": "def f(group, row):\n    mine = group.table[row]\n    mine[3] = 1\n",
    "a token": "def f(pool, block):\n    pool.tokens[block, 0] = 1\n",
    "by numpy": "def f(pool):\n    np.copyto(pool.records, 0)\n",
    "into what numpy writes": "def f(pool):\n    np.add(1, 2, out=pool.counts)\n",
    "by a method": "def f(state):\n    state.rows.fill(0)\n",
    "by a loop": "def f(pool):\n    for pool.counts[NUM_FREE] in range(3):\n        pass\n",
}


@pytest.mark.parametrize("way", PLANTED)
def test_a_planted_write_is_found(way: str) -> None:
    assert foreign_writes("space.elsewhere", PLANTED[way])


def test_what_is_read_is_no_write() -> None:
    source = (
        "def f(pool, b, out):\n    record = pool.records[b]\n    out[0] = record[QUEUE]\n    return pool.tokens[b]\n"
    )
    assert not foreign_writes("space.elsewhere", source)


def test_the_design_prints_the_table() -> None:
    by_owner: dict[str, dict[str, list[str]]] = {}
    for entry, owner in OWNERS.items():
        array, _, column = entry.partition(".")
        by_owner.setdefault(owner, {}).setdefault(array, []).extend([column] if column else [])
    lines = ["| module | writes |", "|---|---|"]
    for owner, arrays in by_owner.items():
        parts = [f"`{array}`" + (": " + " ".join(columns) if columns else "") for array, columns in arrays.items()]
        lines.append(f"| `{owner.replace('.', '/', 1)}` | {', '.join(parts)} |")
    printed = (ROOT.parents[1] / "docs" / "design.md").read_text()
    assert "\n".join(lines) in printed, "docs/design.md should have:\n" + "\n".join(lines)
