"""Beam search: every step forks the beams that go on, frees those that do not, and copies one block a write.

    python examples/beam_search.py

A toy model scores tokens by a beam's whole context, which it reads back from the memory that the plans describe. So the
search proves that beams which share blocks never see each other's tokens.
"""

import numpy as np
import numpy.typing as npt

from pagedkv import BlockSpace, FullAttention, Shortage, SpaceConfig, StepPlan

BLOCK, VOCABULARY, WIDTH = 4, 50, 4


def log_probabilities(context: list[int]) -> npt.NDArray[np.float64]:
    """Stand in for a model: scores that depend on every token of the context and on their order."""
    seed = sum((place + 1) * (token + 1) for place, token in enumerate(context))
    scores = np.random.default_rng(seed).normal(size=VOCABULARY)
    normalized: npt.NDArray[np.float64] = scores - np.log(np.exp(scores).sum())
    return normalized


class BeamSearch:
    """The beams of one prompt: their rows, tokens and scores, best first."""

    def __init__(self, prompt: list[int]) -> None:
        self.space = BlockSpace(SpaceConfig((FullAttention(block_size=BLOCK),), num_blocks=200, max_tokens=256))
        self.kv = np.full((200, BLOCK), -1)
        self.num_copies = 0
        first = self.space.allocate(prompt)
        assert not isinstance(first, Shortage)
        self.rows, self.texts, self.scores = [int(first.row)], [prompt], np.zeros(1)
        self._run()

    def step(self) -> None:
        """Extend every beam by all tokens, and keep the best ``WIDTH`` of all."""
        totals = np.stack([log_probabilities(self._read(row)) for row in self.rows]) + self.scores[:, None]
        best = np.argsort(-totals, axis=None, kind="stable")[:WIDTH]
        parents, tokens = (part.tolist() for part in np.divmod(best, VOCABULARY))
        self.scores = totals.flat[best]
        self.texts = [[*self.texts[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        self.rows = self._reorder(parents)
        assert self.space.append(self.rows, tokens) is None, "the pool is large enough"
        self._run()

    def _reorder(self, parents: list[int]) -> list[int]:
        """Fork first, then free, so that no block is given up which a beam still needs."""
        chosen: list[int] = []
        for parent in parents:
            row = self.rows[parent]
            chosen.append(int(self.space.fork(row)[0]) if row in chosen else row)
        self.space.free([row for row in self.rows if row not in chosen])
        return chosen

    def _run(self) -> None:
        """Be the device: copies, then what the step computes."""
        plan: StepPlan = self.space.plan_step()
        for moves in plan.copies:
            self.kv[moves.dst_ids] = self.kv[moves.src_ids]
            self.num_copies += len(moves.src_ids)
        text_of = dict(zip(self.rows, self.texts, strict=True))
        compute = plan.compute
        for row, start, end in zip(compute.rows.tolist(), compute.starts.tolist(), compute.ends.tolist(), strict=True):
            where, table = np.arange(start, end), np.array(self.space.block_ids(row))
            self.kv[table[where // BLOCK], where % BLOCK] = text_of[row][start:end]
        self.space.acknowledge(plan.step_id)

    def _read(self, row: int) -> list[int]:
        where, table = np.arange(self.space.num_tokens(row)), np.array(self.space.block_ids(row))
        context: list[int] = self.kv[table[where // BLOCK], where % BLOCK].tolist()
        return context


def without_cache(prompt: list[int], num_steps: int) -> list[int]:
    """Find the best text by the same search over plain lists."""
    beams = [(0.0, prompt)]
    for _ in range(num_steps):
        totals = np.stack([log_probabilities(text) + score for score, text in beams])
        best = np.argsort(-totals, axis=None, kind="stable")[:WIDTH]
        beams = [(float(totals.flat[at]), [*beams[at // VOCABULARY][1], int(at % VOCABULARY)]) for at in best]
    return beams[0][1]


def main() -> None:
    """Search, and compare the best text with that of a search without a cache."""
    prompt, num_steps = list(range(30)), 40
    search = BeamSearch(prompt)
    for _ in range(num_steps):
        search.step()
    assert search.texts[0] == without_cache(prompt, num_steps)
    held = search.space.num_live_blocks()
    apart = WIDTH * -(-(len(prompt) + num_steps) // BLOCK)
    print(f"{WIDTH} beams, {num_steps} steps: {held} blocks held, {apart} without sharing; ", end="")
    print(f"{search.num_copies} blocks copied on write; the best text is right")


if __name__ == "__main__":
    main()
