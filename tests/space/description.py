"""A space under test as short text: what a failure of the machine shows beside the operations that led to it."""

from collections.abc import Iterable, Iterator

from tests.space.live_model import LiveModel
from tests.space.memory_model import Move, Step
from tests.space.sequence_model import ModelSequence

__all__ = ["describe"]


def describe(model: LiveModel, history: Iterable[str]) -> str:
    """Describe the operations, and what the model expects: rows with tokens and tables, open plan, steps in flight."""
    return "\n".join([*_operations(history), *_sequences(model), *_open_plan(model), *_steps(model)])


def _operations(history: Iterable[str]) -> Iterator[str]:
    yield "The operations, oldest first (answers as far as they came):"
    for number, operation in enumerate(history, 1):
        yield f"  {number:3}. {operation}"


def _sequences(model: LiveModel) -> Iterator[str]:
    yield "The rows, as the model has them:"
    for sequence in model.sequences.values():
        yield f"  {_sequence(sequence)}"
        for group, table in zip(model.groups, sequence.tables, strict=True):
            yield f"      group {group.index} (blocks of {group.block_size}): {model.label(group, sequence)} {table}"


def _sequence(sequence: ModelSequence) -> str:
    num_tokens = len(sequence.tokens)
    parts = [f"row {sequence.row} {sequence.status.value}: {num_tokens} tokens {sequence.tokens}"]
    if sequence.num_accepted < num_tokens:
        parts.append(f"the last {num_tokens - sequence.num_accepted} are drafts")
    if sequence.num_planned < num_tokens:
        parts.append(f"tokens from {sequence.num_planned} on are in no plan yet")
    if sequence.sure_from > sequence.num_planned:
        parts.append(f"before {sequence.sure_from} others may compute them")
    return "; ".join(parts)


def _open_plan(model: LiveModel) -> Iterator[str]:
    yield f"The open plan moves: {_moves(model.open_moves)}"


def _steps(model: LiveModel) -> Iterator[str]:
    for word, steps in (("run, not acknowledged", model.ran), ("planned, not run", model.planned)):
        for step in steps:
            yield f"Step {step.plan.step_id} ({word}): computes {_ranges(step)}; moves {_moves(step.moves)}"


def _ranges(step: Step) -> str:
    return ", ".join(f"row {row} [{start}, {end})" for row, start, end in step.ranges) or "nothing"


def _moves(moves: Iterable[Move]) -> str:
    described = (f"{move.kind} {_place(*move.source)} -> {_place(*move.target)}" for move in moves)
    return ", ".join(described) or "nothing"


def _place(label: str, block: int) -> str:
    return f"{label}:{block}"
