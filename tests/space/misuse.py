"""Ways to misuse a block space, each with the error that must answer it."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from pagedkv import BlockSpace
from pagedkv.contract.spec import StepId
from pagedkv.errors import (
    ConfigurationError,
    FreedSequenceError,
    LostSequenceError,
    NoHostPoolError,
    PagedKVError,
    SequenceError,
    StepError,
    SwappedOutError,
    TokenError,
    TooManySequencesError,
    TruncationError,
    UnknownSequenceError,
)
from tests.space.sequence_model import Status
from tests.space.space_model import SpaceModel

__all__ = ["misuses"]

Misuse: TypeAlias = tuple[type[PagedKVError], Callable[[], object]]


def misuses(space: BlockSpace, model: SpaceModel, pick: int) -> list[Misuse]:
    """All misuses that are possible now; ``pick`` chooses among rows."""
    found = [*_of_rows(space, model, pick), *_of_steps(space, model), *_of_prompts(space, model)]
    if model.running:
        found += _of_running(space, model, model.running[pick % len(model.running)].row)
    return found


def _of_rows(space: BlockSpace, model: SpaceModel, pick: int) -> Iterator[Misuse]:
    limit = model.config.max_sequences
    yield UnknownSequenceError, lambda: space.free(limit + pick)
    yield UnknownSequenceError, lambda: space.append([-1], [0])
    yield UnknownSequenceError, lambda: space.free(np.array([2**31], np.int64))
    vacant = [row for row in range(limit) if row not in model.sequences]
    if vacant:
        yield from _of_vacant(space, vacant[pick % len(vacant)])
    for status, error in ((Status.SWAPPED, SwappedOutError), (Status.LOST, LostSequenceError)):
        rows = [sequence.row for sequence in model.sequences.values() if sequence.status is status]
        if rows:
            yield from _of_unavailable(space, model, rows[pick % len(rows)], error)


def _of_vacant(space: BlockSpace, row: int) -> Iterator[Misuse]:
    """A row whose sequence was freed: a second free, or use after free."""
    yield FreedSequenceError, lambda: space.free(row)
    yield FreedSequenceError, lambda: space.append(row, [0])
    yield FreedSequenceError, lambda: space.truncate(row, [1])
    yield FreedSequenceError, lambda: space.replace_drafts(row, [0])
    yield FreedSequenceError, lambda: space.fork(row)
    yield FreedSequenceError, lambda: space.block_ids(row)


def _of_unavailable(space: BlockSpace, model: SpaceModel, row: int, error: type[PagedKVError]) -> Iterator[Misuse]:
    """A row that is swapped out, or lost."""
    yield error, lambda: space.append(row, [0])
    yield error, lambda: space.can_append(row)
    yield error, lambda: space.truncate(row, [1])
    yield error, lambda: space.replace_drafts(row, [0])
    yield error, lambda: space.fork(row)
    yield StepError if model.is_recurrent and model.in_flight else error, lambda: space.mark_computed(row)
    yield error, lambda: space.swap_out(row)
    yield error, lambda: space.computed_block_ids(row)
    yield SequenceError, lambda: space.free([row, row])


def _of_steps(space: BlockSpace, model: SpaceModel) -> Iterator[Misuse]:
    yield StepError, lambda: space.acknowledge(StepId(model.num_plans + 1))
    yield StepError, lambda: space.abort(StepId(model.num_plans + 1))
    yield StepError, lambda: space.abort(StepId(0))
    if len(model.in_flight) > 1:
        yield StepError, lambda: space.acknowledge(model.in_flight[1].plan.step_id)


def _of_prompts(space: BlockSpace, model: SpaceModel) -> Iterator[Misuse]:
    most = model.config.max_tokens
    yield ConfigurationError, lambda: space.shrink(3, run=2)
    yield ConfigurationError, lambda: space.shrink(-1)
    yield ConfigurationError, lambda: space.grow(1, run=0)
    yield ConfigurationError, lambda: space.grow(1 + space.num_absent_blocks())
    yield TokenError, lambda: space.allocate([])
    yield TokenError, lambda: space.allocate([0] * (most + 1))
    yield TokenError, lambda: space.allocate([0] * most, num_lookahead=1)
    yield TokenError, lambda: space.allocate([2**31])
    yield TokenError, lambda: space.can_allocate(np.array([0.5]))
    yield TokenError, lambda: space.match(np.zeros((2, 2), np.int32))
    yield ConfigurationError, lambda: space.allocate([0], num_lookahead=-1)
    yield ConfigurationError, lambda: space.allocate([0], tenant="whom nobody knows")
    yield ConfigurationError, lambda: space.allocate([0] * 12, digests=np.zeros((1, 32), np.uint8))


def _of_running(space: BlockSpace, model: SpaceModel, row: int) -> Iterator[Misuse]:
    num_tokens = len(model.sequences[row].tokens)
    num_drafts = num_tokens - model.sequences[row].num_accepted
    most = model.config.max_tokens
    yield SequenceError, lambda: space.append([row, row], [0, 0])
    yield SequenceError, lambda: space.free([row, row])
    yield TokenError, lambda: space.append([row], [0, 0])
    yield TokenError, lambda: space.append(row, [0], [1, 1])
    yield TokenError, lambda: space.append(row, [], [-1])
    yield TokenError, lambda: space.append(row, [2**31])
    yield ConfigurationError, lambda: space.append(row, [0], num_lookahead=-1)
    yield TokenError, lambda: space.append(row, [0], num_draft=2)
    yield TokenError, lambda: space.append(row, [0], num_draft=[0, 0])
    yield TokenError, lambda: space.append(row, [0], num_draft=[-1])
    yield TokenError, lambda: space.append(row, [0], num_draft=[0.5])
    yield ConfigurationError, lambda: space.append(row, [0], num_draft="0")
    yield TokenError, lambda: space.append(row, [0] * (most + 1 - num_tokens), [most + 1 - num_tokens])
    yield TokenError, lambda: space.can_append(row, [0], num_lookahead=most + 1 - num_tokens)
    yield TokenError, lambda: space.truncate(row, [1, 1])
    yield TruncationError, lambda: space.truncate(row, [0])
    yield TruncationError, lambda: space.truncate(row, [num_tokens + 1])
    yield TokenError, lambda: space.replace_drafts(row, [0] * (num_drafts + 1), [num_drafts + 1])
    yield TokenError, lambda: space.replace_drafts(row, [0], [0])
    yield ConfigurationError, lambda: space.fork(row, 0)
    yield ConfigurationError, lambda: space.fork(row, at=0)
    yield SequenceError, lambda: space.fork(row, at=num_tokens + 1)
    yield SequenceError if model.host_pools else NoHostPoolError, lambda: space.swap_in(row)
    if model.is_recurrent:
        most_drafts = min(group.num_draft_states for group in model.groups if group.is_state)
        yield TokenError, lambda: space.append(row, [0] * (most_drafts + 1), num_draft=most_drafts + 1)
    else:
        yield TooManySequencesError, lambda: space.fork(row, model.num_vacant + 1)
    if not model.host_pools:
        yield NoHostPoolError, lambda: space.swap_out(row)
