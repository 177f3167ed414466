"""Every assignment into an array of a pool or of rows that stands in some source: which column, and in which line.

Read off the syntax. An array is known by its name (``records``, ``pool.records``, ``state.rows``), by a local name that
was given to it or to one of its rows, and by what ``numpy`` functions write into. A column that is no constant, a raw
number, a slice or a whole row counts as a write of every column.
"""

import ast
import inspect
from collections.abc import Iterator
from typing import Final, NamedTuple

from pagedkv.memory.pool.blocks import PoolArrays
from pagedkv.memory.tables.owners import OWNERS

__all__ = ["ALL_COLUMNS", "Write", "writes_in"]

ALL_COLUMNS: Final = "*"
ARRAYS: Final = frozenset(name.partition(".")[0] for name in OWNERS)
COLUMNS: Final = {
    array: {column for name, _, column in (entry.partition(".") for entry in OWNERS) if name == array and column}
    for array in ARRAYS
}
SAME: Final = {"RELEASED": "HOLD_STEP", "KEPT": "AHEAD"}
TYPES: Final = {
    each.target.id: ast.unparse(each.annotation)
    for each in ast.walk(ast.parse(inspect.getsource(PoolArrays)))
    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
} | {"rows": "Int32Array", "table": "Int32Array"}
HOLDERS: Final = frozenset({"pool", "arrays", "state", "group", "drafts", "chains", "source", "destination", "rows"})
FLAT: Final = frozenset({"counts", "eviction", "leases", "ranks", "buckets"})  # whose only index is the column
WRITERS: Final = {"copyto": 0, "put": 0, "place": 0, "putmask": 0}  # of numpy: which argument they write into
METHODS: Final = frozenset({"fill", "put", "sort", "partition", "resize"})


class Write(NamedTuple):
    """One assignment: array and column (``*``: any), line, and source."""

    array: str
    column: str
    line: int
    source: str


def writes_in(source: str) -> Iterator[Write]:
    """Yield the writes of a module's source."""
    for function in _scopes(ast.parse(source)):
        yield from _Scope(function).writes()


def _scopes(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    top = [statement for statement in tree.body if not isinstance(statement, ast.FunctionDef | ast.ClassDef)]
    yield ast.FunctionDef("", ast.arguments([], [], None, [], [], None, []), top, [])
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


class _Scope:
    """One function: which of its names are arrays, or rows of arrays."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._nodes = [node for statement in function.body for node in ast.walk(statement)]
        arguments = [each for each in function.args.args if each.arg in ARRAYS and _may_be_one(each)]
        self._names: dict[str, tuple[str, bool]] = {each.arg: (each.arg, False) for each in arguments}
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._give(target, node.value)

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, its_value in zip(target.elts, value.elts, strict=True):
                self._give(each, its_value)
        elif isinstance(target, ast.Name):
            array = self._array(value)
            if array is not None:
                self._names[target.id] = array
            else:
                self._names.pop(target.id, None)  # something else of that name

    def _array(self, node: ast.expr) -> tuple[str, bool] | None:
        """Tell which array an expression is, and whether it is one row of it, or some."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            return (node.attr, False) if node.attr in ARRAYS and _is_of_pool_or_rows(node) else None
        if isinstance(node, ast.Subscript):
            inner = self._array(node.value)
            if inner is None or inner[1] or isinstance(node.slice, ast.Tuple):
                return None
            is_row = not isinstance(node.slice, ast.Slice)
            return inner[0], is_row
        return None

    def writes(self) -> Iterator[Write]:
        for node in self._nodes:
            for target in _targets(node):
                if isinstance(target, ast.Subscript):
                    yield from self._into(target, node)
            if isinstance(node, ast.Call):
                yield from self._by_call(node)

    def _into(self, target: ast.Subscript, node: ast.AST) -> Iterator[Write]:
        array = self._array(target.value)
        if array is None:
            return
        name, is_row = array
        index = target.slice
        if name in FLAT and isinstance(index, ast.Tuple):
            return  # an array of two dimensions that has the same name
        if not (is_row or name in FLAT):
            index = index.elts[-1] if isinstance(index, ast.Tuple) and len(index.elts) > 1 else ast.Slice()
        for column in _columns_of(index, COLUMNS[name]):
            yield Write(name, column, getattr(node, "lineno", 0), ast.unparse(node))

    def _by_call(self, call: ast.Call) -> Iterator[Write]:
        into = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
        if isinstance(call.func, ast.Attribute):
            if call.func.attr in WRITERS and call.args:
                into.append(call.args[WRITERS[call.func.attr]])
            if call.func.attr in METHODS:
                into.append(call.func.value)
        for each in into:
            array = self._array(each)
            if array is not None:
                yield Write(array[0], ALL_COLUMNS, call.lineno, ast.unparse(call))


def _targets(node: ast.AST) -> list[ast.expr]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        targets = [node.target]
    return [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _may_be_one(argument: ast.arg) -> bool:
    """Tell whether an argument with the name of an array has its type, if it has any."""
    return argument.annotation is None or ast.unparse(argument.annotation) == TYPES[argument.arg]


def _is_of_pool_or_rows(node: ast.Attribute) -> bool:
    """Tell ``pool.counts``, ``state.rows`` or ``self._arrays.records`` from an attribute of that name elsewhere."""
    owner = node.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name.strip("_").rpartition("_")[2] in HOLDERS or (name == "self" and node.attr == "rows")


def _columns_of(index: ast.expr, known: set[str]) -> list[str]:
    """Tell which columns an index names; any, if it is no constant that stands for one."""
    if not known:
        return [ALL_COLUMNS]
    if isinstance(index, ast.List | ast.Tuple):
        return [column for each in index.elts for column in _columns_of(each, known)]
    if isinstance(index, ast.BinOp):
        return _columns_of(index.right, known)
    if isinstance(index, ast.Name):
        column = SAME.get(index.id, index.id)
        if column in known:
            return [column]
    return [ALL_COLUMNS]
