"""ModelRunner: from a batch to logits: its tokens in one row, the passes of the model over blocks, scores of prompts.

The scheduler lists the decoding sequences, then the chunks of prompts, each in the order of their keys; a plan's ranges
are in the order of rows. Here one order is turned into the other::

    batch       | decoding: one token each, then drafts | chunk | chunk with 2 samples |
    flat row    | row 0 | row 1: a chunk   | row 2 | row 3 ... |            as the plan's ranges
    wanted      the last token of every sequence to be sampled, and its drafts, ascending
    decoding    the places of decoding sequences, for which recurrent layers may round differently than within a prompt
    source      for each row of logits to be sampled, in the batch's order: its index among the wanted tokens

The last sampled token of each row stays in device memory. A step that is launched before the host has the tokens takes
them from there, by row::

    token ids of the step   | 17 | -1 | -1 | 40 41 42 |       as the host has them: two are not known
    sources, a row or -1    | -1 |  3 |  5 | -1 -1 -1 |
    token ids, filled in    | 17 | a  | b  | 40 41 42 |       a, b: what rows 3 and 5 sampled last

Models of attention alone take all tokens of the step in one flat row. Recurrent layers need rows of equal length, and
states that are read before the pass and written after it. Their steps are several passes: one for all sequences that
decode, ``[n, 1]``, and one for each piece of a prompt. Pieces end where states are kept::

    prompt, positions      [ 3 .................. 40 )        states kept every 16 tokens
    passes                 [ 3 .. 16 ) [ 16 .. 32 ) [ 32 .. 40 )
    state read from block    0           0            1        written to block 0, 1, 2

A state is kept after every draft. So with drafts the decoding sequences take several passes, of one token each, as many
as the longest of them has tokens.

Where an indexer selects what is attended to, its scores are of rows too: decoding sequences with equally many drafts
are a pass, ``[n, 1 + drafts]``, and each prompt is one.

Log-probabilities of prompts need the logits of all their tokens, some at a time, so a model's head is called by itself.
What a model does behind its body (a bias, a soft cap, a scale) is its own code and known to no one else. So the body is
watched while it answers a pass, and for each further slice of the vocabulary's work the model is called once more with
a body that answers these hidden states at once::

    pass       ids -> body -> hidden [rows, tokens, width] -> head -> logits of the wanted tokens
    a slice    ids ->         hidden [1, n, width]         -> head -> logits [n, vocabulary]

The logits at a position score the token after it. So a chunk scores tokens from its second one to the first after its
end, and the prompt's last position scores none. Tokens that are hit have no logits, so a request hits no further than
its prompt has been scored.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.attention import AttentionBackend, StepMetadata, Unfolding
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.plan import StepPlan
from pagedkv.device import PlanExecutor, StepInputs
from pagedkv.engine.adapters import Adapters
from pagedkv.engine.captured_passes import CapturedPasses, CaptureState, padded_keys
from pagedkv.engine.compiled_model import COMPILED, CompiledModel, first_tokens
from pagedkv.engine.forward_pass import ForwardPass, PagedCache
from pagedkv.engine.linear_products import LinearProducts
from pagedkv.engine.memory_use import MemoryUse, measured, weights_nbytes
from pagedkv.engine.request import EngineRequest
from pagedkv.engine.sampling import prompt_logprobs
from pagedkv.engine.sampling.sampler import sent
from pagedkv.errors import EngineError
from pagedkv.probe import compat
from pagedkv.probe.compat import IMPLEMENTATION, BorrowedModel
from pagedkv.probe.layers import EngineGroups
from pagedkv.scheduling import UNKNOWN_TOKEN, Batch, Chunk, Drafts


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """A batch as the model computes it; drawn above.

    Args:
        token_ids: int32 ``[tokens]``.
        decoding: int64 ``[sequences]``, places among the plan's ranges.
        num_prompt_tokens: int64 ``[places]``, of each sequence; its later tokens were first computed by decoding.
        wanted: int64 ``[n]``, ascending.
        source: int64 ``[batch.num_samples + batch.num_drafted]``; a sequence's drafts follow it.
        chunk_starts: where each chunk begins in the flat row.
        sources: int64 ``[tokens]``: the row whose last token a token is, which a step in flight samples, or -1; None:
            all tokens are known.
        adapters: the adapter of each sequence, a name or None for none; empty: no sequence has one.
    """

    token_ids: Int32Array
    decoding: Int64Array
    num_prompt_tokens: Int64Array
    wanted: Int64Array
    source: Int64Array
    chunk_starts: tuple[int, ...] = ()
    sources: Int64Array | None = None
    adapters: Sequence[str | None] = ()


def adapters_of(batch: Batch) -> Sequence[str | None]:
    """Return the adapter of each row of a batch, in the order of its plan; empty: no row has one. O(rows)."""
    by_row: dict[int, str | None] = {chunk.row: chunk.request.keys.lora_name for chunk in batch.prefilling}
    for request in () if batch.decoding is None else batch.decoding.requests:
        by_row.update(dict.fromkeys(request.rows, request.keys.lora_name))
    adapters = [by_row[row] for row in batch.plan.compute.rows.tolist()]
    return adapters if any(name is not None for name in adapters) else ()


def flatten(batch: Batch) -> FlatBatch:
    """Lay a batch out in one row. O(tokens), with a Python loop over the chunks alone."""
    compute = batch.plan.compute
    if batch.decoding is not None and batch.drafts is None and not batch.prefilling:
        return _decoding_alone(batch.decoding.rows, compute.rows, batch.decoded_token_ids)
    offsets = compute.offsets()
    token_ids = np.zeros(int(offsets[-1]), np.int32)
    last: list[Int64Array] = []
    places = np.zeros(0, np.int64)
    num_prompt_tokens = np.zeros(len(compute.rows), np.int64)
    chunk_starts: list[int] = []
    if batch.decoding is not None:
        places = np.searchsorted(compute.rows, batch.decoding.rows).astype(np.int64)
        token_ids[offsets[places]] = batch.decoded_token_ids
        last.append(offsets[places].astype(np.int64))
        if batch.drafts is not None:
            last = [_with_drafts(last[0], batch.drafts, token_ids)]
    for chunk in batch.prefilling:
        place = int(np.searchsorted(compute.rows, chunk.row))
        start, stop = int(offsets[place]), int(offsets[place + 1])
        assert stop - start == len(chunk.token_ids), (
            f"row {chunk.row} is to compute {stop - start} tokens, but {len(chunk.token_ids)} were scheduled"
        )
        token_ids[start:stop] = chunk.token_ids
        chunk_starts.append(start)
        num_prompt_tokens[place] = chunk.request.num_prompt_tokens
        last.append(np.full(chunk.num_samples, stop - 1, np.int64))
    sampled = np.concatenate(last) if last else np.zeros(0, np.int64)
    wanted, source = np.unique(sampled, return_inverse=True)
    return FlatBatch(
        token_ids,
        places,
        num_prompt_tokens,
        wanted,
        source.astype(np.int64),
        tuple(chunk_starts),
        _sources(token_ids, np.repeat(compute.rows, np.diff(offsets))),
    )


def _decoding_alone(decoding_rows: Int32Array, plan_rows: Int32Array, token_ids: Int32Array) -> FlatBatch:
    """Lay out a batch that is one token of every row, most steps' kind: places are the rows' order. O(n log n)."""
    places = np.searchsorted(plan_rows, decoding_rows).astype(np.int64)
    flat = np.empty(len(places), np.int32)
    flat[places] = token_ids
    everyone = np.arange(len(places))
    return FlatBatch(flat, places, np.zeros(len(places), np.int64), everyone, places, sources=_sources(flat, plan_rows))


def _sources(token_ids: Int32Array, rows: Int32Array) -> Int64Array | None:
    """Give the row of every unknown token, and -1 for the others; None if all are known. O(tokens)."""
    is_unknown = token_ids == UNKNOWN_TOKEN
    return np.where(is_unknown, rows, -1).astype(np.int64) if is_unknown.any() else None


def _with_drafts(first: Int64Array, drafts: Drafts, token_ids: Int32Array) -> Int64Array:
    """Put drafts behind the tokens that they follow, and list the places of both, a sequence's behind one another."""
    sizes = drafts.counts + 1
    step = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    where: Int64Array = np.repeat(first, sizes) + step
    token_ids[where[step > 0]] = drafts.token_ids
    return where


