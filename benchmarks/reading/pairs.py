"""Which files of the core take names from optional features, and which features from one another; rooms and circles.

A pair is (file of the core, feature): the file imports at least one name that a file of the feature defines.
``features.toml`` lists the files of the core and of each feature.
"""

import argparse
import json
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.reading.imports import Sources
from benchmarks.repository import ROOT, commit_id, extracted

__all__ = ["Plan", "circles", "pairs", "room_sizes"]

TABLE: Final = Path(__file__).with_name("features.toml")
ROOT_ROOM: Final = "(root)"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which file belongs where.

    Args:
        core: folders of the core; wings: folders that hold rooms; features: by name, files and folders; meetings: files
            in which features meet, which are of neither. Paths begin with the room, so that commits in which rooms
            stood in no wings are measured by the same table.
    """

    core: tuple[str, ...]
    wings: tuple[str, ...]
    features: dict[str, tuple[str, ...]]
    meetings: tuple[str, ...]

    @classmethod
    def read(cls, table: Path = TABLE) -> "Plan":
        """Read the table."""
        document: dict[str, Any] = tomllib.loads(table.read_text())
        features = {name: tuple(paths) for name, paths in document["features"].items()}
        return cls(tuple(document["core"]), tuple(document["wings"]), features, tuple(document["meetings"]))

    def feature_of(self, file: str) -> str | None:
        """Return the feature that a file belongs to."""
        return next((name for name, paths in self.features.items() if self._is_among(file, paths)), None)

    def is_core(self, file: str) -> bool:
        """Return whether a file is of the core, and neither of a feature nor of a place where features meet."""
        is_other = self.feature_of(file) is not None or self._is_among(file, self.meetings)
        return self._is_among(file, self.core) and not is_other

    def room_of(self, file: str) -> str:
        """Name the room that a file is in: a folder inside a wing, or one of the package."""
        *folders, _name = file.split("/")
        return "/".join(folders[: 2 if folders[:1] and folders[0] in self.wings else 1]) or ROOT_ROOM

    def unknown_paths(self, sources: Sources) -> list[str]:
        """List what the table names and is not there."""
        named = [*self.core, *self.meetings, *(path for paths in self.features.values() for path in paths)]
        return [path for path in named if not any(self._is_among(file, (path,)) for file in sources.trees)]

    def _is_among(self, file: str, paths: tuple[str, ...]) -> bool:
        wing, _, inside = file.partition("/")
        from_room = inside if wing in self.wings else file
        return any(from_room.startswith(path) if path.endswith("/") else from_room == path for path in paths)


def pairs(sources: Sources, plan: Plan) -> dict[tuple[str, str], list[str]]:
    """Find the pairs (file of the core or a feature, another feature), each with the names that are taken."""
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for taken in sources.taken:
        feature, own = plan.feature_of(taken.origin), plan.feature_of(taken.file)
        taker = own or (taken.file if plan.is_core(taken.file) else None)
        if feature is not None and taker is not None and own != feature:
            found[taker, feature][taken.name or taken.origin] = None
    return {pair: list(names) for pair, names in sorted(found.items())}


def room_sizes(sources: Sources, plan: Plan) -> dict[str, int]:
    """Count the lines of each room, the largest first."""
    sizes: Counter[str] = Counter()
    for file in sources.trees:
        sizes[plan.room_of(file)] += len((sources.package / file).read_text().splitlines())
    return dict(sizes.most_common())


def circles(sources: Sources, plan: Plan) -> list[list[str]]:
    """List the sets of rooms of which each imports each, directly or through others."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for taken in sources.taken:
        rooms = {plan.room_of(taken.door), plan.room_of(taken.origin)}
        arrows[plan.room_of(taken.file)] |= rooms - {ROOT_ROOM}
    arrows.pop(ROOT_ROOM, None)
    reach = {room: _reached(arrows, room) for room in list(arrows)}
    alike = {tuple(sorted({room} | {other for other in reach[room] if room in reach.get(other, ())})) for room in reach}
    return [list(rooms) for rooms in sorted(alike) if len(rooms) > 1]


def _reached(arrows: dict[str, set[str]], room: str) -> set[str]:
    reached: set[str] = set()
    ahead = [other for other in arrows[room] if other != room]
    while ahead:
        other = ahead.pop()
        if other not in reached:
            reached.add(other)
            ahead += arrows.get(other, ())
    return reached


def main() -> None:
    """Print pairs, rooms and circles of this tree, or of a commit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading.pairs", description=__doc__)
    parser.add_argument("--commit", metavar="COMMIT", help="of this commit, by the table of this tree")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    arguments = parser.parse_args()
    if arguments.commit is None:
        figures = figures_of(Sources(ROOT / "src" / "pagedkv"))
    else:
        with extracted(commit_id(arguments.commit)) as tree:
            figures = figures_of(Sources(tree / "src" / "pagedkv"))
    for line in lines_of(figures):
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


def figures_of(sources: Sources) -> dict[str, Any]:
    """Measure all of it, as JSON has it."""
    plan = Plan.read()
    found = pairs(sources, plan)
    sizes = room_sizes(sources, plan)
    return {
        "core": {f"{file} -> {name}": names for (file, name), names in found.items() if file not in plan.features},
        "features": {f"{one} -> {name}": names for (one, name), names in found.items() if one in plan.features},
        "rooms": {room: round(100 * size / sum(sizes.values()), 1) for room, size in sizes.items()},
        "circles": circles(sources, plan),
        "unknown_paths": plan.unknown_paths(sources),
    }


def lines_of(figures: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    lines = [f"{len(figures['core'])} pairs of a file of the core and a feature:"]
    lines += [f"  {pair}: {', '.join(names)}" for pair, names in figures["core"].items()]
    lines += ["", f"{len(figures['features'])} pairs of a feature and another one:"]
    lines += [f"  {pair}: {', '.join(names)}" for pair, names in figures["features"].items()]
    lines += ["", "rooms, in percent of all lines:"]
    lines += [f"  {share:5.1f} {room}" for room, share in figures["rooms"].items()]
    lines += [
        "",
        f"{len(figures['circles'])} circles of rooms",
        *(f"  {', '.join(rooms)}" for rooms in figures["circles"]),
    ]
    lines += [f"features.toml names what is not there: {path}" for path in figures["unknown_paths"]]
    return lines


if __name__ == "__main__":
    main()
