"""Draws steps: planned, acknowledged or failed, one after the other or overlapping."""

from typing import Final

from benchmarks.side_by_side.player import Player
from benchmarks.side_by_side.rows import append_unknown, fill
from pagedkv import AbortedSteps, RecurrentState, StepPlan

__all__ = ["abort", "acknowledge", "mark_computed", "overlap", "plan", "settle"]

MOST_IN_FLIGHT: Final = 4


def plan(player: Player) -> None:
    """Plan the open step, and sometimes read where it writes."""
    if len(player.in_flight) == MOST_IN_FLIGHT:
        acknowledge(player)
    answer = player.call("plan_step")
    if not isinstance(answer, StepPlan):
        return
    player.in_flight.append(answer)
    if player.chance(0.2):
        group = player.random.randrange(len(player.config.groups))
        if not isinstance(player.config.groups[group], RecurrentState):
            player.call("slot_mapping", answer, group)


def acknowledge(player: Player) -> None:
    """Acknowledge the oldest step."""
    if player.in_flight:
        player.call("acknowledge", player.in_flight.popleft().step_id)


def settle(player: Player) -> None:
    """Plan and acknowledge all there is: synchronous scheduling."""
    plan(player)
    while player.in_flight:
        acknowledge(player)


def overlap(player: Player) -> None:
    """Make a round of an overlapped engine: the next step is planned before the last is sampled."""
    plan(player)
    append_unknown(player)
    plan(player)
    fill(player)
    if player.chance(0.5):
        acknowledge(player)


def abort(player: Player) -> None:
    """Let a step in flight fail, and those behind it."""
    if not player.in_flight:
        return
    answer = player.call("abort", player.random.choice(player.in_flight).step_id)
    if not isinstance(answer, AbortedSteps):
        return
    while player.in_flight and player.in_flight[-1].step_id in answer.step_ids:
        player.in_flight.pop()
    player.lose(answer.lost_rows)
    for each in player.sequences.values():  # what the steps were to sample is gone
        each.known = each.known[: player.length(each)]
        each.num_draft = min(each.num_draft, len(each.known))


def mark_computed(player: Player) -> None:
    """Bring the content of some rows from elsewhere."""
    batch = player.some(player.known())
    if batch:
        player.call("mark_computed", [each.row for each in batch])
