"""The self-test at load: the model over blocks against the model as it is, dense, on the same tokens.

Two sequences of different lengths are computed in two chunks and one token more, their tokens beside one another, and
every logit of every position is compared with a dense pass of each sequence alone. Whatever the probe misread shows
here. The lengths go beyond windows and chunks where these are short enough to be tried.

In 16 bits, rounding grows with layers and vocabulary. Where the difference is above the tolerance of the type, it is
compared with the model's own rounding: the difference between its dense logits of a prompt and of the same tokens one
by one, for which a GPU chooses other kernels. (Random weights of an 8B Llama in bfloat16 on an H200: 0.19 of the spread
over blocks, 0.15 by the model's own rounding, 0.30 between dense bfloat16 and float32.)
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from pagedkv.attention import backend_for
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.errors import UnsupportedModelError
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.device import BlockTables, KVStorage, PlanExecutor
from pagedkv.engine import compat
from pagedkv.engine.borrowing import BorrowedModel
from pagedkv.engine.diagnosing import cause_of_difference
from pagedkv.engine.flat_batch import FlatBatch
from pagedkv.engine.grouping import EngineGroups
from pagedkv.engine.runner import ModelRunner
from pagedkv.space import BlockSpace

__all__ = ["SelfTest", "self_test"]

LAST_CHUNK: Final = 2
LEAST_TOKENS: Final = 11
MOST_EXTENT: Final = 256
"""Windows and chunks up to this long are crossed."""
STEP_SHARE: Final = 0.02
"""Of the tolerance: one step's difference, which a sequence gathers many of."""
TOLERANCES: Final = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of a logit that is rounding, in units of the dense logits' spread."""
ROUNDINGS: Final = 2.0
"""A difference up to this times the model's own rounding is rounding, too."""
MOST_ROUNDING: Final = 4.0
"""Times the tolerance of a type, above which no difference is rounding: some models err by their own cache."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of a self-test.

    Args:
        difference: the largest difference of a logit over blocks and dense, in units of the dense logits' spread.
        step_difference: the same between the dense model's logits of a token within a prompt, and decoded. With some
            recurrent layers it exceeds rounding: decoded tokens must then be computed again as they were decoded.
        tolerance: the largest difference that counts as rounding.
        continues: whether recurrent layers continue a state over more than one token.
    """

    difference: float
    step_difference: float
    tolerance: float
    continues: bool

    @property
    def replays_steps(self) -> bool:
        """Whether decoded tokens must be computed again one by one."""
        return self.step_difference > STEP_SHARE * self.tolerance


def self_test(model: compat.Model, groups: EngineGroups) -> SelfTest:
    """Compare the model over blocks with the dense model.

    Raises:
        UnsupportedModelError: the two differ by more than rounding, or the model fails over blocks.

    Cost: two dense passes, and three over blocks, of a few tokens, or a few more than the window; a pass for each token
    where rounding is large.
    """
    extents = [*(max(layer.window, layer.chunk) for layer in groups.attention), *compat.extents(model)]
    longest = max([extent for extent in extents if extent <= MOST_EXTENT], default=0)
    length = min(longest + LEAST_TOKENS, (compat.longest_sequence(model) or 2**20) - 1)
    generator = np.random.default_rng(0)
    vocabulary = compat.vocabulary_size(model)
    sequences = [generator.integers(0, vocabulary, count, np.int32) for count in (length, length - 4)]
    tolerance = TOLERANCES.get(model.dtype, max(TOLERANCES.values()))
    dense = [_dense(model, groups, tokens) for tokens in sequences]
    difference = _difference(dense, _paged(model, groups, sequences, continues=True))
    continues = difference <= tolerance or not groups.states
    if not continues:
        difference = _difference(dense, _paged(model, groups, sequences, continues=False))
    if tolerance < difference <= MOST_ROUNDING * tolerance and model.dtype != torch.float32 and not groups.states:
        tolerance = max(tolerance, ROUNDINGS * _own_rounding(model, groups, sequences, dense))
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} answers otherwise over blocks than dense: its logits differ by {difference:.3g} "
            f"of their spread, where {tolerance:g} is rounding. " + cause_of_difference(model, groups)
        )
    step_difference = _step_difference(model, groups, sequences[0], dense[0])
    return SelfTest(difference, step_difference, tolerance, continues=continues)


