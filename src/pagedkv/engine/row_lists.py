"""RowLists: the answers that a batch samples, in the batch's order."""

from collections.abc import Mapping, Sequence
from typing import final

from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.sampled_rows import SampledRow, with_drafts
from pagedkv.scheduling import Batch, Decoding, Request

__all__ = ["RowLists"]


@final
class RowLists:
    """Lists the rows of batches. The list of decoding rows is reused while the same sequences decode.

    Args:
        requests: the requests under way, by the scheduler's record of each.
    """

    def __init__(self, requests: Mapping[Request, EngineRequest]) -> None:
        self._requests = requests
        self._decoding: Decoding | None = None
        self._decoding_rows: tuple[SampledRow, ...] = ()

    def decoding(self, batch: Batch) -> Sequence[SampledRow]:
        """Return the rows of decoding sequences, without their drafts."""
        if batch.decoding is not self._decoding:
            self._decoding = batch.decoding
            requests = [] if batch.decoding is None else [self._requests[each] for each in batch.decoding.requests]
            self._decoding_rows = tuple(SampledRow(request, sample) for request in requests for sample in request.live)
        return self._decoding_rows

    def of(self, batch: Batch) -> Sequence[SampledRow]:
        """Return the rows to be sampled: decoding sequences, with their drafts, then those of complete prompts."""
        decoding = self.decoding(batch)
        rows = decoding if batch.drafts is None else with_drafts(decoding, batch.drafts)
        chunks = [chunk for chunk in batch.prefilling if chunk.num_samples]
        if not chunks:
            return rows
        requests = [self._requests[chunk.request] for chunk in chunks]
        return [*rows, *(SampledRow(request, sample) for request in requests for sample in request.live)]

    def forget(self) -> None:
        """Drop the list of decoding rows, since some answers have ended."""
        self._decoding, self._decoding_rows = None, ()
