"""Pairs count for the module that defines a name, and the table names what is there."""

from pathlib import Path

import pytest

from benchmarks.reading.imports import Sources, Taken
from benchmarks.reading.pairs import Plan, circles, pairs, room_sizes
from benchmarks.repository import ROOT

pytestmark = pytest.mark.plain_only

PLAN = Plan(
    core=("pool/", "space/"),
    wings=("wing",),
    features={"tenants": ("pool/charging.py",), "leases": ("pool/leases/",)},
    meetings=("pool/meeting.py",),
)


def sources(folder: Path, files: dict[str, str]) -> Sources:
    for name, text in ({"__init__.py": ""} | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Sources(folder)


SMALL = {
    "pool/__init__.py": "from pagedkv.pool.charging import take as pay\nfrom pagedkv.pool.blocks import NEXT\n",
    "pool/blocks.py": "NEXT = 0\n",
    "pool/charging.py": "from pagedkv.pool.blocks import NEXT\ntake = 1\n",
    "pool/leases/__init__.py": "from pagedkv.pool.leases.order import first\n",
    "pool/leases/order.py": "from pagedkv.pool.charging import take\nfirst = 2\n",
    "pool/meeting.py": "from pagedkv.pool.charging import take\nfrom pagedkv.pool.leases import first\n",
    "wing/space/growing.py": "from pagedkv.pool import pay, NEXT\nfrom pagedkv.pool import charging\n",
    "wing/space/audit.py": "def f():\n    from pagedkv.pool.leases import first\n",
    "planner.py": "from pagedkv.pool.charging import take\n",
}


def test_a_name_counts_for_the_module_that_defines_it_through_re_exports(tmp_path: Path) -> None:
    taken = sources(tmp_path, SMALL).taken
    assert Taken("wing/space/growing.py", "pool/__init__.py", "pool/charging.py", "take") in taken
    assert Taken("wing/space/growing.py", "pool/__init__.py", "pool/charging.py", "") in taken
    assert Taken("wing/space/growing.py", "pool/__init__.py", "pool/blocks.py", "NEXT") in taken
    assert Taken("wing/space/audit.py", "pool/leases/__init__.py", "pool/leases/order.py", "first") in taken
    assert not any(each.origin == "pool/__init__.py" for each in taken)


def test_pairs_are_those_of_core_files_and_of_features_with_other_features(tmp_path: Path) -> None:
    assert pairs(sources(tmp_path, SMALL), PLAN) == {
        ("leases", "tenants"): ["take"],
        ("pool/__init__.py", "tenants"): ["take"],
        ("wing/space/audit.py", "leases"): ["first"],
        ("wing/space/growing.py", "tenants"): ["take", "pool/charging.py"],
    }


def test_rooms_lie_inside_wings_and_circles_go_through_others(tmp_path: Path) -> None:
    small = sources(tmp_path, SMALL)
    assert room_sizes(small, PLAN) == {"pool": 10, "wing/space": 4, "(root)": 1}
    assert circles(small, PLAN) == []
    around = {
        "pool/blocks.py": "from pagedkv.a.one import x\n",
        "a/one.py": "from pagedkv.wing.space.audit import f as x\n",
    }
    assert circles(sources(tmp_path, SMALL | around), PLAN) == [["a", "pool", "wing/space"]]


def test_the_table_names_files_that_are_there_each_once() -> None:
    plan, tree = Plan.read(), Sources(ROOT / "src" / "pagedkv")
    assert plan.unknown_paths(tree) == []
    assert len(plan.features) == 9
    paths = [path for of_feature in plan.features.values() for path in of_feature]
    assert len(paths) == len(set(paths))


def test_what_the_table_names_and_is_not_there_is_told(tmp_path: Path) -> None:
    told = PLAN.unknown_paths(sources(tmp_path, {"pool/charging.py": ""}))
    assert told == ["space/", "pool/meeting.py", "pool/leases/"]
