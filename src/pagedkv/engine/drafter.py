"""A draft model: a smaller decoder that proposes tokens, which a step of the target model verifies.

The *target* is the model that the answers come from. The layers of the draft model are further groups of the same block
space. So one plan and one update of the block tables serve both models, and hits, forks, preemptions and copies on
write apply to both caches together::

    groups      | full   window  | draft:full |       one space, one storage, one plan a step
    target      writes and reads the first ones
    draft model                  the last ones

    step   schedule   k draft slots after the token of each row that decodes; their ids are not known yet
           draft      the draft model computes the tokens of the plan, then the drafts one by one
           target     computes the plan, drafts included
           sample     a token for each draft's position, and one more; the scheduler accepts the drafts that equal them

A draft model cannot change an answer: a draft is accepted only if the target samples the same token
(:mod:`~pagedkv.engine.answering`). So it is refused only if its drafts cannot be compared with the target's tokens, or
cannot be computed.

The draft model passes several times through a step whose drafts are not known. The first pass computes all known
tokens: chunks of prompts, the token that each row decodes, and drafts from other sources. Pass ``n`` computes the
``n``-th draft of each row that has so many. The last draft of a row is computed as well, though no draft follows it. So
the draft model's keys and values are written for every position of the plan, and a prefix that another request hits has
no gaps::

    row, its range       0: [ t ? ? ? )        1: [ p p p p )       2: [ t ? )
    pass 0, its tokens        t                      p p p p              t        then a draft after each t
    pass 1                      ?                                           ?      then a draft in row 0
    pass 2                        ?                                                then a draft in row 0
    pass 3                          ?                                              then no draft

In the metadata of a pass (:class:`PassBuffers`) the rows that it has come first, and padding follows them::

    places    | row 1 | row 4 | row 5 |   -   |   -   |      ranges of the others are empty
    tokens    |   t   |   t   |   t   |   0 ...              slots of the others are -1: they are written nowhere

Drafts are sampled like the target's tokens: with the parameters of the row, and with noise from its seed, sample,
position and token (:mod:`~pagedkv.engine.sampling.drawing`). So a draft equals the target's token wherever the
scores of both models lead to the same choice. If both models are equal, all drafts are accepted at any temperature.

Drafts stay on the device between passes. The host waits for them once a step, or once a pass if the parameters of a row
depend on earlier tokens (penalties, bad words, minimum lengths).

On a GPU the passes are CUDA graphs, as the target's steps are (:mod:`~pagedkv.engine.captured_passes`). The
metadata of each pass is copied to buffers first, which the graphs of all sizes read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, final

import numpy as np
import torch

from pagedkv.attention import AttentionBackend, GroupMetadata, KnownRanges, StepMetadata
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.device import BlockTables, PlanExecutor, StepInputs
from pagedkv.engine.answering import SampledRow
from pagedkv.engine.captured_passes import CapturedPasses, CaptureState, most_captured, what_prevents_graphs
from pagedkv.engine.linear_products import LinearProducts
from pagedkv.engine.memory_use import MemoryUse
from pagedkv.engine.runner import FlatBatch, ModelRunner
from pagedkv.engine.sampling import BatchSampler, Place
from pagedkv.engine.sampling.sampler import features_of, sent
from pagedkv.engine.sampling.sequence import Feature
from pagedkv.errors import ConfigurationError, UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.layers import EngineGroups, LayerPlace
from pagedkv.scheduling import UNKNOWN_TOKEN, Batch

DEFAULT_DRAFT_TOKENS: Final = 4
"""Tokens that a draft model proposes for a sequence in a step, by default."""
POOL_PREFIX: Final = "draft:"


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A model that proposes tokens.

    Args:
        model: the model.
        groups: the groups of its layers, in a space that has the target's groups as well.
    """

    model: compat.Model
    groups: EngineGroups


def require_fit(target: compat.Model, draft: compat.Model, max_tokens: int) -> None:
    """Refuse a draft model that cannot propose tokens of a target. Changes nothing.

    Args:
        target: the model that the answers come from; draft: the model that proposes tokens.
        max_tokens: tokens of the longest sequence.

    Raises:
        ConfigurationError: another device, or fewer positions than ``max_tokens``.
    """
    name = type(draft).__name__
    if draft.device != target.device:
        raise ConfigurationError(
            f"the draft model {name} is on {draft.device}, and {type(target).__name__} on {target.device}: move the "
            f"draft model to {target.device}, since both models share one storage"
        )
    longest = compat.longest_sequence(draft)
    if longest is not None and longest < max_tokens:
        raise ConfigurationError(
            f"the draft model {name} has {longest} positions, and sequences may have {max_tokens} tokens: set "
            "max_tokens, or use another draft model"
        )


