"""Two streams of calls, compared line by line.

A line that differs is read: where nothing but the text of errors differs, the two texts are kept apart; anything else
is a :class:`Difference`, and the end, since from there on the two packages get different calls.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

from benchmarks.side_by_side.observing import NUMBER
from benchmarks.side_by_side.tally import has_broken

__all__ = ["Comparison", "Difference", "compare"]

PARTS: Final = ("life", "call", "operation", "answer", "state")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that the two packages answer differently.

    Args:
        now, then: the lines as they were written; None where the process had ended.
    """

    now: str | None
    then: str | None

    @property
    def life(self) -> int | None:
        """Number of the life in which the lines differ; None if neither line is a call."""
        records = [json.loads(line) for line in (self.now, self.then) if line is not None]
        return next((int(record[0]) for record in records if isinstance(record, list)), None)

    def __str__(self) -> str:
        if self.now is None or self.then is None:
            return f"one process ended before the other wrote: {(self.now or self.then or '')[:1000]}"
        now, then = json.loads(self.now), json.loads(self.then)
        if not (isinstance(now, list) and isinstance(then, list)):
            return f"one life ended before the other:\n  now:  {self.now[:1000]}\n  then: {self.then[:1000]}"
        lines = [f"call {now[1]}: {now[2]}"]
        for where, one, other in _differing(dict(zip(PARTS, now, strict=True)), dict(zip(PARTS, then, strict=True))):
            lines += [f"  {where}", f"    now:  {json.dumps(one)}", f"    then: {json.dumps(other)}"]
        return "\n".join(lines)


@dataclass(slots=True)
class Comparison:
    """What came of it.

    Args:
        num_calls: calls that were compared.
        difference: the first, if there is one.
        reworded: errors that differ in their words alone, (now, then) with numbers left out, and how many there were.
        tallies: by mix, how often each operation ran, with what outcome, and what it met.
        broken: the calls, as lines, that ended their life in both packages with what is no error of ours.
    """

    num_calls: int = 0
    difference: Difference | None = None
    reworded: Counter[tuple[str, str]] = field(default_factory=Counter)
    tallies: dict[str, Counter[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def compare(now: Iterable[str], then: Iterable[str], advance: Callable[[int], None]) -> Comparison:
    """Compare what two processes write, until they differ; after each life, ``advance`` gets the number of calls."""
    comparison = Comparison()
    last_call = ""
    for ours, theirs in zip_longest(now, then):
        if ours != theirs and not _is_reworded(ours, theirs, comparison.reworded):
            comparison.difference = Difference(ours, theirs)
            break
        if ours.startswith("{"):
            summary = json.loads(ours)
            comparison.tallies.setdefault(summary["mix"], Counter()).update(summary["tally"])
            if has_broken(summary["tally"]):
                comparison.broken.append(last_call)
            advance(comparison.num_calls)
        else:
            comparison.num_calls += 1
            last_call = ours
    return comparison


def _is_reworded(ours: str | None, theirs: str | None, reworded: Counter[tuple[str, str]]) -> bool:
    """Return whether two lines differ in nothing but the texts of errors; note these if so."""
    if ours is None or theirs is None:
        return False
    texts = []
    for where, one, other in _differing(json.loads(ours), json.loads(theirs)):
        if not where.endswith(".text"):
            return False
        texts.append((NUMBER.sub("N", one), NUMBER.sub("N", other)))
    reworded.update(texts)
    return True


def _differing(one: Any, other: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:  # noqa: ANN401 - JSON
    """Find the innermost places where two values differ: (where, one, other)."""
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from _differing(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and _is_nested(one):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differing(left, right, f"{where}[{index}]")
    else:
        yield where.lstrip("."), one, other


def _is_nested(values: list[Any]) -> bool:
    """Return whether a list has parts worth naming; a list of numbers is shown as a whole."""
    return any(isinstance(value, dict | list) for value in values)
