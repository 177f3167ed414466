"""SampledRow: an answer to be sampled, with its drafts, and its lines of the logits.

Logits are in the order of the rows. A row with drafts has a line for its own token, then one after each draft::

    rows      | row 0         | row 1 | row 2, drafts a, b   |
    logits    | behind its    | ...   | behind its token,    |
              | token         |       | behind a, behind b   |
    lines       0               1       2, 3, 4
"""

from collections.abc import Sequence
from typing import NamedTuple

from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.sample import Sample
from pagedkv.engine.sampling import Place
from pagedkv.scheduling import Drafts

__all__ = ["SampledRow", "lines_of", "places_of", "with_drafts"]


class SampledRow(NamedTuple):
    """An answer for which a token is sampled.

    Args:
        request: the request; sample: the answer.
        drafts: draft tokens that the step verifies.
    """

    request: EngineRequest
    sample: Sample
    drafts: tuple[int, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether its answer has not ended."""
        return self.sample.finish_reason is None and not self.request.is_finished


def with_drafts(rows: Sequence[SampledRow], drafts: Drafts) -> list[SampledRow]:
    """Add their drafts to decoding rows."""
    token_ids, counts = drafts.token_ids.tolist(), drafts.counts.tolist()
    drafted, first = [], 0
    for row, count in zip(rows, counts, strict=True):
        drafted.append(row._replace(drafts=tuple(token_ids[first : first + count])) if count else row)
        first += count
    return drafted


def lines_of(rows: Sequence[SampledRow]) -> list[range]:
    """Return the lines of the logits of each row."""
    lines, first = [], 0
    for row in rows:
        lines.append(range(first, first + 1 + len(row.drafts)))
        first = lines[-1].stop
    return lines


def places_of(rows: Sequence[SampledRow]) -> list[Place]:
    """Return, for each line of the logits, its sequence and the drafts before the line."""
    places: list[Place] = []
    for row in rows:
        places.append(row.sample.place)
        if row.drafts:
            places += [Place(row.sample.sequence, row.drafts[:count]) for count in range(1, len(row.drafts) + 1)]
    return places
