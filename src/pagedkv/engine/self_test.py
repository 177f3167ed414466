"""The engine's judge: the model over blocks against the model by itself, at load and for whole answers.

At load the model over blocks is compared with the model as it is, dense, on the same tokens. Two sequences of different
lengths are computed in two chunks and one token more, their tokens beside one another, and every logit of every
position is compared with a dense pass of each sequence alone. Whatever the probe misread shows here. The lengths go
beyond windows and chunks where these are short enough to be tried. The last token of each sequence is what the model's
own ``generate`` answers, called as a user would, and its logits are compared with the dense ones: a model whose
``generate`` gives it other arguments than the engine does would otherwise be wrong on both sides alike.

In 16 bits, rounding grows with layers and vocabulary; and where experts are chosen, a choice that rounding turns
changes a position by any amount. So where a logit differs by more than the tolerance of the type, more prompts are
tried, and the model is judged by medians over positions against its own rounding: the median difference between its
dense logits by two ways to attend; or, where that leaves the model refused, between those of tokens at once and of the
same tokens one by one, for which a GPU chooses other kernels. Medians are taken part by part, so that what is wrong in
one part is not outvoted by others::

    tokens   0 ....... window ........ half ......... last but one | last
    parts    | chunk 1, below | beyond | chunk 2                   | decoded |

(Random weights of the shape of Qwen3 8B in bfloat16 on an H200, eight seeds: 0.15 to 0.16 of the spread over blocks,
0.19 to 0.20 between two ways to attend, 0.10 to 0.14 between tokens at once and one by one. Of a Llama 8B: 0.07 to
0.12, 0.21 to 0.22, 0.05 to 0.11: by the last alone, one of fourteen models was refused.)

For the message about a model that has failed, two passes of two tokens find out why; they decide nothing. The probe
sees only what goes through the cache and the attention interface. State that a model keeps elsewhere, and arguments
that it ignores, show only in its logits, and these passes look for both.

Whole answers are compared with the model's own dense generation. Two ways to compute the same logits round differently.
So two answers can be compared only up to the first position at which rounding could change the token: where the two
largest logits are closer than :data:`TOLERANCE` of their spread.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch

from pagedkv.attention import backend_for
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.device import BlockTables, KVStorage, PlanExecutor
from pagedkv.engine.runner import FlatBatch, ModelRunner
from pagedkv.errors import UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.compat import BorrowedModel
from pagedkv.probe.layers import EngineGroups
from pagedkv.space import BlockSpace

NEAR: Final = 1e-3
"""Of the logits' spread: equal but for rounding."""
UNKNOWN: Final = "Some layer sees more, or less, than the probe found out; docs/engine.md lists what is supported"


def cause_of_difference(model: compat.Model, groups: EngineGroups) -> str:
    """Describe, in a sentence, what a model does that paged memory cannot follow. Changes nothing in the model.

    Args:
        model: one that answered otherwise; groups: what its layers were found to keep.
    """
    has_cap = any(layer.soft_cap for layer in groups.attention)
    with torch.inference_mode(), BorrowedModel(model).dense(has_cap=has_cap):
        before = dict(_attributes(model))
        near = _logits(model, (0, 1))
        after = dict(_attributes(model))
        far = _logits(model, (3, 9))
    kept = [name for name, tensor in after.items() if before.get(name) is not tensor]
    if kept:
        return (
            f"Its layers keep what they need of earlier tokens in themselves ({kept[0]}), not in the cache: there it "
            "belongs to whichever sequence came last"
        )
    cache = compat.dense_cache(model)
    layers = compat.foreign_layers(cache)
    if layers:
        return (
            f"Its cache keeps more of a sequence than keys and values of tokens, or states ({', '.join(layers)}): that "
            "has no blocks here"
        )
    unseen = compat.windows_of(cache) - {extent for layer in groups.attention for extent in (layer.window, layer.chunk)}
    if unseen:
        return (
            f"Its own cache keeps {min(unseen)} tokens, where its masks show all: dense, what it answers to a prompt "
            "at once is not what it answers token by token"
        )
    if torch.equal(near, far):
        return (
            "It takes no notice of position_ids, and counts the tokens that it is given instead: in a row of several "
            "sequences it places all of them behind one another"
        )
    return UNKNOWN


