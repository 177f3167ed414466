"""All operations, how often each is drawn, and the life that is made of them."""

from collections.abc import Callable
from itertools import accumulate
from typing import Final

from benchmarks.side_by_side import content, questions, rows, steps
from benchmarks.side_by_side.admitting import allocate
from benchmarks.side_by_side.player import LifeOverError, Player
from benchmarks.side_by_side.tally import MET

__all__ = ["WEIGHTS", "play"]

WEIGHTS: Final[dict[Callable[[Player], None], float]] = {
    allocate: 15,
    rows.append: 9,
    rows.decode: 8,
    rows.append_chunk: 4,
    rows.append_unknown: 3,
    rows.fill: 4,
    rows.truncate: 5,
    rows.fork: 5,
    rows.free: 9,
    rows.swap_out: 3,
    rows.swap_in: 6,
    steps.plan: 6,
    steps.acknowledge: 6,
    steps.settle: 5,
    steps.overlap: 3,
    steps.abort: 1,
    steps.mark_computed: 1.5,
    content.advance: 2,
    content.lease: 2,
    content.hold: 2,
    content.release: 2,
    content.load: 2,
    content.finish_load: 2,
    content.forget: 0.4,
    content.withdraw: 0.3,
    content.reset_prefix_cache: 0.15,
    content.invalidate_memory: 0.15,
    content.set_weights_epoch: 0.6,
    questions.ask: 6,
    questions.misuse: 6,
}


def play(player: Player, num_calls: int) -> None:
    """Live a life: so many calls at least; then everything is given back."""
    operations, weights = list(WEIGHTS), list(accumulate(WEIGHTS.values()))
    try:
        while player.num_calls < num_calls:
            (operation,) = player.random.choices(operations, cum_weights=weights)
            operation(player)
        _end(player)
    except LifeOverError:
        return


def _end(player: Player) -> None:
    steps.settle(player)
    for load in player.loads:
        player.call("finish_load", load)
    for ticket in player.tickets:
        player.call("release", ticket)
    player.call("free", list(player.sequences))
    player.call("check")
    statistics = player.space.statistics()
    for pool in (*statistics.pools, *statistics.host_pools):
        player.tally[f"{MET}: evictions"] += pool.num_evictions
        player.tally[f"{MET}: blocks handed out"] += pool.num_acquired
