"""How many lines could be placed by a reader who has memorised every name: a bound for readers who know nothing.

Such a reader has counted, for each room, on how many lines each name stands, and places a line in the room that makes
its names most likely (naive Bayes; a room has seen each name once more than it has, as often as it stands anywhere).
The line itself is not counted, or, for a reader who has seen all other files but not this one, no line of its file.

    python -m benchmarks.reading.memorised      the share of all lines of HEAD that each reader would place right
"""

import argparse
import io
import keyword
import math
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from benchmarks.reading.drawn import Line, all_lines, draw
from benchmarks.reading.pairs import Plan
from benchmarks.repository import commit_id, extracted

__all__ = ["Memory", "names_of", "shares"]

NUM_ASKED: Final = 3000


def names_of(text: str) -> frozenset[str]:
    """List the names on a line; of one that is a part of a longer text, those up to where it breaks off."""
    names = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                names.add(token.string)
    except (tokenize.TokenError, IndentationError):
        pass
    return frozenset(names)


@dataclass
class Memory:
    """On how many lines of each room each name stands.

    Attributes:
        lines: lines of each room.
        names: lines of each room and name.
    """

    lines: Counter[str] = field(default_factory=Counter)
    names: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, room: str, line: frozenset[str], sign: int = 1) -> None:
        """Count a line, or take it out again with -1."""
        self.lines[room] += sign
        for name in line:
            self.names[name][room] += sign

    def room_of(self, line: frozenset[str]) -> str:
        """Return the room in which a line with these names is most likely."""
        return max(sorted(self.lines), key=lambda room: self._score(room, line))

    def _score(self, room: str, line: Iterable[str]) -> float:
        num_lines, num_all = self.lines[room], self.lines.total()
        score = math.log(num_lines + 1)
        for name in line:
            everywhere = self.names[name].total()
            if everywhere:
                score += math.log((self.names[name][room] + everywhere / num_all) / (num_lines + 1))
        return score


def shares(lines: Sequence[Line], asked: Sequence[Line], room_of_file: Callable[[str], str]) -> Mapping[str, float]:
    """Return the share of the asked lines that a reader places right who left out the line alone, or its whole file."""
    memory = Memory()
    named = {line: names_of(line.text) for line in (*lines, *asked)}
    by_file: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        memory.add(room_of_file(line.file), named[line])
        by_file[line.file].append(line)
    right: Counter[str] = Counter()
    for line in asked:
        room = room_of_file(line.file)
        for reader, hidden in (("all other lines", [line]), ("all other files", by_file[line.file])):
            for each in hidden:
                memory.add(room, named[each], -1)
            right[reader] += memory.room_of(named[line]) == room
            for each in hidden:
                memory.add(room, named[each])
    return {reader: number / len(asked) for reader, number in right.items()}


def main() -> None:
    """Print the shares of a commit: of many lines, and of the twenty that are drawn."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reading.memorised",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--commit", default="HEAD", metavar="COMMIT", help="which (default: the one checked out)")
    arguments = parser.parse_args()
    commit, plan = commit_id(arguments.commit), Plan.read()
    with extracted(commit) as tree:
        package = tree / "src" / "pagedkv"
        lines = all_lines(package)
        drawn = draw(package, commit)
    asked = Random(commit).sample(lines, NUM_ASKED)
    print(f"lines of {commit} that a reader places who has memorised the names on")
    for what, chosen in ((f"{NUM_ASKED:,} lines", asked), ("the drawn ones", drawn)):
        for reader, share in shares(lines, chosen, plan.room_of).items():
            print(f"  {reader}, of {what}: {share:.2f}")


if __name__ == "__main__":
    main()
