"""Serves requests with an engine under pressure, and generates the same prompts densely.

Equality holds up to the first place where the reference itself could have chosen otherwise: where its two largest
logits are closer than ``TOLERANCE`` of their spread.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import torch
from transformers import PreTrainedModel

from pagedkv.contract.plan import StepPlan
from pagedkv.engine import LLM, EngineConfig, EngineRequest, SamplingParams, StepRecord
from tests.engine.families import make_model, moved

__all__ = [
    "CONFIG",
    "NUM_NEW",
    "PROMPTS",
    "REPETITIVE",
    "Reference",
    "compare",
    "poison",
    "reference",
    "reference_of",
    "serve",
]

TOLERANCE: Final = 1e-4
POISON: Final = 0xFF  # NaN in every type of floats
NUM_NEW: Final = 20
SHARED: Final = [7, 21, 190, 33, 4, 87, 120, 56, 9, 77, 150, 18, 63, 3, 99, 142, 41, 12, 175, 66, 28, 111, 5, 134]
PROMPTS: Final = (
    [*SHARED, 17, 18],
    [*SHARED, 19],
    [3],
    list(range(20, 57)),
    [*SHARED, 17, 18, 90, 91, 92],
    SHARED[:13],
)
REPETITIVE: Final = (
    [*SHARED, *SHARED[:6]],
    [*SHARED, *SHARED[:6], 19, 5, 19],
    [7] * 17,
    [3, 77, 150] * 8,
    [5, 9] * 12,
    [*SHARED[:13], *SHARED[2:11]],
)
CONFIG: Final = EngineConfig(
    block_size=4,
    checkpoint_interval=8,
    num_blocks=28,
    max_sequences=5,
    max_batched_tokens=16,
    max_tokens=80,
    self_test=False,
    compile_model=False,
    overlap=False,
)


@dataclass(frozen=True)
class Reference:
    """The answer of dense generation.

    Args:
        token_ids: the tokens; num_certain: number of leading tokens that rounding cannot change.
    """

    token_ids: list[int]
    num_certain: int


def reference(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[int]],
    num_new: int = NUM_NEW,
    **wishes: object,
) -> list[Reference]:
    """Generate answers by the model's own ``generate``, prompt by prompt; ``wishes`` are its arguments."""
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            out = cast("Any", model).generate(
                torch.tensor([prompt], device=model.device),
                max_new_tokens=num_new,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **wishes,
            )
        logits = torch.cat(out.logits).float()
        top = logits.topk(2, dim=1).values
        is_close = (top[:, 0] - top[:, 1]) < TOLERANCE * logits.std(dim=1)
        num_certain = int(is_close.int().argmax()) if bool(is_close.any()) else len(is_close)
        answers.append(Reference(out.sequences[0, len(prompt) :].tolist(), num_certain))
    return answers


def reference_of(
    name: str,
    prompts: Iterable[Sequence[int]] = PROMPTS,
    num_new: int = NUM_NEW,
    *,
    device: str = "cpu",
    **changes: object,
) -> list[Reference]:
    """Generate answers by the model of a family as it is made, which no engine serves; each answer once for all tests.

    Args:
        name, changes: of the family, as for :func:`make_model`.
        prompts, num_new: as for :func:`reference`, which takes any model.
        device: where the model is.
    """
    told = json.dumps(changes, sort_keys=True)
    return [_answer_of(name, told, device, tuple(prompt), num_new) for prompt in prompts]


@cache
def _answer_of(name: str, changes: str, device: str, prompt: tuple[int, ...], num_new: int) -> Reference:
    return reference(_model_of(name, changes, device), [prompt], num_new)[0]


@cache
def _model_of(name: str, changes: str, device: str) -> PreTrainedModel:
    return moved(make_model(name, **json.loads(changes)), device)


def poison(llm: LLM) -> None:
    """Fill all blocks, and from now on every block that is handed out without content, with NaN."""
    executor = llm.core.executor
    for pool in executor.storage.pools.values():
        pool.device_bytes[pool.block_nbytes :] = POISON
        pool.host_bytes[:] = POISON
    carry_out = executor._carry_out

    def poisoned(plan: StepPlan, *rest: Any) -> object:  # noqa: ANN401 - as they are
        for new in plan.new_blocks:
            pool = executor.storage.pools[new.pool]
            blocks = pool.device_bytes.view(pool.num_blocks, pool.block_nbytes)
            blocks[torch.from_numpy(new.block_ids.copy()).long()] = POISON
        return carry_out(plan, *rest)

    executor._carry_out = poisoned  # type: ignore[method-assign,assignment]


def serve(
    llm: LLM,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: SamplingParams | None = None,
    greet: Callable[[EngineRequest], None] = lambda _: None,
    *,
    may_fail: bool = False,
) -> tuple[list[EngineRequest], list[StepRecord]]:
    """Serve prompts that arrive one after the other, every third step; the space proves itself after each step.

    Args:
        llm: the engine; prompts, params: those of the requests.
        greet: called with each request when it arrives.
        may_fail: steps may fail, and are tried again.
    """
    params = params or SamplingParams(max_tokens=NUM_NEW)
    requests: list[EngineRequest] = []
    records: list[StepRecord] = []
    while len(requests) < len(prompts) or llm.core.has_work:
        if len(requests) < len(prompts) and len(records) % 3 == 0:
            requests += llm.submit([prompts[len(requests)]], params)
            greet(requests[-1])
        records.append(llm.step())
        assert may_fail or records[-1].failure is None, records[-1].failure
        llm.core.space.check()
    return requests, records


def compare(requests: Sequence[EngineRequest], references: Sequence[Reference]) -> None:
    """Require that every answer is the reference's, as far as that is certain; and that most of it is."""
    num_tokens = sum(len(each.token_ids) for each in references)
    assert sum(each.num_certain for each in references) >= 0.9 * num_tokens, "too few tokens of the model are certain"
    for request, expected in zip(requests, references, strict=True):
        for sample in request.samples:
            certain = expected.num_certain
            assert sample.token_ids[:certain] == expected.token_ids[:certain], (
                f"request {request.number}, answer {sample.index}"
            )
            assert len(sample.token_ids) == len(expected.token_ids)
