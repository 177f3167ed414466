"""Recorded explanations: why each request's hit ended, as it was when the request was admitted.

Owns a record a row, and those of earlier sequences in a ring, which are there only where
:attr:`SpaceConfig.explain <pagedkv.SpaceConfig>` asks for them. A row's record stays when the row is freed, and goes
into the ring when the row is given to another sequence: freeing costs nothing.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.errors import SequenceError
from pagedkv.explanation import ORDER, Explanation, number_of
from pagedkv.tables.explaining import (
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
)

__all__ = ["ExplanationBook"]

LEAST_PAST: Final = 1024


class ExplanationBook:
    """The explanations of the sequences that have rows, and of the latest that had.

    Attributes:
        current: int64 ``[max_sequences, NUM_FIELDS]``, of each row's latest sequence that was admitted.
        past: int64 ``[most, NUM_FIELDS]``, a ring of those before.
        num_past: int64 ``[1]``, how many were ever put there.
    """

    def __init__(self, max_sequences: int) -> None:
        """Begin with nothing."""
        self.current = np.zeros((max_sequences, NUM_FIELDS), np.int64)
        self.past = np.zeros((max(LEAST_PAST, max_sequences), NUM_FIELDS), np.int64)
        self.num_past = np.zeros(1, np.int64)

    # Asking

    def explanation(self, row: int, generation: int) -> Explanation:
        """Tell why a sequence's hit ended when it was admitted. O(sequences that are remembered).

        Raises:
            SequenceError: it was never admitted, since it is a fork or nobody; or it is forgotten.
        """
        if row < len(self.current) and self.current[row, GENERATION] == generation:
            return _as_explanation(self.current[row].tolist())
        places = np.flatnonzero((self.past[:, OF_ROW] == row) & (self.past[:, GENERATION] == generation))
        if generation < 1 or not len(places):
            raise SequenceError(
                f"nothing is recorded of generation {generation} of row {row}: it began as a fork, or is none of the "
                f"last {len(self.past)} sequences that were admitted and freed"
            )
        return _as_explanation(self.past[places[-1]].tolist())

    # Being told

    def put_away(self, row: int) -> None:
        """Keep the record of a row, which is about to be given to another sequence, among those of earlier ones."""
        if self.current[row, GENERATION]:
            self.past[int(self.num_past[0]) % len(self.past)] = self.current[row]
            self.num_past += 1

    def record(self, row: int, generation: int, explanation: Explanation) -> None:
        """Record an explanation."""
        self.current[row] = _as_record(row, generation, explanation)

    # Auditing

    def check(self, serials: npt.NDArray[np.int32]) -> None:
        """Prove that every record is that of a sequence that there was, and each is there once."""
        records = np.concatenate([self.current, self.past])
        records = records[records[:, GENERATION] > 0]
        of_rows, generations = records[:, OF_ROW], records[:, GENERATION]
        assert (generations <= serials[of_rows]).all(), "explanations: of a sequence that is still to come"
        pairs = set(zip(of_rows.tolist(), generations.tolist(), strict=True))
        assert len(pairs) == len(records), "explanations: two of one sequence"
        assert (records[:, NUM_HIT] < records[:, NUM_TOKENS]).all(), "explanations: more hit than there was"
        assert (records[:, POSITION] >= 0).all(), "explanations: a position before the prompt"


def _as_record(row: int, generation: int, explanation: Explanation) -> list[int]:
    """Write an explanation in numbers."""
    record = [0] * NUM_FIELDS
    record[GENERATION], record[OF_ROW] = generation, row
    record[NUM_TOKENS], record[NUM_HIT] = explanation.num_tokens, explanation.num_hit_tokens
    record[CAUSE], record[POSITION] = number_of(explanation.cause), explanation.position
    record[GROUP] = 0 if explanation.group is None else explanation.group + 1
    record[HAS_TOKEN], record[TOKEN] = explanation.token_id is not None, explanation.token_id or 0
    record[AGE] = 0 if explanation.age is None else explanation.age + 1
    return record


def _as_explanation(record: list[int]) -> Explanation:
    """Read an explanation from numbers."""
    return Explanation(
        num_tokens=record[NUM_TOKENS],
        num_hit_tokens=record[NUM_HIT],
        cause=ORDER[record[CAUSE]],
        position=record[POSITION],
        group=record[GROUP] - 1 if record[GROUP] else None,
        token_id=record[TOKEN] if record[HAS_TOKEN] else None,
        age=record[AGE] - 1 if record[AGE] else None,
    )
