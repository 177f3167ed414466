"""Bookkeeping between forward passes: the same steps as in a tight loop, with a model's weights passing in between.

A model streams its weights through the processor's caches, so what the space keeps there is gone when the next step is
planned. A tight loop never sees that.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import FULL, batch_of, new_space, prompt, run_step

__all__ = ["OPERATIONS"]

NUMS_OF_ROWS: Final = (1, 32, 256)
NUM_STEPS: Final = 60
NUM_PROMPT_TOKENS: Final = 97
NUM_LAYERS: Final = 8
HIDDEN: Final = 1_024


def decode_between_passes() -> Iterator[Row]:
    """Append, plan and acknowledge a decode step: in a tight loop, and between forward passes of a small model."""
    for num_rows in NUMS_OF_ROWS:
        name = "one sequence" if num_rows == 1 else f"{num_rows} sequences"
        for before, where in ((None, "in a tight loop"), (_forward(num_rows), "between forward passes")):
            yield Row(f"append, plan and acknowledge {name}, {where}", _steps(num_rows, before), "step")


def _steps(num_rows: int, before: Callable[[], object] | None) -> Timing:
    space = new_space(FULL)
    rows = batch_of(space, [NUM_PROMPT_TOKENS] * num_rows)
    tokens = prompt(num_rows)

    def step() -> None:
        space.append(rows, tokens)
        run_step(space)

    timing = timed(step, num_runs=NUM_STEPS, before=before, num_warm_ups=4)
    assert {space.num_tokens(row) for row in rows.tolist()} == {NUM_PROMPT_TOKENS + NUM_STEPS + 4}
    space.check()
    return timing


def _forward(num_rows: int) -> Callable[[], object]:
    """Make a forward pass of matrix products, 32 MiB of weights, as a small decoder has: 8 layers of 1,024."""
    random = np.random.default_rng(0)
    weights = [random.standard_normal((HIDDEN, HIDDEN), np.float32) for _ in range(NUM_LAYERS)]
    hidden = random.standard_normal((num_rows, HIDDEN), np.float32)

    def forward() -> object:
        out = hidden
        for layer in weights:
            out = np.tanh(out @ layer)
        return out

    return forward


OPERATIONS = (decode_between_passes,)
