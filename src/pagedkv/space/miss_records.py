"""Recorded explanations: why each request's hit ended, as it was when the request was admitted.

Owns one record a row, and a ring of the records of earlier sequences. They exist only if
:attr:`SpaceConfig.explain <pagedkv.SpaceConfig>` is set. A row's record stays when the row is freed, and moves into the
ring when the row is given to another sequence, so freeing costs nothing.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.blocks import PoolArrays
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.contract.miss_causes import ORDER, Explanation, number_of
from pagedkv.errors import SequenceError
from pagedkv.space.hits import PrefixHit
from pagedkv.space.loops import Loops
from pagedkv.space.miss_analysis import explain, is_bare
from pagedkv.space.observer import SpaceObserver
from pagedkv.space.state import SpaceState
from pagedkv.tables.block_fates import (
    AGE,
    CAUSE,
    GENERATION,
    GROUP,
    HAS_TOKEN,
    NUM_FIELDS,
    NUM_HIT,
    NUM_TOKENS,
    OF_ROW,
    POSITION,
    TOKEN,
    BookArrays,
    record_miss,
)
from pagedkv.tables.rows import GroupArrays

__all__ = ["ExplanationBook"]

LEAST_PAST: Final = 1024


class MissLoops(Loops):
    """The loop that records why a hit ends."""

    def __init__(self, pool: PoolArrays, group: GroupArrays, extra_keys: ExtraKeyArrays, book: BookArrays) -> None:
        """Set the types of its arguments. O(1)."""
        ids = np.zeros(0, np.int32)
        self.record_miss = self._ready(record_miss, pool, group, extra_keys, ids, ids, 0, 0, ids, book)


class ExplanationBook(SpaceObserver):
    """The explanations of the sequences that have rows, and of the latest earlier ones.

    Attributes:
        arrays: the records.
    """

    def __init__(self, state: SpaceState) -> None:
        """Make empty records, for the rows of a space without sequences."""
        max_sequences = len(state.rows)
        self._state = state
        self.arrays = BookArrays(
            current=np.zeros((max_sequences, NUM_FIELDS), np.int64),
            past=np.zeros((max(LEAST_PAST, max_sequences), NUM_FIELDS), np.int64),
            num_past=np.zeros(1, np.int64),
        )

        first = state.groups[0]
        self._loops = MissLoops(first.pool.arrays, first.arrays, state.extra_keys.arrays, self.arrays)

    # Queries

    def explanation(self, row: int, generation: int) -> Explanation:
        """Return why a sequence's hit ended when it was admitted. O(remembered sequences).

        Raises:
            SequenceError: it was never admitted (it is a fork, or does not exist), or it is forgotten.
        """
        current, past, _ = self.arrays
        if row < len(current) and current[row, GENERATION] == generation:
            return _as_explanation(current[row].tolist())
        places = np.flatnonzero((past[:, OF_ROW] == row) & (past[:, GENERATION] == generation))
        if generation < 1 or not len(places):
            raise SequenceError(
                f"nothing is recorded of generation {generation} of row {row}: it began as a fork, or is none of the "
                f"last {len(past)} sequences that were admitted and freed"
            )
        return _as_explanation(past[places[-1]].tolist())

    # Moments

    def admitting(self, row: int, hit: PrefixHit) -> None:
        """Record why the hit of a prompt ends, before the prompt gets the row.

        If the chain of the one group that keeps whole prefixes ends with the hit, a compiled loop finds out: 0.7 us.
        """
        state, group = self._state, hit.ends_chain_of
        if group is None or hit.loading is not None or hit.tails or hit.num_replayed or not is_bare(state, hit):
            self._put_away(row)
        elif self._loops.record_miss(
            group.pool.arrays,
            group.arrays,
            state.extra_keys.arrays,
            hit.prompt.tokens,
            hit.block_ids[group.index],
            hit.prompt.max_hit_tokens,
            row,
            state.serials,
            self.arrays,
        ):
            return
        explanation = explain(state, hit.prompt, hit, is_thorough=False)
        generation = int(state.serials[row])
        self.arrays.current[row] = _as_record(row, generation, explanation)

    def _put_away(self, row: int) -> None:
        """Move the record of a row, which is about to be given to another sequence, into the ring."""
        current, past, num_past = self.arrays
        if current[row, GENERATION]:
            past[int(num_past[0]) % len(past)] = current[row]
            num_past += 1

    # Auditing

    def check(self) -> None:
        """Check that every record belongs to a sequence that existed, and that no sequence has two."""
        serials = self._state.serials
        records = np.concatenate(self.arrays[:2])
        records = records[records[:, GENERATION] > 0]
        of_rows, generations = records[:, OF_ROW], records[:, GENERATION]
        assert (generations <= serials[of_rows]).all(), "explanations: of a sequence that is still to come"
        pairs = set(zip(of_rows.tolist(), generations.tolist(), strict=True))
        assert len(pairs) == len(records), "explanations: two of one sequence"
        assert (records[:, NUM_HIT] < records[:, NUM_TOKENS]).all(), "explanations: more hit than there was"
        assert (records[:, POSITION] >= 0).all(), "explanations: a position before the prompt"


def _as_record(row: int, generation: int, explanation: Explanation) -> list[int]:
    """Encode an explanation as a record."""
    record = [0] * NUM_FIELDS
    record[GENERATION], record[OF_ROW] = generation, row
    record[NUM_TOKENS], record[NUM_HIT] = explanation.num_tokens, explanation.num_hit_tokens
    record[CAUSE], record[POSITION] = number_of(explanation.cause), explanation.position
    record[GROUP] = 0 if explanation.group is None else explanation.group + 1
    record[HAS_TOKEN], record[TOKEN] = explanation.token_id is not None, explanation.token_id or 0
    record[AGE] = 0 if explanation.age is None else explanation.age + 1
    return record


def _as_explanation(record: list[int]) -> Explanation:
    """Decode a record."""
    return Explanation(
        num_tokens=record[NUM_TOKENS],
        num_hit_tokens=record[NUM_HIT],
        cause=ORDER[record[CAUSE]],
        position=record[POSITION],
        group=record[GROUP] - 1 if record[GROUP] else None,
        token_id=record[TOKEN] if record[HAS_TOKEN] else None,
        age=record[AGE] - 1 if record[AGE] else None,
    )
