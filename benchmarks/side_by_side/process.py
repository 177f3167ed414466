"""The process of one package: plays lives, and prints each call as a line of JSON, and behind each life its tally.

It finds its package through ``PYTHONPATH``, as a trial of the benchmarks does.

    python -m benchmarks.side_by_side.process SOURCE SEED NUM_CALLS [LIFE]
"""

import json
import sys
from pathlib import Path

import pagedkv
from benchmarks.side_by_side.lives import lives
from benchmarks.side_by_side.operations import play
from benchmarks.side_by_side.player import Player

__all__: list[str] = []


def main() -> None:
    """Play with the package of one source folder: all lives, or one of them."""
    source, seed, num_calls, *chosen = sys.argv[1:]
    imported = Path(pagedkv.__file__)
    if not imported.is_relative_to(source):
        sys.exit(f"pagedkv was imported from {imported}, not from {source}")
    for life in lives(int(seed), int(num_calls)):
        if chosen and life.number != int(chosen[0]):
            continue
        player = Player(life, sys.stdout)
        play(player, life.num_calls)
        print(json.dumps({"mix": life.mix.name, "tally": player.tally}))


if __name__ == "__main__":
    main()