def cause_of_own_difference(model: compat.Model, groups: EngineGroups, prompt: Sequence[int], own: torch.Tensor) -> str:
    """Describe, in a sentence, what ``generate`` gives a model that the engine does not.

    Args:
        model, groups: as above; prompt: token ids.
        own: the logits behind the prompt by ``generate``: ``[vocabulary]``.
    """
    ids, last = torch.tensor([prompt], device=model.device), torch.tensor([len(prompt) - 1], device=model.device)
    has_cap = any(layer.soft_cap for layer in groups.attention)
    with torch.inference_mode(), BorrowedModel(model).dense(has_cap=has_cap):
        unplaced = compat.forward(model, last, compat.dense_cache(model), input_ids=ids)[0].float()
    if torch.allclose(unplaced, own, atol=NEAR * float(own.std()), rtol=0.0):
        return (
            "generate leaves position_ids out, and then the model counts positions otherwise than from 0: those that "
            "the engine gives would be wrong"
        )
    return "Its prepare_inputs_for_generation changes, adds or drops arguments"


def _logits(model: compat.Model, positions: tuple[int, int]) -> torch.Tensor:
    """Compute two tokens at these positions, dense."""
    ids = torch.tensor([[1, 2]], device=model.device)
    where = torch.tensor([positions], device=model.device)
    wanted = torch.arange(2, device=model.device)
    return compat.forward(model, wanted, compat.dense_cache(model), input_ids=ids, position_ids=where).float().clone()


def _attributes(model: compat.Model) -> Iterator[tuple[str, torch.Tensor]]:
    """List the tensors that modules have as plain attributes: neither weights nor buffers."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value


LAST_CHUNK: Final = 2
LEAST_TOKENS: Final = 11
MOST_EXTENT: Final = 256
"""Windows and chunks up to this long are crossed."""
STEP_SHARE: Final = 0.02
"""Of the tolerance: one step's difference, which a sequence gathers many of."""
TOLERANCES: Final = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of a logit that is rounding, in units of the dense logits' spread."""
ROUNDINGS: Final = 2.0
"""A median difference up to this times the model's own is rounding, too."""
MOST_ROUNDING: Final = 4.0
"""Times the tolerance of a type, above which no median is rounding: some models err by their own cache."""
SHORTER: Final = (0, 4, 2, 6, 1, 3)
"""Tokens by which sequences are shorter than the first one."""
NUM_TRIED: Final = 2
"""Sequences that are tried; all, where these leave open whether a difference is rounding."""
GOING_ON: Final = ". To run it all the same: `EngineConfig.accept_differences`"
NUM_STEPS: Final = 32
"""Most tokens of a sequence that are computed one by one for the model's own rounding."""


class Sizes(NamedTuple):
    """Limits of the engine that is to run: kernels of a GPU are compiled for them, and then once for both.

    Args:
        max_sequences: rows; max_batched_tokens: tokens of a step; max_tokens: of a sequence.
    """

    max_sequences: int = 1
    max_batched_tokens: int = 1
    max_tokens: int = 1


Measure: TypeAlias = Callable[[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]], float]
"""Makes one number of the logits of sequences, computed in two ways, and the part of each position."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of a self-test.

    Args:
        difference: the largest difference of a logit over blocks and dense, in units of the dense logits' spread; in
            16 bits, where that leaves open whether it is rounding, the largest median of a part.
        own_difference: the same between the dense logits and those of the model's own ``generate``.
        step_difference: the same between the dense model's logits of a token within a prompt, and decoded. With some
            recurrent layers it exceeds rounding: decoded tokens must then be computed again as they were decoded.
        tolerance: the largest difference that counts as rounding.
        continues: whether recurrent layers continue a state over more than one token.
        refusal: why the model is refused; None: it is right.
    """

    difference: float
    own_difference: float
    step_difference: float
    tolerance: float
    continues: bool
    refusal: str | None = None

    @property
    def replays_steps(self) -> bool:
        """Whether decoded tokens must be computed again one by one."""
        return self.step_difference > STEP_SHARE * self.tolerance


