"""How many of a job's lines would be left if all its functions were inlined into one: the least that moving code gains.

An inlined call costs no line: that of the call becomes the function's own, and a function's ``return`` becomes the
caller's assignment. Two kinds of lines are therefore left out: statements that are only a call (or assign or return
one) of a function that executes, all lines of them; and the only line of a function of which one line executes. Where
both are one call, both are left out, so the true number is higher.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from benchmarks.reading.jobs import Executed

__all__ = ["executed_lines_of", "num_lines_inlined"]


def num_lines_inlined(executed: Executed) -> int:
    """Return a lower bound of the lines that are left of a job once its functions are inlined."""
    names = {code.co_name for code in executed.functions}
    calls = {(file, line) for file in executed.files for line in _lines_of_calls(Path(file), names)}
    num_single = sum(len(executed_lines_of(code, executed)) == 1 for code in executed.functions)
    return len(executed.lines - calls) - num_single


def executed_lines_of(code: CodeType, executed: Executed) -> set[int]:
    """Return a function's own lines that execute."""
    own = {line for _, _, line in code.co_lines() if line is not None}
    return {line for line in own if (code.co_filename, line) in executed.lines}


def _lines_of_calls(file: Path, names: set[str]) -> Iterator[int]:
    """Yield the lines of statements that do nothing but call one of these functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return) and _called(node.value) in names:
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _called(value: ast.expr | None) -> str | None:
    """Return the name of the function that an expression calls, without its module or object."""
    if not isinstance(value, ast.Call):
        return None
    function = value.func
    while isinstance(function, ast.Subscript):
        function = function.value
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
