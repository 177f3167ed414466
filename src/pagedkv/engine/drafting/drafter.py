"""Drafter: runs the draft model over the tokens of a step, and draws the drafts of the step.

Drafts are sampled like the target's tokens: with the parameters of the row, and with noise from its seed, sample,
position and token (:mod:`~pagedkv.engine.sampling.noise`). So a draft equals the target's token wherever the
scores of both models lead to the same choice. If both models are equal, all drafts are accepted at any temperature.

Drafts stay on the device between passes. The host waits for them once a step, or once a pass if the parameters of a row
depend on earlier tokens (penalties, bad words, minimum lengths).

On a GPU the passes are CUDA graphs, as the target's steps are (:mod:`~pagedkv.engine.captured_passes`). The
metadata of each pass is copied to buffers first, which the graphs of all sizes read.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, final

import numpy as np
import torch

from pagedkv.attention import AttentionBackend, StepMetadata
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.device import PlanExecutor, StepInputs
from pagedkv.engine.captured_passes import CapturedPasses, CaptureState, most_captured, what_prevents_graphs
from pagedkv.engine.drafting.pairing import DraftModel
from pagedkv.engine.drafting.pass_buffers import PassBuffers
from pagedkv.engine.drafting.passes import DraftPass, OpenDrafts
from pagedkv.engine.flat_batch import FlatBatch
from pagedkv.engine.memory_use import MemoryUse
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampled_rows import SampledRow
from pagedkv.engine.sampling import BatchSampler, Place
from pagedkv.engine.sampling.adjusting import features_of
from pagedkv.engine.sampling.sending import sent
from pagedkv.engine.sampling.sequence import Feature
from pagedkv.scheduling import Batch

__all__ = ["Drafted", "Drafter"]

NO_DRAFTS: Final = np.zeros(0, np.int32)
LOOKING_BACK: Final = Feature.PENALTIES | Feature.BANS
"""Features for which scores depend on the tokens before a position, and not on their number alone."""


class Drafted(NamedTuple):
    """A step whose drafts are known.

    Args:
        flat: its tokens, drafts included.
        token_ids: int32 ``[drafts]``, all drafts of the batch, in its order.
    """

    flat: FlatBatch
    token_ids: Int32Array


@final
class Drafter:
    """Proposes tokens with a model of attention layers only, whose groups are in the executor's storage.

    Args:
        draft: the model and its groups.
        executor: storage and tables.
        backend: attention of its layers over that storage.
        vocab_size: columns of its logits.
        max_places: most rows of a step.
        capture_passes: whether passes are replayed as graphs where that is possible.
    """

    def __init__(
        self,
        draft: DraftModel,
        executor: PlanExecutor,
        backend: AttentionBackend,
        vocab_size: int,
        *,
        max_places: int,
        capture_passes: bool = True,
    ) -> None:
        self._device = executor.storage.device
        self._first_group = min(layer.group for layer in draft.groups.attention)
        self._max_places = max_places
        self._sampler = BatchSampler(vocab_size, gives_logprobs=False)
        self._buffers: PassBuffers | None = None  # there where passes are captured
        captured = None
        uncaptured = what_prevents_graphs(draft.groups, self._device, are_wanted=capture_passes)
        if uncaptured is None:
            most = most_captured(executor.tables.max_batched_tokens)
            self._buffers = PassBuffers(executor.tables, self._first_group, max_places=max_places, max_tokens=most)
            captured = CapturedPasses(
                draft.model, self._buffers.metadata_of, self._device, max_tokens=most, num_vocabulary=vocab_size
            )
        self._runner = ModelRunner(
            draft.model, draft.groups, executor, backend, captured=captured, uncaptured=uncaptured
        )

    @property
    def capture_state(self) -> CaptureState:
        """The sizes of passes that are captured as graphs, and the reason where none are."""
        return self._runner.capture_state

    def prepare(self) -> MemoryUse:
        """Measure the model's largest step, and capture its passes: see :meth:`ModelRunner.prepare`."""
        return self._runner.prepare(self._max_places)

    def draft(self, batch: Batch, inputs: StepInputs, flat: FlatBatch, rows: Sequence[SampledRow]) -> Drafted:
        """Compute a step with the draft model, and propose the drafts that are not known.

        To be called within the forward pass of the step, before the target's. Afterwards the keys and values of the
        draft model are written for every position of the plan.

        Args:
            batch: the step; inputs: its tables; flat: its tokens, of which only drafts may be unknown.
            rows: the rows that decode, in the batch's order.

        Cost: one pass over the known tokens of the step, and as many passes of one token a row as the row with the most
        drafts has.
        """
        step, open_drafts = StepMetadata.of(inputs), OpenDrafts.of(batch, flat)
        places = [rows[sequence].sample.place for sequence in open_drafts.sequences.tolist()]
        looks_back = bool(features_of(places) & LOOKING_BACK)
        with torch.inference_mode():
            token_ids = self._sent(flat.token_ids.astype(np.int64))
            drafts = token_ids.new_zeros(len(places), open_drafts.most)
            for number, each in enumerate(open_drafts.passes(batch, flat.token_ids)):
                ids = drafts[self._sent(each.drafting), number - 1] if number else token_ids[self._sent(each.tokens)]
                logits = self._computed(each, step, ids)
                if len(each.asking):
                    requested = [places[row] for row in each.asking.tolist()]
                    asking = self._sent(each.asking)
                    before = drafts[asking, :number].tolist() if looks_back else [[0] * number] * len(requested)
                    drafts[asking, number] = self._drawn(logits, requested, before)
            return _filled_in(batch, flat, open_drafts, drafts.cpu().numpy())

    def _computed(self, each: DraftPass, step: StepMetadata, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute a pass, by a graph if there is one for its size; return the logits of its wanted tokens."""
        if self._buffers is not None and len(each.tokens) <= self._buffers.max_tokens:
            self._buffers.put(each, step)
            logits = self._runner.replay_part(token_ids, each.positions, each.wanted)
            if logits is not None:
                return logits
        part = each.part_of(step, self._first_group)
        return self._runner.compute_part(part, token_ids, self._sent(each.positions), self._sent(each.wanted))

    def _drawn(self, logits: torch.Tensor, places: Sequence[Place], before: Sequence[Sequence[int]]) -> torch.Tensor:
        """Draw the next draft of each row: int64 ``[rows]`` on the device; 0 for a row that no token is allowed in.

        ``before`` has the earlier drafts of each row.
        """
        following = [Place(place.sequence, drafts) for place, drafts in zip(places, before, strict=True)]
        token_ids = self._sampler.begin(logits, following).token_ids
        return token_ids.to(self._device).long().clamp(min=0)

    def _sent(self, numbers: Int64Array) -> torch.Tensor:
        return sent(torch.from_numpy(numbers), self._device)


def _filled_in(batch: Batch, flat: FlatBatch, open_drafts: OpenDrafts, drafts: Int64Array) -> Drafted:
    """Replace the unknown ids of a step by drafts: int64 ``[rows with open drafts, most]``."""
    if batch.drafts is None:
        return Drafted(flat, NO_DRAFTS)
    is_there = np.arange(drafts.shape[1]) < open_drafts.counts[:, None]
    token_ids, all_drafts = flat.token_ids.copy(), batch.drafts.token_ids.copy()
    token_ids[open_drafts.where(open_drafts.at + 1)] = drafts[is_there]
    all_drafts[open_drafts.where(open_drafts.among)] = drafts[is_there]
    return Drafted(replace(flat, token_ids=token_ids, sources=None), all_drafts)
