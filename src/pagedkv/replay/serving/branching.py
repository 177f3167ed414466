"""Several sequences of one prompt: forks into samples, and the replacement of beams.

Both are nothing but forks and frees of the block space; which beam continues which is drawn here.
"""

from collections import Counter

import numpy as np

from pagedkv.replay.serving.job import Job
from pagedkv.space import BlockSpace

__all__ = ["BeamParents", "fork_sequences", "replace_beams"]


class BeamParents:
    """Draws which beam each new beam continues: independently, each with equal probability.

    In population genetics this is the Wright-Fisher process (Fisher 1930; Wright 1931): going back in time, any two
    of k beams have a common ancestor k tokens ago in the mean. Each request draws from a generator of its own.

    Args:
        seed: of the whole replay.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[int, np.random.Generator] = {}
        self._drawn_for: dict[int, int] = {}

    def draw_once(self, job: Job) -> list[int] | None:
        """Draw the parent of each new beam, as positions among the old ones; None if that was done for this token."""
        if self._drawn_for.get(job.number) == job.num_produced:
            return None
        self._drawn_for[job.number] = job.num_produced
        generator = self._generators.get(job.number)
        if generator is None:
            generator = self._generators[job.number] = np.random.default_rng((self._seed, job.number))
        parents: list[int] = generator.integers(job.num_sequences, size=job.num_sequences).tolist()
        return parents

    def forget(self, job: Job) -> None:
        """Drop what is known of a request that is over, or begins again."""
        self._generators.pop(job.number, None)
        self._drawn_for.pop(job.number, None)


def fork_sequences(space: BlockSpace, job: Job) -> None:
    """Fork the sequence of a computed prompt into all that the request wants."""
    if job.num_sequences > len(job.rows):
        job.rows += space.fork(job.rows[0], job.num_sequences - len(job.rows)).tolist()


def replace_beams(space: BlockSpace, job: Job, parents: list[int]) -> None:
    """Let each new beam continue its parent: beams without children are freed, others forked.

    A parent's first child keeps its row.
    """
    num_children = Counter(parents)
    childless = [row for beam, row in enumerate(job.rows) if beam not in num_children]
    if childless:
        space.free(childless)
    rows_of = {
        beam: [row, *(space.fork(row, num_children[beam] - 1).tolist() if num_children[beam] > 1 else [])]
        for beam, row in enumerate(job.rows)
        if beam in num_children
    }
    job.rows = [rows_of[parent].pop(0) for parent in parents]
