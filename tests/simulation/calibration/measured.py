"""Steps as an engine might have taken them: drawn, timed by a cost model that is known, with noise."""

from pathlib import Path

import numpy as np

from pagedkv.simulation.calibration import MeasuredSteps
from pagedkv.simulation.cost import CostModel

__all__ = ["drawn_steps", "write_csv"]


def drawn_steps(model: CostModel, num_steps: int = 400, *, noise: float = 0.0, seed: int = 7) -> MeasuredSteps:
    """Draw steps: every fourth computes a chunk of a prompt beside what decodes, and of the others some decode one."""
    random = np.random.default_rng(seed)
    sequences = random.integers(1, 200, num_steps)
    sequences[1::16] = 1
    context = sequences * random.integers(20, 4000, num_steps)
    chunks = np.where(np.arange(num_steps) % 4 == 0, random.integers(1, 8192, num_steps), 0)
    tokens = sequences + chunks
    pairs = context + chunks * (chunks + 1) // 2
    seconds = [model.step_s(*map(int, step)) for step in zip(tokens, pairs, context, sequences, strict=True)]
    noisy = np.array(seconds) * np.exp(noise * random.standard_normal(num_steps))
    return MeasuredSteps(noisy, tokens, pairs, context, sequences)


def write_csv(path: Path, steps: MeasuredSteps) -> Path:
    """Write all columns."""
    names = ("num_new_tokens", "num_attended_pairs", "num_context_tokens", "num_sequences")
    rows = zip(*(steps.counts(name).tolist() for name in names), steps.seconds.tolist(), strict=True)
    path.write_text("\n".join([",".join((*names, "seconds")), *(",".join(map(repr, row)) for row in rows)]) + "\n")
    return path