def self_test(
    model: compat.Model, groups: EngineGroups, sizes: Sizes | None = None, *, refuses: bool = True
) -> SelfTest:
    """Compare the model over blocks with the dense model, and that with the model's own ``generate``.

    Args:
        model: a decoder; groups: what its layers were found to keep.
        sizes: limits of the tables that it is computed with; they are raised to what the test needs. None: to no more.
        refuses: whether to raise where they differ; else the result has the reason.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or the model fails over blocks, or by ``generate``.

    Cost: eight dense passes, half of them by ``generate``, and three over blocks, of a few tokens, or a few more than
    the window. In 16 bits, where rounding is large, three times that, and two passes more for each sequence; where that
    leaves the model refused, up to 32 passes more of a token each.
    """
    sizes = Sizes() if sizes is None else sizes
    tolerance = TOLERANCES.get(model.dtype, max(TOLERANCES.values()))
    tried = [_try(model, groups, number) for number in range(NUM_TRIED)]
    found = _judge(model, groups, sizes, tried, _largest, tolerance)
    if found.refusal is not None and model.dtype in {torch.float16, torch.bfloat16}:
        tried += [_try(model, groups, number) for number in range(NUM_TRIED, len(SHORTER))]
        for rounding in (_of_explicit_attention, _of_single_steps):  # the second takes five times as long
            if found.refusal is not None:
                limit = max(tolerance, min(MOST_ROUNDING * tolerance, ROUNDINGS * rounding(model, groups, tried)))
                found = _judge(model, groups, sizes, tried, _largest_median, limit)
    if found.refusal is not None and refuses:
        raise UnsupportedModelError(found.refusal + GOING_ON)
    step_difference = _step_difference(model, groups, tried[0].tokens, tried[0].dense)
    return replace(found, step_difference=step_difference)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A sequence, and what the model answers to it by itself.

    Args:
        tokens: its tokens; parts: int64 ``[tokens]``, see the drawing above.
        dense: logits of its tokens, called as the engine calls it.
        own: logits of the last of them, by ``generate``; ``[0, vocabulary]`` where the model has none.
    """

    tokens: Int32Array
    parts: torch.Tensor
    dense: torch.Tensor
    own: torch.Tensor


def _try(model: compat.Model, groups: EngineGroups, number: int) -> _Tried:
    """Answer a random prompt by ``generate``, and compute prompt and answer dense. Raises UnsupportedModelError."""
    given = [*(max(layer.window, layer.chunk) for layer in groups.attention), *compat.extents(model)]
    extents = sorted({extent for extent in given if 0 < extent <= MOST_EXTENT})
    longest = min(max(extents, default=0) + LEAST_TOKENS, (compat.longest_sequence(model) or 2**20) - 1)
    length = max(2, longest - SHORTER[number])
    vocabulary = min(compat.vocabulary_size(model), groups.num_vocabulary)
    tokens = np.random.default_rng(number).integers(0, vocabulary, length, np.int32)
    own = torch.zeros(0, groups.num_vocabulary, dtype=torch.float32, device=model.device)
    if model.can_generate():
        with _dense_attention(model, groups):
            try:
                answer, own = compat.dense_generate(model, tokens[:-1].tolist(), 2)
            except Exception as problem:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: its own generate fails for token ids alone, so there is nothing to "
                    f"compare its answers with: {type(problem).__name__}: {problem}"
                ) from problem
        tokens[-1] = answer[0]
    where = torch.arange(length)
    beyond = sum((where >= extent).long() for extent in extents)
    chunk = (where >= length // 2).long() + (where >= length - 1).long()
    return _Tried(tokens, chunk * (len(extents) + 1) + beyond, _dense(model, groups, tokens), own)


def _judge(
    model: compat.Model,
    groups: EngineGroups,
    sizes: Sizes,
    tried: list[_Tried],
    measure: Measure,
    tolerance: float,
) -> SelfTest:
    dense, parts = [each.dense for each in tried], [each.parts for each in tried]
    ends = [len(each.own) for each in tried]
    last = [logits[len(logits) - end :] for logits, end in zip(dense, ends, strict=True)]
    own = measure(last, [each.own for each in tried], [torch.arange(end) for end in ends])
    continues = True
    difference = measure(dense, _paged(model, groups, sizes, tried, continues=True), parts)
    if groups.states and not difference <= tolerance:
        continues = False
        difference = measure(dense, _paged(model, groups, sizes, tried, continues=False), parts)
    refusal, name = None, type(model).__name__
    if not own <= tolerance:
        refusal = (
            f"{name} answers otherwise by its own generate than with tokens, positions and a cache alone: its logits "
            f"differ by {own:.3g} of their spread, where {tolerance:.3g} is rounding. "
            + cause_of_own_difference(model, groups, tried[0].tokens[:-1].tolist(), tried[0].own[0])
        )
    elif not difference <= tolerance:
        refusal = (
            f"{name} answers otherwise over blocks than dense: its logits differ by {difference:.3g} of their spread, "
            f"where {tolerance:.3g} is rounding. " + cause_of_difference(model, groups)
        )
    return SelfTest(difference, own, 0.0, tolerance, continues, refusal)


def _differences(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each sequence the largest difference of a logit at each position, in units of its logits' spread."""
    return [
        (logits - others).abs().amax(dim=1) / logits.std().clamp(min=1e-6)
        for logits, others in zip(one, other, strict=True)
        if len(logits)
    ]