def paired(groups: EngineGroups, draft: compat.Model, draft_groups: EngineGroups) -> tuple[EngineGroups, DraftModel]:
    """Append the groups of a draft model to those of its target.

    Args:
        groups: the groups of the target.
        draft: the draft model; draft_groups: its groups, as if it were the only model.

    Returns:
        the groups of both models, in which the target's groups keep their places; and the draft model with its groups
        among them. The names of its pools are prefixed with "draft:".

    Raises:
        UnsupportedModelError: the draft model has recurrent layers, or sparse attention.
        ConfigurationError: it has another vocabulary.
    """
    if draft_groups.num_vocabulary != groups.num_vocabulary:
        raise ConfigurationError(
            f"the draft model {type(draft).__name__} has a vocabulary of {draft_groups.num_vocabulary} tokens, and its "
            f"target one of {groups.num_vocabulary}: use a draft model with the vocabulary of its target"
        )
    if draft_groups.states:
        raise UnsupportedModelError(
            f"the draft model {type(draft).__name__} has recurrent layers, whose states would have to be restored "
            "after each refused draft: use a draft model with attention layers only"
        )
    if draft_groups.sparse:
        raise UnsupportedModelError(
            f"the draft model {type(draft).__name__} has sparse attention, whose sequences need rows of their own: use "
            "a draft model without an indexer"
        )
    first = len(groups.specs)
    specs = tuple(replace(spec, pool=f"{POOL_PREFIX}{spec.pool}") for spec in draft_groups.specs)
    both = replace(groups, specs=groups.specs + specs, shapes=groups.shapes + draft_groups.shapes)
    behind = replace(
        draft_groups,
        specs=both.specs,
        shapes=both.shapes,
        attention=tuple(replace(layer, group=layer.group + first) for layer in draft_groups.attention),
        sources={idx: LayerPlace(place.group + first, place.index) for idx, place in draft_groups.sources.items()},
    )
    return both, DraftModel(draft, behind)


@dataclass(frozen=True, slots=True, eq=False)
class DraftPass:
    """Tokens that go through the draft model together.

    Args:
        tokens: int64 ``[n]``, their places in the flat row of the step, ascending.
        positions: int64 ``[n]``, their positions in their sequences.
        places: int64 ``[p]``, places of the rows in the plan, ascending; starts, ends: int64 ``[p]``, their positions.
        drafting: int64 ``[n]``, the row of each token, as a place in :class:`OpenDrafts`; empty in the first pass.
        wanted: int64 ``[w]``, the tokens that a draft is sampled after, as places in ``tokens``.
        asking: int64 ``[w]``, the row of each wanted token, as a place in :class:`OpenDrafts`.
    """

    tokens: Int64Array
    positions: Int64Array
    places: Int64Array
    starts: Int64Array
    ends: Int64Array
    drafting: Int64Array
    wanted: Int64Array
    asking: Int64Array

    def part_of(self, step: StepMetadata, first_group: int) -> StepMetadata:
        """Cut a step's metadata down to this pass, in the groups from ``first_group`` on.

        The other groups stay as they are; the draft model does not read them. The numbers of the pass go to the device
        in one copy, which the host does not wait for.
        """
        offsets = np.append(0, np.cumsum(self.ends - self.starts))
        columns = (self.places, self.tokens, self.starts, self.ends, offsets)
        there = sent(torch.from_numpy(np.concatenate(columns)), step.groups[0].starts.device)
        places, tokens, *ranges = torch.split(there, [len(column) for column in columns])
        starts, ends, before = (each.int() for each in ranges)
        known = KnownRanges(self.starts.astype(np.int32), self.ends.astype(np.int32))
        parts = [
            GroupMetadata(group.block_tables[places], starts, ends, before, group.slot_mapping[tokens], known=known)
            for group in step.groups[first_group:]
        ]
        return StepMetadata((*step.groups[:first_group], *parts), len(self.places), len(self.tokens))