@final
class LastTokens:
    """The tokens of all rows of a space.

    Args:
        max_rows: rows of the space.
        device: where steps are computed.
        share: copies a tensor of rank 0, which samples, to all ranks, in place; None: there is one rank.
    """

    def __init__(
        self, max_rows: int, device: torch.device, share: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._device = device
        self._share = share

    def keep(self, rows: npt.NDArray[np.integer], token_ids: torch.Tensor) -> None:
        """Store a token for each of these rows; one that has none (below 0) counts as 0. The host does not wait.

        Args:
            rows: integers ``[n]``; where a row is named twice, either of its tokens stays.
            token_ids: integers ``[n]``, on the device or on the host.
        """
        where = sent(torch.from_numpy(rows.astype(np.int64)), self._device)
        self._token_ids[where] = sent(token_ids, self._device).long().clamp(min=0)

    def fill_in(self, token_ids: torch.Tensor, sources: npt.NDArray[np.integer]) -> None:
        """Replace token ids by the last ones of rows. All ranks do so in the same step.

        Args:
            token_ids: int64 ``[n]`` on the device, changed in place.
            sources: integers ``[n]``: the row whose last token replaces it, -1 where the token stays.
        """
        if self._share is not None:
            self._share(self._token_ids)
        rows = sent(torch.from_numpy(sources.astype(np.int64)), self._device)
        token_ids.copy_(torch.where(rows >= 0, self._token_ids[rows.clamp(min=0)], token_ids))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one pass.

    Args:
        tokens: their places in the flat row of the step, ascending.
        places: their sequences; ranges: the positions of each sequence.
        is_batch: whether they are equally many tokens of each sequence; else they are all of one sequence.
        is_prompt: whether recurrent layers compute them as a prompt, even a single token.
        adapter: the adapter that it is computed with; None: none.
    """

    tokens: Int64Array
    places: Sequence[int]
    ranges: Sequence[tuple[int, int]]
    is_batch: bool
    is_prompt: bool
    adapter: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of a row."""
        rows = len(self.places) if self.is_batch else 1
        return rows, len(self.tokens) // rows


class StateBlocks(NamedTuple):
    """Blocks with the states of a pass's sequences, in one group: int32 ``[sequences]`` each."""

    read: torch.Tensor
    written: torch.Tensor


def state_blocks_of(groups: EngineGroups, executor: PlanExecutor, num_places: int) -> dict[int, StateBlocks]:
    """Return the state blocks of whichever step is launched last, by group; null blocks for places without a range."""
    inputs = executor.tables.inputs_of_all(num_places, num_places)
    with_states = dict.fromkeys(place.group for place in groups.states.values())
    return {group: StateBlocks(*inputs.state_blocks(group)) for group in with_states}


def copy_written_states(groups: EngineGroups, executor: PlanExecutor, num_places: int) -> Callable[[], None]:
    """Copy the states that the step launched last will write over; return what puts them back."""
    blocks = state_blocks_of(groups, executor, num_places)
    transfers = executor.transfers
    kept = [
        (place, transfers.gather_states(place.group, place.index, blocks[place.group].written))
        for place in groups.states.values()
    ]

    def put_back() -> None:
        for place, states in kept:
            transfers.scatter_states(place.group, place.index, blocks[place.group].written, states)

    return put_back


@final
class ModelHead:
    """Computes logits of hidden states.

    Args:
        model: the model; its body is not called here.
    """

    def __init__(self, model: compat.Model) -> None:
        self._model = model
        self._body = compat.body(model)
        self._answer: Any = None

    def note(self, answer: object) -> None:
        """Keep the output of the body for a pass."""
        self._answer = answer

    def hidden(self, places: Int64Array) -> torch.Tensor:
        """Return hidden states of tokens of the pass, by their places in it: ``[places, width]``."""
        hidden = getattr(self._answer, "last_hidden_state", None)
        if not isinstance(hidden, torch.Tensor):
            raise EngineError(
                f"the body of {type(self._model).__name__} answers no last_hidden_state: log-probabilities of prompts "
                "and embeddings cannot be told"
            )
        return hidden.flatten(0, 1)[torch.from_numpy(places).to(hidden.device)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, vocabulary]`` of hidden states ``[n, width]``."""
        of_pass, answer = self._answer, copy.copy(self._answer)
        answer.last_hidden_state = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._body.forward = lambda *_, **__: answer
        try:
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._body.forward  # an attribute of this object; the class has its own
            self._answer = of_pass  # this call of the body was noted as well
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class PromptScoring:
    """The tokens of a prompt that a step's chunk scores.

    Args:
        request: the request of the prompt.
        first: place in the flat row of the first token whose logits are used.
        next_ids: the tokens after it and after the following ones.
    """

    request: EngineRequest
    first: int
    next_ids: list[int]

    def take(self, tokens: Int64Array, head: ModelHead) -> None:
        """Add the log-probabilities of a pass to the request. Memory: a bounded number of logits at once.

        Args:
            tokens: int64 ``[n]``, places of the pass's tokens in the flat row, ascending.
            head: computes their logits.
        """
        inside = np.flatnonzero((tokens >= self.first) & (tokens < self.first + len(self.next_ids)))
        if not len(inside):
            return
        next_ids = [self.next_ids[place] for place in (tokens[inside] - self.first).tolist()]
        count = self.request.params.prompt_logprobs or 0
        self.request.add_prompt_logprobs(prompt_logprobs(head.hidden(inside), head.logits, next_ids, count))


@dataclass(frozen=True, slots=True, eq=False)
class PromptPooling:
    """The tokens of a prompt whose hidden states a step's chunk adds to what its request pools.

    Args:
        request: the request of the prompt.
        first: place in the flat row of the first of these tokens.
        num_tokens: their number.
    """

    request: EngineRequest
    first: int
    num_tokens: int

    def take(self, tokens: Int64Array, head: ModelHead) -> None:
        """Add the hidden states of a pass to the request. ``tokens``: as :meth:`PromptScoring.take`."""
        inside = np.flatnonzero((tokens >= self.first) & (tokens < self.first + self.num_tokens))
        if len(inside):
            self.request.pool(head.hidden(inside))


PromptReading: TypeAlias = PromptScoring | PromptPooling
"""What reads the hidden states of a prompt's chunk."""


@final
class ModelRunner:
    """Runs one model over the blocks of one executor.

    Args:
        model: a decoder in evaluation mode; its passes wait for those of other engines with the same model.
        groups: the groups of its layers, and the place of each layer in them.
        executor: storage and tables.
        backend: attention over that storage.
        replays_steps: whether decoded tokens are computed again one by one, as they were decoded: for recurrent layers
            whose results differ within a prompt.
        continues: whether recurrent layers continue a state over several tokens in a pass; else the tokens after a
            state are computed one by one (Mamba).
        captured: graphs of passes, for models of attention alone; None: every pass is run call by call.
        uncaptured: why there are no graphs.
        compiled: the compiled model, for models of attention alone; None: the model runs uncompiled.
        unfoldings: of layers that attend to latents without unfolding them, by number of the call; None: of none.
        add_up: sums a tensor over all ranks, in place, for compiled layers; None: there is one rank.
        share: copies a tensor of rank 0 to all ranks, in place; None: there is one rank.
        adapters: the model's adapters; None: there are none.

    Attributes:
        borrowed: access to the model, which other engines may share.
        products: its linear layers, as they compute in passes that are run call by call.
        last_tokens: the last sampled token of each row.
    """

    def __init__(
        self,
        model: compat.Model,
        groups: EngineGroups,
        executor: PlanExecutor,
        backend: AttentionBackend,
        *,
        replays_steps: bool = False,
        continues: bool = True,
        captured: CapturedPasses | None = None,
        uncaptured: str | None = None,
        compiled: CompiledModel | None = None,
        unfoldings: Mapping[int, Unfolding] | None = None,
        add_up: Callable[[torch.Tensor], object] | None = None,
        share: Callable[[torch.Tensor], object] | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._unfoldings = unfoldings
        self._add_up = add_up
        self._continues = continues
        self._captured = captured
        self._uncaptured = uncaptured
        self._compiled = compiled
        self._replays_steps = replays_steps
        self._model = model
        self._groups = groups
        self._executor = executor
        self._backend = backend
        self._cache = PagedCache(model, groups)
        self.borrowed = BorrowedModel(model)
        self.products = LinearProducts(model)
        self._device = executor.storage.device
        self.last_tokens = LastTokens(executor.storage.config.max_sequences, self._device, share)
        self._decodes_together = not groups.unfolds
        sizes = {executor.tables.block_sizes[place.group] for place in groups.states.values()}
        self._interval = min(sizes, default=0)

    @property
    def capture_state(self) -> CaptureState:
        """The sizes of passes that are captured as graphs, and the reason where none are."""
        return CaptureState(0, self._uncaptured) if self._captured is None else self._captured.state

    @property
    def _implementation(self) -> str:
        return IMPLEMENTATION if self._compiled is None else COMPILED

    def compile(self) -> None:
        """Compile the model, if it is to be; before :meth:`prepare`. No rank waits for another, and nothing is summed.

        Raises Exception: it cannot be compiled, for whatever reason torch has.
        """
        if self._compiled is None:
            return
        tokens = first_tokens(self._executor.tables.max_batched_tokens)
        add_up, self._add_up = self._add_up, None if self._add_up is None else _sum_nothing
        try:
            with torch.inference_mode(), self.borrowed.calling(self._implementation):
                with self._compiled.joining_products():
                    self._compute_padding(tokens, 1)
                self._compute_padding(tokens, 1)
        finally:
            self._add_up = add_up

    def prepare(self, max_places: int) -> MemoryUse:
        """Measure the model's largest step, and capture the largest graph; before the first step.

        Args:
            max_places: most rows of a step.

        Raises:
            ConfigurationError: the GPU has too little memory for a step of ``max_batched_tokens``.
        """
        num_tokens = self._executor.tables.max_batched_tokens
        activations, graphs, free = None, 0, None
        with torch.inference_mode(), self.borrowed.calling(self._implementation):
            if self._device.type == "cuda" and self._groups.varying_shapes is None:
                num_wanted = min(max_places, num_tokens)
                run = partial(self._compute_padding, num_tokens, num_wanted)
                activations = measured(run, num_tokens, self._device)
            if self._captured is not None and not self._groups.sparse:  # whose graphs go by keys of steps as well
                before = torch.cuda.memory_reserved(self._device)
                self._captured.capture_largest(self._decode_pass if self._groups.states else self._flat_pass)
                graphs = torch.cuda.memory_reserved(self._device) - before
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
        kv_nbytes = self._executor.storage.device_nbytes
        return MemoryUse(weights_nbytes(self._model), kv_nbytes, activations, graphs, free)

    def _compute_padding(self, num_tokens: int, num_wanted: int) -> None:
        """Run the model over padding alone, which is written to no slot.

        Its tensors are views of a larger tensor and not inference tensors, as those of graphs: compiled code is
        specialised for both properties.
        """
        step = StepMetadata.of(self._executor.tables.inputs_of_all(1, num_tokens), is_padded=True)
        with torch.inference_mode(mode=False):
            numbers = torch.zeros(3, num_tokens + 1, dtype=torch.int64, device=self._device)
        token_ids, positions, wanted = numbers[:, :num_tokens]
        self._flat_pass(step, token_ids[None], positions[None], wanted[:num_wanted])

    def compute(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        batch: FlatBatch,
        readings: Sequence[PromptReading] = (),
        *,
        is_scored: bool = False,
    ) -> torch.Tensor:
        """Run a step's forward pass; called by :meth:`PlanExecutor.launch`.

        Args:
            plan: the step, with at least one token; inputs: its tables.
            batch: its tokens, and the places of those whose logits are wanted.
            readings: read the hidden states of prompts from its chunks. Such a step is run call by call.
            is_scored: whether rank 0 scores prompts in this step, so that this rank runs it call by call as well.

        Returns:
            float32 ``[wanted, vocabulary]``, which the next step may overwrite.

        Raises:
            EngineError: the model's calls of attention differ from those of the probe.
        """
        positions = plan.compute.positions().astype(np.int64)
        wanted = batch.wanted
        if not (self._groups.in_rows or readings or is_scored or batch.adapters):
            with torch.inference_mode(), self.borrowed.calling(self._implementation):
                return self._compute_flat(inputs, batch, positions)
        with torch.inference_mode(), self.borrowed.calling(IMPLEMENTATION):
            if self._captured is not None and not (readings or is_scored) and _decodes_one_each(batch):
                logits = self._decode_by_graph(self._captured, batch, positions)
                if logits is not None:
                    return logits
            step = StepMetadata.of(inputs)
            token_ids = self._token_ids(batch)
            answers = []
            for piece in self._pieces(plan, batch) if self._groups.in_rows else _flat_pieces(plan, batch):
                mine = np.flatnonzero(np.isin(piece.tokens, wanted))
                blocks = self._state_blocks(piece, inputs)
                logits = self._run(piece, self._part(step, piece), blocks, token_ids, positions, mine, readings)
                answers.append((piece.tokens[mine], logits))
            where = np.concatenate([tokens for tokens, _ in answers])
            order = torch.from_numpy(np.argsort(where)).to(self._device)
            return torch.cat([logits for _, logits in answers])[order].float()

    def compute_part(
        self, step: StepMetadata, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run a model of attention alone over some tokens of a step, call by call; within its launch.

        Args:
            step: metadata of these tokens; token_ids, positions: int64 ``[tokens]``.
            wanted: int64 ``[n]``, places of the tokens whose logits are wanted.

        Returns:
            float32 ``[n, vocabulary]``.

        Raises:
            EngineError: the model's calls of attention differ from those of the probe.
        """
        with torch.inference_mode(), self.borrowed.calling(self._implementation):
            return self._flat_pass(step, token_ids[None], positions[None], wanted).float()

    def replay_part(self, token_ids: torch.Tensor, positions: Int64Array, wanted: Int64Array) -> torch.Tensor | None:
        """Compute some tokens of a step by a graph, whose metadata is in place; within its launch.

        Args:
            token_ids: int64 ``[tokens]``, on the device; positions: int64 ``[tokens]``; wanted: as in
                :meth:`compute_part`.

        Returns:
            float32 ``[n, vocabulary]``, which the next call overwrites; None: there is no graph, compute them call by
            call.
        """
        if self._captured is None:
            return None

        def fill_in(there: torch.Tensor) -> None:
            there.copy_(token_ids)

        unknown = np.zeros(len(positions), np.int32)
        with torch.inference_mode(), self.borrowed.calling(self._implementation):
            return self._captured.compute(self._flat_pass, unknown, positions, wanted, fill_in)

    def _compute_flat(self, inputs: StepInputs, batch: FlatBatch, positions: Int64Array) -> torch.Tensor:
        """Run a model of attention alone, by a graph if there is one for this step."""
        if self._captured is not None:
            fill_in = self._fill_in(batch)
            logits = self._captured.compute(self._flat_pass, batch.token_ids, positions, batch.wanted, fill_in)
            if logits is not None:
                return logits
        where, behind = (torch.from_numpy(each).to(self._device) for each in (positions, batch.wanted))
        return self._flat_pass(StepMetadata.of(inputs), self._token_ids(batch)[None], where[None], behind).float()

    def _fill_in(self, batch: FlatBatch) -> Callable[[torch.Tensor], None] | None:
        """Return what fills in the token ids of a batch that only the device has; None: the host has all."""
        return None if batch.sources is None else partial(self.last_tokens.fill_in, sources=batch.sources)

    def _token_ids(self, batch: FlatBatch) -> torch.Tensor:
        """Copy a step's token ids to the device, and fill in those that only the device has: int64 ``[tokens]``."""
        token_ids = torch.from_numpy(batch.token_ids.astype(np.int64)).to(self._device)
        if batch.sources is not None:
            self.last_tokens.fill_in(token_ids, batch.sources)
        return token_ids

    def _run(
        self,
        piece: _Piece,
        step: StepMetadata,
        blocks: Mapping[int, StateBlocks],
        token_ids: torch.Tensor,
        positions: Int64Array,
        wanted: Int64Array,
        readings: Sequence[PromptReading],
    ) -> torch.Tensor:
        """Run the model over one piece. ``wanted``: places in the piece; ``blocks``: its state blocks, by group."""
        rows, width = piece.shape
        ids = token_ids[torch.from_numpy(piece.tokens).to(self._device)].view(rows, width)
        where = torch.from_numpy(positions[piece.tokens]).to(self._device).view(rows, width)
        forward_pass = self._forward_pass(step, where)
        states = self._read_states(piece, blocks)
        self._cache.begin(forward_pass)
        self._cache.load_states(states, self._groups.states, is_prompt=piece.is_prompt)
        watched = watched_head(self._model) if readings else nullcontext()
        adapted = nullcontext() if self._adapters is None else self._adapters.active(piece.adapter)
        with adapted, watched as head:
            behind = torch.from_numpy(wanted).to(self._device)
            logits = forward_pass.run(self._call_model, ids, where, behind)
            self._write_states(blocks)
            if head is not None:
                for reading in readings:
                    reading.take(piece.tokens, head)
        return logits

    def _flat_pass(
        self, step: StepMetadata, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run a model of attention alone over a flat row of tokens, with all arguments on the device.

        Returns logits in the model's type: ``[wanted, vocabulary]``.
        """
        forward_pass = self._forward_pass(step, positions)
        self._cache.begin(forward_pass)
        call = self._call_model if self._compiled is None else self._compiled.logits
        return forward_pass.run(call, token_ids, positions, wanted)

    def _forward_pass(self, step: StepMetadata, positions: torch.Tensor) -> ForwardPass:
        transfers = self._executor.transfers
        return ForwardPass(self._groups, self._backend, transfers, step, positions, self._unfoldings, self._add_up)

    def _call_model(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        given = {"attention_mask": self._cache.mask} if self._groups.sparse else {}
        with self.products.in_place():
            return compat.forward(
                self._model, wanted, self._cache, input_ids=token_ids, position_ids=positions, **given
            )

    # Rows of one sequence each

    def _decode_by_graph(
        self, captured: CapturedPasses, batch: FlatBatch, positions: Int64Array
    ) -> torch.Tensor | None:
        """Compute one token of each sequence by a graph; None: there is none for this step."""
        num_keys = padded_keys(positions) if self._groups.sparse else 0
        if num_keys is None:
            return None
        fill_in = self._fill_in(batch)
        return captured.compute(self._decode_pass, batch.token_ids, positions, batch.wanted, fill_in, num_keys)

    def _decode_pass(
        self, step: StepMetadata, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run the model over one decoded token of each sequence, ``[1, n]``, with all arguments on the device.

        Places behind the sequences of a step read and write null states. Returns logits in the model's type.
        """
        blocks = state_blocks_of(self._groups, self._executor, step.num_tokens)
        ids, where = token_ids.view(-1, 1), positions.view(-1, 1)
        forward_pass = self._forward_pass(step, where)
        self._cache.begin(forward_pass)
        self._cache.load_states(self._gathered(blocks), self._groups.states, is_prompt=False)
        logits = forward_pass.run(self._call_model, ids, where, wanted)
        self._write_states(blocks)
        return logits

    def _pieces(self, plan: StepPlan, batch: FlatBatch) -> Iterator[_Piece]:
        """Split a step into passes: all decoding sequences, then every prompt, cut where states are kept."""
        offsets = plan.compute.offsets()
        ranges = list(zip(plan.compute.starts.tolist(), plan.compute.ends.tolist(), strict=True))
        decoding = sorted(batch.decoding.tolist())
        adapters = batch.adapters or [None] * len(ranges)
        if not self._groups.states:
            is_one = bool(self._groups.compressed)
            yield from _rows_of_equal_length(offsets, ranges, decoding, adapters, is_one=is_one)
            return
        for adapter in dict.fromkeys(adapters[place] for place in decoding) if self._decodes_together else ():
            together = [place for place in decoding if adapters[place] == adapter]
            longest = max(ranges[place][1] - ranges[place][0] for place in together)
            for step in range(longest):
                mine = [place for place in together if ranges[place][0] + step < ranges[place][1]]
                tokens, starts = offsets[mine].astype(np.int64) + step, [ranges[place][0] + step for place in mine]
                first_ones = [(start, start + 1) for start in starts]
                yield _Piece(tokens, mine, first_ones, is_batch=True, is_prompt=False, adapter=adapter)
        for place, (start, end) in enumerate(ranges):
            if self._decodes_together and place in decoding:
                continue
            first = start
            while first < end:
                stop, is_prompt = self._end_of_piece(first, end, int(batch.num_prompt_tokens[place]))
                if place in decoding:
                    stop, is_prompt = first + 1, False
                tokens = int(offsets[place]) + np.arange(first - start, stop - start)
                own = adapters[place]
                yield _Piece(tokens, [place], [(first, stop)], is_batch=False, is_prompt=is_prompt, adapter=own)
                first = stop

    def _end_of_piece(self, first: int, end: int, num_prompt: int) -> tuple[int, bool]:
        """Return the end of a piece that begins at ``first``, and whether it is part of a prompt."""
        stop = min(end, (first // self._interval + 1) * self._interval)
        if first > 0 and not self._continues:
            return first + 1, False
        if self._replays_steps and first < num_prompt:
            return min(stop, num_prompt), True
        return (first + 1, False) if self._replays_steps else (stop, True)

    def _part(self, step: StepMetadata, piece: _Piece) -> StepMetadata:
        """Select the metadata of a piece's tokens from those of the step."""
        if not self._groups.in_rows and len(piece.places) == step.num_places:
            return step
        part = step.select(torch.tensor(piece.places), torch.from_numpy(piece.tokens))
        return part.with_ranges([start for start, _ in piece.ranges], [stop for _, stop in piece.ranges])

    def _state_blocks(self, piece: _Piece, inputs: StepInputs) -> dict[int, StateBlocks]:
        """Return, by group, the state blocks that each sequence of a piece reads and writes."""
        if not self._groups.states:
            return {}
        places = torch.tensor(piece.places, device=self._device)
        ranges = torch.tensor(piece.ranges, device=self._device)
        return {
            group: StateBlocks(
                inputs.states_behind(group, places, ranges[:, 0] - 1),
                inputs.states_behind(group, places, ranges[:, 1] - 1),
            )
            for group in {place.group: None for place in self._groups.states.values()}
        }

    def _read_states(self, piece: _Piece, blocks: Mapping[int, StateBlocks]) -> dict[int, compat.State]:
        return self._gathered(blocks) if self._groups.states and piece.ranges[0][0] > 0 else {}

    def _gathered(self, blocks: Mapping[int, StateBlocks]) -> dict[int, compat.State]:
        transfers, layers = self._executor.transfers, self._groups.states
        return {
            layer_idx: dict(transfers.gather_states(place.group, place.index, blocks[place.group].read))
            for layer_idx, place in layers.items()
        }

    def _write_states(self, blocks: Mapping[int, StateBlocks]) -> None:
        for layer_idx, place in self._groups.states.items():
            state = self._cache.states(layer_idx)
            self._executor.transfers.scatter_states(place.group, place.index, blocks[place.group].written, state)


def _decodes_one_each(batch: FlatBatch) -> bool:
    """Whether every token of a batch is the only one of a sequence that decodes."""
    return len(batch.decoding) == len(batch.num_prompt_tokens) == len(batch.token_ids)


def _sum_nothing(partial: torch.Tensor) -> None:
    del partial


def _rows_of_equal_length(
    offsets: npt.NDArray[np.integer],
    ranges: Sequence[tuple[int, int]],
    decoding: Sequence[int],
    adapters: Sequence[str | None],
    *,
    is_one: bool,
) -> Iterator[_Piece]:
    """Split a step without states into passes: decoding sequences with equally many drafts together, prompts alone.

    A prompt may hit blocks that another one computes in this step. That one begins before the end of the hit, so
    prompts are computed in the order of their first positions. With ``is_one`` decoding sequences are alone, too.
    """
    together: dict[tuple[object, ...], list[int]] = {}
    for place in decoding:
        alike = (ranges[place][1] - ranges[place][0], place if is_one else 0, adapters[place])
        together.setdefault(alike, []).append(place)
    prompts = sorted({*range(len(ranges))}.difference(decoding), key=lambda place: ranges[place][0])
    for places in (*together.values(), *([place] for place in prompts)):
        tokens = np.concatenate([np.arange(offsets[place], offsets[place + 1], dtype=np.int64) for place in places])
        if len(tokens):
            mine, adapter = [ranges[place] for place in places], adapters[places[0]]
            yield _Piece(tokens, places, mine, is_batch=True, is_prompt=False, adapter=adapter)


def _flat_pieces(plan: StepPlan, batch: FlatBatch) -> Iterator[_Piece]:
    """Split a step of a model of attention alone into a pass for each adapter, of flat rows."""
    compute, offsets = plan.compute, plan.compute.offsets()
    adapters = batch.adapters or [None] * len(compute.rows)
    for adapter in dict.fromkeys(adapters):
        mine = [place for place, name in enumerate(adapters) if name == adapter]
        tokens = np.concatenate([np.arange(offsets[place], offsets[place + 1]) for place in mine])
        ranges = list(zip(compute.starts[mine].tolist(), compute.ends[mine].tolist(), strict=True))
        yield _Piece(tokens, mine, ranges, is_batch=False, is_prompt=False, adapter=adapter)


@contextmanager
def watched_head(model: compat.Model) -> Iterator[ModelHead]:
    """Keep the output of a model's body during a pass, so that its head can be called afterwards."""
    head = ModelHead(model)
    handle = compat.body(model).register_forward_hook(lambda _, __, answer: head.note(answer))
    try:
        yield head
    finally:
        handle.remove()


def readings_of(chunks: Iterable[tuple[EngineRequest, Chunk, int]]) -> list[PromptReading]:
    """Return what reads the hidden states of chunks. ``chunks``: request, chunk, and its start in the flat row."""
    readings: list[PromptReading] = []
    for request, chunk, start in chunks:
        if request.needs_prompt_logprobs:
            first = len(request.prompt_logprobs)  # logits at position p score the token at p + 1
            next_ids = request.prompt_token_ids[first + 1 : chunk.stop + 1].tolist()
            if next_ids:
                readings.append(PromptScoring(request, start + first - chunk.start, next_ids))
        if request.needs_pooling:
            length = len(request.prompt_token_ids)
            first = request.num_pooled if request.params.pooling == "mean" else length - 1
            num_tokens = min(chunk.stop, length) - first
            if num_tokens > 0:
                readings.append(PromptPooling(request, start + first - chunk.start, num_tokens))
    return readings