def _largest(one: list[torch.Tensor], other: list[torch.Tensor], parts: list[torch.Tensor]) -> float:
    del parts
    return max((float(each.max()) for each in _differences(one, other)), default=0.0)


def _largest_median(one: list[torch.Tensor], other: list[torch.Tensor], parts: list[torch.Tensor]) -> float:
    """Return the largest median of a part's differences, over all sequences."""
    differences = _differences(one, other)
    if not differences:
        return 0.0
    joined, which = torch.cat(differences), torch.cat(parts).to(differences[0].device)
    medians = torch.stack([joined[which == part].median() for part in which.unique()])
    return float(medians.max())


def _of_explicit_attention(model: compat.Model, groups: EngineGroups, tried: list[_Tried]) -> float:
    """Return the median difference between dense logits by the model's own attention and by explicit scores.

    0 where the model fails with explicit ones.
    """
    try:
        explicit = [_dense(model, groups, each.tokens, is_explicit=True) for each in tried]
    except Exception:  # noqa: BLE001 - a model may do anything, and need not have this attention
        return 0.0
    return _median([each.dense for each in tried], explicit)


def _of_single_steps(model: compat.Model, groups: EngineGroups, tried: list[_Tried]) -> float:
    """Return the median difference between the dense model's logits of tokens at once, and of tokens one by one."""
    at_once, one_by_one = [], []
    for each in tried:
        num_steps = min(NUM_STEPS, len(each.tokens) - 1)
        at_once.append(each.dense[-num_steps:])
        one_by_one.append(_dense(model, groups, each.tokens, num_decoded=num_steps)[-num_steps:])
    return _median(at_once, one_by_one)