@dataclass(frozen=True, slots=True, eq=False)
class OpenDrafts:
    """The drafts of a batch whose ids are not known, by row; rows in the order of the plan.

    Args:
        sequences: int64 ``[rows]``, places among the sequences that decode.
        places: int64 ``[rows]``, places among the plan's rows, ascending.
        counts: int64 ``[rows]``, number of drafts of each.
        at: int64 ``[rows]``, place in the flat row of the token before each row's drafts.
        among: int64 ``[rows]``, place of each row's first draft among all drafts of the batch.
    """

    sequences: Int64Array
    places: Int64Array
    counts: Int64Array
    at: Int64Array
    among: Int64Array

    @classmethod
    def of(cls, batch: Batch, flat: FlatBatch) -> "OpenDrafts":
        """Find the open drafts of a batch. O(rows)."""
        if batch.drafts is None:
            return cls(*np.zeros((5, 0), np.int64))
        counts = batch.drafts.counts.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        some = np.flatnonzero(counts)
        some = some[batch.drafts.token_ids[firsts[some]] == UNKNOWN_TOKEN]
        some = some[np.argsort(flat.decoding[some])]
        places = flat.decoding[some]
        at = batch.plan.compute.offsets()[places].astype(np.int64)
        return cls(some, places, counts[some], at, firsts[some])

    @property
    def most(self) -> int:
        """The largest number of drafts of one row."""
        return int(self.counts.max(initial=0))

    def where(self, starts: Int64Array) -> Int64Array:
        """Return the places of all drafts, int64 ``[drafts]``, in an array where each row's begin at ``starts``."""
        within = np.arange(self.counts.sum()) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        listed: Int64Array = np.repeat(starts, self.counts) + within
        return listed

    def passes(self, batch: Batch, token_ids: Int32Array) -> Iterator[DraftPass]:
        """Yield the passes of a step; ``token_ids`` are those of its flat row. O(tokens)."""
        compute = batch.plan.compute
        starts, ends = compute.starts.astype(np.int64), compute.ends.astype(np.int64)
        positions = compute.positions().astype(np.int64)
        known = np.flatnonzero(token_ids != UNKNOWN_TOKEN).astype(np.int64)
        ends[self.places] -= self.counts
        wanted, asking = np.searchsorted(known, self.at).astype(np.int64), np.arange(len(self.places))
        yield DraftPass(known, positions[known], np.arange(len(starts)), starts, ends, asking[:0], wanted, asking)
        for number in range(1, self.most + 1):
            mine = np.flatnonzero(self.counts >= number)
            tokens = self.at[mine] + number
            first = positions[tokens]
            wanted = np.flatnonzero(self.counts[mine] > number)
            yield DraftPass(tokens, first, self.places[mine], first, first + 1, mine, wanted, mine[wanted])


NO_SLOT: Final = -1


@final
class PassBuffers:
    """Tables, ranges and slots of one pass, in the groups of the draft model.

    Args:
        tables: block tables of all groups.
        first_group: the first group of the draft model; its groups are the last ones.
        max_places: most rows of a pass; max_tokens: most tokens of a pass that these buffers hold.

    Memory: a block table of ``max_places`` rows a group.
    """

    def __init__(self, tables: BlockTables, first_group: int, *, max_places: int, max_tokens: int) -> None:
        inputs = tables.inputs_of_all(max_places, max_tokens)
        self._of_step = StepMetadata.of(inputs, is_padded=True)
        self._first_group = first_group
        mine = self._of_step.groups[first_group:]
        self._tables = [torch.zeros_like(group.block_tables) for group in mine]
        self._slots = [torch.full_like(group.slot_mapping, NO_SLOT) for group in mine]
        first = mine[0]
        self._starts = torch.zeros_like(first.starts)
        self._ends = torch.zeros_like(first.seq_lens)
        self._offsets = torch.zeros_like(first.query_start_loc)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a pass that these buffers hold."""
        return self._of_step.num_tokens

    def metadata_of(self, num_tokens: int) -> StepMetadata:
        """Return the metadata of the pass that :meth:`put` copied last, padded to ``num_tokens`` tokens."""
        mine = [
            GroupMetadata(table, self._starts, self._ends, self._offsets, slots[:num_tokens])
            for table, slots in zip(self._tables, self._slots, strict=True)
        ]
        return StepMetadata(
            (*self._of_step.groups[: self._first_group], *mine), self._of_step.num_places, num_tokens, is_padded=True
        )

    def put(self, each: DraftPass, step: StepMetadata) -> None:
        """Copy a pass's part of a step's metadata into the buffers. The host does not wait.

        Cost: O(rows of the pass x width of a table + ``max_places`` + ``max_tokens``) on the device.
        """
        num_rows, num_tokens = len(each.places), len(each.tokens)
        columns = [each.places, each.tokens, *self._padded_ranges(each)]
        there = sent(torch.from_numpy(np.concatenate(columns)), self._tables[0].device)
        places, tokens, *ranges = torch.split(there, [len(column) for column in columns])
        for buffer, values in zip((self._starts, self._ends, self._offsets), ranges, strict=True):
            buffer.copy_(values)
        for table, slots, group in zip(self._tables, self._slots, step.groups[self._first_group :], strict=True):
            torch.index_select(group.block_tables, 0, places, out=table[:num_rows])
            slots.fill_(NO_SLOT)
            torch.index_select(group.slot_mapping, 0, tokens, out=slots[:num_tokens])

    def _padded_ranges(self, each: DraftPass) -> list[Int64Array]:
        """List the starts, ends and token offsets of all places; places after those of the pass have empty ranges."""
        num_places, num_rows = self._of_step.num_places, len(each.places)
        starts, ends = np.zeros(num_places, np.int64), np.zeros(num_places, np.int64)
        starts[:num_rows], ends[:num_rows] = each.starts, each.ends
        return [starts, ends, np.append(0, np.cumsum(ends - starts))]


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

    @property
    def products(self) -> LinearProducts:
        """The linear layers of the draft model."""
        return self._runner.products

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
