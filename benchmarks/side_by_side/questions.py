"""Draws questions, which change nothing, and misuse, which must be refused and change nothing either."""

from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.side_by_side.admitting import ask_for_match
from benchmarks.side_by_side.player import Options, Player
from pagedkv import RecurrentState

__all__ = ["ask", "misuse"]

Misuse: TypeAlias = tuple[str, tuple[Any, ...], Options]
"""A method, and what it is given."""


def ask(player: Player) -> None:
    """Call one of the questions."""
    player.random.choice(QUESTIONS)(player)


def _match(player: Player) -> None:
    ask_for_match(player, player.prompt())


def _explain(player: Player) -> None:
    tokens, keys = player.prompt()
    bound: Options = {"max_hit_tokens": player.random.randint(0, 12)} if player.chance(0.1) else {}
    player.call("explain", tokens, keys=keys, **bound)


def _explanation(player: Player) -> None:
    """Ask about a row's sequence of before, which may be forgotten."""
    row = player.random.randrange(player.config.max_sequences)
    generation = player.space.generation_or_none(row) or 0
    player.call("explanation", row, max(0, generation - player.random.randint(0, 3)))


def _stored(player: Player) -> None:
    """Read all that is stored in a pool, and one block of it."""
    group = player.random.randrange(len(player.config.groups))
    stored = player.call("stored_blocks", player.config.groups[group].pool)
    if len(stored.digests):
        player.call("stored_block", stored.digests[player.random.randrange(len(stored.digests))], group)


def _tables(player: Player) -> None:
    """Read what kernels read of some rows."""
    rows = [each.row for each in player.some(player.of("running"))]
    group = player.random.randrange(len(player.config.groups))
    if rows and not isinstance(player.config.groups[group], RecurrentState):
        player.call("page_lists", rows, group)
    player.call("num_blocks", rows, group)
    player.call("lengths", rows)


def _check(player: Player) -> None:
    player.call("check")


QUESTIONS: Final = (_match, _explain, _explain, _explanation, _stored, _tables, _check)


def misuse(player: Player) -> None:
    """Do something wrong."""
    row = player.random.randrange(player.config.max_sequences)
    wrong = [*_of_any_row(player, row), *_of_steps(player), *_of_prompts(player)]
    running = player.of("running")
    if running:
        wrong += _of_running(player, player.random.choice(running).row)
    verb, arguments, options = player.random.choice(wrong)
    answer = player.call(verb, *arguments, kind="misuse", **options)
    assert isinstance(answer, Exception), f"{verb}{arguments} {options} was no misuse, but answered {answer}"


def _of_any_row(player: Player, row: int) -> list[Misuse]:
    """Name a row that is not there, was freed, is swapped out or lost; or twice, or no number."""
    limit = player.config.max_sequences
    sequence = player.sequences.get(row)
    wrong: list[Misuse] = [
        ("free", (limit + row,), {}),
        ("append", ([-1], [0]), {}),
        ("free", ([row, row],), {}),
        ("block_ids", (row, len(player.config.groups)), {}),
        ("swap_in", ("a row",), {}),
    ]
    if sequence is None or sequence.status != "running":
        verbs = ("append", "truncate", "fork", "swap_out", "can_append", "computed_block_ids", "mark_computed")
        given = {"append": (row, [0]), "truncate": (row, [1])}
        wrong += [(verb, given.get(verb, (row,)), {}) for verb in verbs]
    if sequence is None:
        wrong += [("free", (row,), {}), ("block_ids", (row,), {}), ("num_tokens", (row,), {})]
    return wrong


def _of_running(player: Player, row: int) -> list[Misuse]:
    length, most = player.space.num_tokens(row), player.config.max_tokens
    return [
        ("append", ([row, row], [0, 0]), {}),
        ("append", ([row], [0, 0]), {}),
        ("append", (row, [], [-1]), {}),
        ("append", (row, [2**31]), {}),
        ("append", (row, [0]), {"num_lookahead": -1}),
        ("append", (row, [0]), {"num_draft": 2}),
        ("append", (row, [0] * (most + 1 - length)), {}),
        ("can_append", (row, [0]), {"num_lookahead": most + 1 - length}),
        ("fill", ([row], [0], [0]), {}),
        ("fill", ([row], [0] * (most + 1)), {}),
        ("truncate", (row, [1, 1]), {}),
        ("truncate", (row, [0]), {}),
        ("truncate", (row, [length + 1]), {}),
        ("fork", (row, 0), {}),
        ("fork", (row,), {"at": length + 1}),
        ("fork", (row, player.config.max_sequences), {}),
        ("free", (row,), {"superseded_by": row}),
        ("free", (row,), {"priority": 3}),
        ("free", (row,), {"num_generated": [1, 2]}),
        ("swap_in", (row,), {}),
    ]


def _of_steps(player: Player) -> list[Misuse]:
    steps = [plan.step_id for plan in player.in_flight]
    never = (steps[-1] if steps else 0) + 1_000_000
    wrong: list[Misuse] = [("acknowledge", (never,), {}), ("abort", (never,), {}), ("abort", (0,), {})]
    return wrong + [("acknowledge", (step,), {}) for step in steps[1:]]


def _of_prompts(player: Player) -> list[Misuse]:
    most = player.config.max_tokens
    blocks = player.config.blocks_by_pool()
    pool = next(iter(blocks))
    return [
        ("allocate", ([],), {}),
        ("allocate", ([0] * (most + 1),), {}),
        ("allocate", ([0] * most,), {"num_lookahead": 1}),
        ("allocate", ([2**31],), {}),
        ("allocate", ([0],), {"num_sequences": 0}),
        ("allocate", ([0],), {"tenant": "whom nobody knows"}),
        ("allocate", ([0, 1],), {"prompt": [1, 0, 2]}),
        ("allocate", ([0] * 12,), {"digests": np.zeros((1, 32), np.uint8)}),
        ("can_allocate", (np.array([0.5]),), {}),
        ("match", (np.zeros((2, 2), np.int32),), {}),
        ("match", ([0, 1],), {"max_hit_tokens": -1}),
        ("load", ([0, 1], 3), {}),
        ("forget", ([0, 1],), {"start": -1}),
        ("lease", ([0, 1], -1.0), {}),
        ("advance", (player.now_s - 1,), {}),
        ("hold", ([0], pool), {}),
        ("hold", ([1], "no such pool"), {}),
        ("withdraw", ([blocks[pool]],), {"pool": pool}),
        ("release", ("no ticket",), {}),
        ("finish_load", ("no load",), {}),
        ("set_weights_epoch", (1.5,), {}),
    ]
