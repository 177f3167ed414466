"""Operations that few requests reach: branches, blocks that the open step still computes, refused drafts, short pools.

Part of :mod:`pagedkv.warming.rehearsal`. tests/warming compares it with what random operations reach.
"""

from contextlib import suppress

import numpy as np

from pagedkv.contract.answers import Allocation
from pagedkv.contract.spec import Row, keeps_state
from pagedkv.errors import TokenError, TruncationError
from pagedkv.space import BlockSpace

PROMPT = tuple(range(1, 20))


def step(space: BlockSpace) -> None:
    """Plan a step, map the slots of every group with attention, and acknowledge the step."""
    plan = space.plan_step()
    for group, rule in enumerate(space.config.groups):
        if not keeps_state(rule):
            space.slot_mapping(plan, group)
    space.acknowledge(plan.step_id)


def branch(space: BlockSpace, tenant: str | None) -> None:
    """Branch off inside a block: of tokens that the open step computes, and of computed tokens."""
    row = _allocated(space, PROMPT, tenant)
    children: list[int] = []
    for _ in range(2):
        branch_rows = space.fork(row, 1, at=len(PROMPT) - 2)
        children += branch_rows.tolist() if isinstance(branch_rows, np.ndarray) else []  # else its windows are gone
        step(space)
    space.append(children, [50] * len(children))
    step(space)
    space.free([row, *children])


def share_open_blocks(space: BlockSpace, tenant: str | None) -> None:
    """Write to blocks that other rows hold and the open step computes; swap out and free rows that compute them."""
    first, second = _allocated(space, PROMPT, tenant), _allocated(space, PROMPT, tenant)
    child = space.fork(second, 1)
    space.append(child, [60], num_lookahead=1)
    space.append([first], [61])
    if space.config.num_host_blocks:
        space.swap_out([second])
    space.free([first])
    step(space)
    space.free([int(child[0]), second])


def refuse_drafts(space: BlockSpace, tenant: str | None) -> None:
    """Refuse drafts behind which steps in flight and the open step compute further tokens."""
    row = _allocated(space, PROMPT, tenant)
    space.append([row], None, [3])
    first = space.plan_step()
    space.append([row], None, [4])
    second = space.plan_step()
    with suppress(TokenError):
        space.fill([row], [5] * 9, [9])  # more than its step samples
    space.append([row], None)
    space.fill([row], [5, 6], [2])
    for plan in (first, second):
        space.acknowledge(plan.step_id)
    space.free([row])
    step(space)


def refuse_rolling_back(space: BlockSpace, tenant: str | None) -> None:
    """Roll a row back to a position before its windows, which is refused."""
    row = _allocated(space, PROMPT, tenant)
    step(space)
    with suppress(TruncationError):
        space.truncate([row], [3])
    space.free([row])


def write_over_kept_states(space: BlockSpace) -> None:
    """Grow a row whose last state is kept where the pool of states has no block for a copy."""
    first = space.allocate(PROMPT[:6], prompt=PROMPT[:7])
    assert isinstance(first, Allocation), f"a prompt found no room: {first}"
    step(space)
    rows = [first.row]
    while isinstance(answer := space.allocate((100 + len(rows), 3)), Allocation):
        rows.append(answer.row)
    step(space)
    space.check()
    space.append([first.row], PROMPT[6:7])
    step(space)
    space.free(rows)


def keep_states_inside(space: BlockSpace) -> None:
    """Keep the state at a position inside a chunk, and continue from it."""
    row = _allocated(space, PROMPT, None)
    space.keep_states(row, 6)
    step(space)
    space.free([row])
    space.free([_computed(space, (*PROMPT[:6], 77, 78))])


def continue_in_the_block_itself(space: BlockSpace) -> None:
    """Continue from a hit inside an unreferenced block where the pool has no block for a copy."""
    space.free([_computed(space, PROMPT[:8])])
    _fill_up(space, 0, space.statistics().pools[0].num_cached, (*PROMPT[:6], 77))


def continue_in_the_state_itself(space: BlockSpace) -> None:
    """Continue from an unreferenced kept state where the pool of states has no block for a copy."""
    first = space.allocate(PROMPT[:6], prompt=PROMPT[:7])
    assert isinstance(first, Allocation), f"a prompt found no room: {first}"
    step(space)
    space.free([first.row])
    _fill_up(space, 1, 1, (*PROMPT[:6], 77))


def _fill_up(space: BlockSpace, pool: int, num_left: int, prompt: tuple[int, ...]) -> None:
    """Admit other prompts until a pool has so few free blocks left, and then this one."""
    rows: list[Row] = []
    while space.statistics().pools[pool].num_free > num_left:
        rows.append(_computed(space, (100 + len(rows), 3)))
    space.allocate(prompt)
    step(space)


def _computed(space: BlockSpace, prompt: tuple[int, ...]) -> Row:
    row = _allocated(space, prompt, None)
    step(space)
    return row


def _allocated(space: BlockSpace, prompt: tuple[int, ...], tenant: str | None) -> Row:
    answer = space.allocate(prompt, tenant=tenant)
    assert isinstance(answer, Allocation), f"a prompt of {len(prompt)} tokens found no room: {answer}"
    return answer.row