def _difference(dense: list[torch.Tensor], paged: list[torch.Tensor]) -> float:
    pairs = zip(dense, paged, strict=True)
    return max(float((one - other).abs().max() / one.std().clamp(min=1e-6)) for one, other in pairs)


def _own_rounding(
    model: compat.Model, groups: EngineGroups, sequences: list[Int32Array], dense: list[torch.Tensor]
) -> float:
    """Return the difference between the dense model's logits of prompts, and of their tokens one by one."""
    return _difference(dense, [_dense(model, groups, tokens, num_decoded=len(tokens) - 1) for tokens in sequences])


def _step_difference(model: compat.Model, groups: EngineGroups, tokens: Int32Array, dense: torch.Tensor) -> float:
    if not groups.states:
        return 0.0
    whole = _dense(model, groups, tokens, num_decoded=0)
    return float((whole[-1] - dense[-1]).abs().max() / dense.std().clamp(min=1e-6))


def _dense(model: compat.Model, groups: EngineGroups, tokens: Int32Array, num_decoded: int = 1) -> torch.Tensor:
    """Compute as ``generate`` does: a prompt, then what is decoded behind the model's own cache.

    Some recurrent layers round differently for one token than for many (Nemotron-H: by a hundredth of the spread).
    """
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.device)[None]
    cache = compat.dense_cache(model)
    answers = []
    num_prompt = len(tokens) - num_decoded
    borrowed, has_cap = BorrowedModel(model), any(layer.soft_cap for layer in groups.attention)
    for start, stop in ((0, num_prompt), *((at, at + 1) for at in range(num_prompt, len(tokens)))):
        where = torch.arange(start, stop, device=model.device)
        inputs = {"input_ids": ids[:, start:stop], "position_ids": where[None], "past_key_values": cache}
        with torch.inference_mode(), borrowed.dense(has_cap=has_cap):
            answers.append(compat.forward(model, where - start, **inputs))
    return torch.cat(answers)


def _paged(
    model: compat.Model, groups: EngineGroups, sequences: list[Int32Array], *, continues: bool
) -> list[torch.Tensor]:
    """Compute over blocks. Raises UnsupportedModelError."""
    try:
        return _over_blocks(model, groups, sequences, continues=continues)
    except Exception as problem:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails over blocks: {type(problem).__name__}: {problem}. It may need its cache in "
            "another form; docs/engine.md lists what is supported"
        ) from problem


def _over_blocks(
    model: compat.Model, groups: EngineGroups, sequences: list[Int32Array], *, continues: bool
) -> list[torch.Tensor]:
    num_tokens = sum(map(len, sequences))
    config = SpaceConfig(
        groups.specs,
        {spec.pool: 4 + 2 * len(sequences) * (2 + num_tokens // spec.block_size) for spec in groups.specs},
        max_sequences=len(sequences),
        max_tokens=num_tokens,
        watermark=0.0,
        prefix_caching=False,
        in_order=True,
        explain=True,  # so that it runs the loops that serve requests, which are compiled by now
    )
    space, storage = BlockSpace(config), KVStorage(config, groups.shapes, model.device)
    tables = BlockTables(config, max_batched_tokens=num_tokens, device=model.device)
    executor = PlanExecutor(storage, tables, zero_new_blocks=False)
    backend = backend_for(
        storage,
        groups.attention,
        max_places=len(sequences),
        max_tokens=num_tokens,
        max_length=num_tokens,
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