def _median(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the median difference of all positions; 0 if it is not finite."""
    median = _largest_median(one, other, [torch.zeros(len(logits)) for logits in one])
    return median if math.isfinite(median) else 0.0


def _step_difference(model: compat.Model, groups: EngineGroups, tokens: Int32Array, dense: torch.Tensor) -> float:
    if not groups.states:
        return 0.0
    whole = _dense(model, groups, tokens, num_decoded=0)
    return float((whole[-1] - dense[-1]).abs().max() / dense.std().clamp(min=1e-6))


def _dense(
    model: compat.Model,
    groups: EngineGroups,
    tokens: Int32Array,
    num_decoded: int = 1,
    *,
    is_explicit: bool = False,
) -> torch.Tensor:
    """Compute as ``generate`` does: a prompt, then what is decoded behind the model's own cache.

    With ``is_explicit`` scores are computed explicitly, whichever attention the model has by itself.

    Some recurrent layers round differently for one token than for many (Nemotron-H: by a hundredth of the spread).
    """
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.device)[None]
    cache = compat.dense_cache(model)
    answers = []
    num_prompt = len(tokens) - num_decoded
    for start, stop in ((0, num_prompt), *((at, at + 1) for at in range(num_prompt, len(tokens)))):
        where = torch.arange(start, stop, device=model.device)
        with torch.inference_mode(), _dense_attention(model, groups, is_explicit=is_explicit):
            answers.append(
                compat.forward(model, where - start, cache, input_ids=ids[:, start:stop], position_ids=where[None])
            )
    return torch.cat(answers).float()


def _dense_attention(
    model: compat.Model, groups: EngineGroups, *, is_explicit: bool = False
) -> AbstractContextManager[None]:
    """Let the model answer by itself, by an attention that is right for it."""
    return BorrowedModel(model).dense(has_cap=is_explicit or any(layer.soft_cap for layer in groups.attention))


def _paged(
    model: compat.Model, groups: EngineGroups, sizes: Sizes, tried: list[_Tried], *, continues: bool
) -> list[torch.Tensor]:
    """Compute over blocks. Raises UnsupportedModelError."""
    try:
        return _over_blocks(model, groups, sizes, [each.tokens for each in tried], continues=continues)
    except Exception as problem:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails over blocks: {type(problem).__name__}: {problem}. It may need its cache in "
            "another form; docs/engine.md lists what is supported"
        ) from problem


def _over_blocks(
    model: compat.Model, groups: EngineGroups, sizes: Sizes, sequences: list[Int32Array], *, continues: bool
) -> list[torch.Tensor]:
    num_tokens = sum(map(len, sequences))
    max_sequences = max(len(SHORTER), sizes.max_sequences)
    max_batched_tokens = max(len(SHORTER) * max(map(len, sequences)), sizes.max_batched_tokens)
    max_tokens = max(num_tokens, sizes.max_tokens)
    config = SpaceConfig(
        groups.specs,
        {spec.pool: 4 + 2 * len(sequences) * (2 + num_tokens // spec.block_size) for spec in groups.specs},
        max_sequences=max_sequences,
        max_tokens=max_tokens,
        watermark=0.0,
        prefix_caching=False,
        in_order=True,
        explain=True,  # so that it runs the loops that serve requests, which are compiled by now
    )
    space, storage = BlockSpace(config), KVStorage(config, groups.shapes, model.device)
    tables = BlockTables(config, max_batched_tokens=max_batched_tokens, device=model.device)
    executor = PlanExecutor(storage, tables, zero_new_blocks=False)
    backend = backend_for(
        storage,
        groups.attention,
        max_places=max_sequences,
        max_tokens=max_batched_tokens,
        max_length=max_tokens,
        query_dtype=model.dtype,
    )
    runner = ModelRunner(model, groups, executor, backend, continues=continues)
    for pool in storage.pools.values():
        pool.device_bytes[pool.block_nbytes :] = 255  # NaN: what is read without being written shows
    cuts = [[0, len(tokens) // 2, len(tokens) - 1, len(tokens)] for tokens in sequences]
    answers: list[list[torch.Tensor]] = [[] for _ in sequences]
    for chunk in range(LAST_CHUNK + 1):
        parts = [tokens[cut[chunk] : cut[chunk + 1]] for tokens, cut in zip(sequences, cuts, strict=True)]
        if chunk == 0:
            for tokens in parts:
                space.allocate(tokens)
        else:
            space.append(list(range(len(parts))), np.concatenate(parts), [len(tokens) for tokens in parts])
        plan = space.plan_step()
        places = np.arange(len(parts)) if chunk == LAST_CHUNK else np.zeros(0, np.int64)
        every = np.arange(plan.compute.num_tokens)
        batch = FlatBatch(np.concatenate(parts), places, np.full(len(parts), num_tokens), every, every)
        logits = executor.launch(plan, partial(runner.compute, plan, batch=batch))
        space.acknowledge(plan.step_id)
        executor.done()
        for answer, part in zip(answers, torch.split(logits, [len(tokens) for tokens in parts]), strict=True):
            answer.append(part)
    return [torch.cat(answer) for answer in answers]


TOLERANCE: Final = 1e-4
"""Of the standard deviation of a position's logits; float32."""


@dataclass(frozen=True, slots=True)
class DenseAnswer:
    """The answer of dense generation.

    Args:
        token_ids: the tokens.
        num_certain: tokens before the first that rounding could change.
    """

    token_ids: tuple[int, ...]
    num_certain: int


def ask_dense(model: compat.Model, groups: EngineGroups, prompt_token_ids: Sequence[int], num_new: int) -> DenseAnswer:
    """Generate the most likely tokens by a model's own ``generate``, without end tokens.

    Args:
        model: the model.
        groups: what its layers keep, from which their soft caps are read.
        prompt_token_ids: at least one.
        num_new: number of tokens, at least one.
    """
    has_cap = any(layer.soft_cap for layer in groups.attention)
    with BorrowedModel(model).dense(has_cap=has_cap):
        token_ids, logits = compat.dense_generate(model, prompt_token_ids, num_new)
    top = logits.topk(2, dim=1).values
    is_close = (top[:, 0] - top[:, 1] < TOLERANCE * logits.std(dim=1)).tolist()
    return DenseAnswer(tuple(token_ids), is_close.index(True) if True in is_close else len(is_close))
