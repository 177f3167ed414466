"""Whatever is asked of a group's rule is answered for every rule: where one that joins is missing, mypy says so.

Rules join ``GroupSpec`` by the recipe in CONTRIBUTING.md. An ``isinstance`` of one rule, or a ``case _`` with an
answer, would take the new one for one of the others, without an error.
"""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from pagedkv import GroupSpec
from pagedkv.models.layer_rules import KINDS
from pagedkv.probe.layers import RuleKind

pytestmark = pytest.mark.plain_only

REPOSITORY = Path(__file__).parents[1]
RULES = {rule.__name__ for rule in get_args(GroupSpec)}
SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))

NEW_RULE = '''
@dataclass(frozen=True, slots=True)
class Strided:
    """A rule that no function knows."""

    block_size: int = 16
    pool: str = DEFAULT_POOL
    prefix_caching: bool = True
    kind: Literal["strided"] = field(default="strided", init=False)


'''
UNION = "GroupSpec: TypeAlias = FullAttention"


def classes_in(node: ast.AST) -> set[str]:
    """Name the classes that a pattern, or the second argument of ``isinstance``, asks for."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def matches_over_rules(path: Path) -> Iterator[ast.Match]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Match) and any(classes_in(case.pattern) & RULES for case in node.cases):
            yield node


def test_no_source_asks_whether_a_group_is_of_one_rule() -> None:
    asked = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and classes_in(node.args[1]) & RULES
    ]
    assert asked == [], "ask by a function of pagedkv.contract.spec that answers for every rule"


def test_every_match_over_rules_names_all_of_them_and_answers_for_no_other() -> None:
    num_matches = 0
    for path in SOURCES:
        for node in matches_over_rules(path):
            num_matches += 1
            where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
            *cases, rest = node.cases
            assert set.union(*(classes_in(case.pattern) for case in cases)) == RULES, where
            assert ast.unparse(rest.pattern) == "_", where
            assert [ast.unparse(line).partition("(")[0] for line in rest.body] == ["assert_never"], where
    assert num_matches >= 8


def test_kinds_are_those_of_the_rules() -> None:
    """``LayerGroup.spec`` makes a rule of each kind; the engine's probe sees those that are no states.

    Models with encoders are refused by both.
    """
    kinds = [rule.__dataclass_fields__["kind"].default for rule in get_args(GroupSpec)]
    kinds.remove("cross")
    assert kinds == list(KINDS)
    assert [*get_args(RuleKind), "recurrent"] == kinds


@pytest.mark.long
def test_mypy_names_every_place_that_does_not_know_a_new_rule(tmp_path: Path) -> None:
    """A rule joins ``GroupSpec`` in a copy of the sources: mypy has an error inside every match over rules."""
    shutil.copytree(REPOSITORY / "src", tmp_path / "src")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    spec = tmp_path / "src/pagedkv/contract/spec.py"
    text = spec.read_text()
    assert text.count(UNION) == 1
    spec.write_text(text.replace(UNION, f"{NEW_RULE.lstrip()}{UNION} | Strided"))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "src"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    named = {tuple(line.split(":")[:2]) for line in ran.stdout.splitlines() if ": error: " in line}
    for path in sorted((tmp_path / "src").rglob("*.py")):
        for node in matches_over_rules(path):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            where = str(path.relative_to(tmp_path))
            assert any((where, str(line)) in named for line in lines), (
                f"{where}:{node.lineno} is not named\n{ran.stdout}"
            )
