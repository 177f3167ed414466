"""How many of a job's lines would be left if all its functions were inlined into one: the most that moving code gains.

An inlined function has one line less: either its call was a statement, which its body replaces, or its ``return``
merges into the expression that called it. A call over several lines loses the others too.
"""

import ast
from pathlib import Path

from benchmarks.reading.jobs import Executed

__all__ = ["num_lines_inlined"]


def num_lines_inlined(executed: Executed) -> int:
    """Return the least number of lines that are left of a job once its functions are inlined into the first."""
    names = {code.co_name for code in executed.functions}
    further = {(file, line) for file in executed.files for line in _further_lines_of_calls(Path(file), names)}
    return len(executed.lines - further) - (len(executed.functions) - 1)


def _further_lines_of_calls(file: Path, names: set[str]) -> set[int]:
    """Return the lines behind the first one of each call of these functions."""
    return {
        line
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _called(node) in names
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }


def _called(call: ast.Call) -> str | None:
    """Return the name of the function that is called, without its module or object."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
