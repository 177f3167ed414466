"""A draft model's passes that are replayed propose what passes run call by call propose.

As in :mod:`tests.engine.test_captured_passes`, a recording elsewhere than on a GPU is the calls themselves, run again
on what the buffers hold then.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.attention import StepMetadata
from pagedkv.engine import LLM, SamplingParams
from pagedkv.engine.captured_passes import CapturedPasses, Recording
from pagedkv.engine.drafter import DraftPass, PassBuffers
from tests.choosing import long_but
from tests.engine.drafts import ROOMY, counts_of, near, serve_drafted
from tests.engine.families import make_model, moved
from tests.engine.serving import CONFIG, compare, reference
from tests.engine.test_captured_passes import Again, recording_otherwise
from tests.engine.test_speculation import GREEDY, prompt_of

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES: Final = ("llama", "gemma3_text", "mistral", "mixtral", "llama4_text")
DRAWN: Final = [replace(GREEDY, temperature=0.8, top_k=20, seed=seed) for seed in range(6)]
PENALISED: Final = [replace(each, repetition_penalty=1.3) for each in DRAWN]
SHORT: Final = replace(CONFIG, num_blocks=40)


def drafting_llm(name: str = "llama", *, draft: PreTrainedModel | None = None, record: type[Again] = Again) -> LLM:
    """Build an engine whose draft model's passes are replayed, on whatever device there is."""
    model = moved(make_model(name), DEVICE)
    llm = LLM(model, ROOMY, draft_model=model if draft is None else moved(draft, DEVICE))
    if DEVICE == "cpu":
        replay_on_cpu(llm, record)
    return llm


def replay_on_cpu(llm: LLM, record: Callable[[Callable[[], None]], Recording]) -> CapturedPasses:
    """Let a drafter on a CPU replay its passes."""
    core = llm.core
    drafter = core._parts.drafter
    assert drafter is not None
    tables, most = core.executor.tables, core.config.max_batched_tokens
    drafter._buffers = PassBuffers(tables, drafter._first_group, max_places=core.config.max_sequences, max_tokens=most)
    captured = CapturedPasses(
        drafter._runner._model,
        drafter._buffers.metadata_of,
        core.executor.storage.device,
        max_tokens=most,
        num_vocabulary=core.vocabulary_size,
        record=record,
    )
    drafter._runner._captured = captured
    drafter.prepare()
    return captured


def answers_of(llm: LLM, wishes: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    return [tuple(request.output().token_ids) for request in serve_drafted(llm, wishes)]


@pytest.mark.parametrize("name", long_but(FAMILIES[:2], FAMILIES))
@pytest.mark.parametrize("wishes", [[GREEDY] * 6, DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
def test_a_model_that_drafts_for_itself_is_always_right(name: str, wishes: list[SamplingParams]) -> None:
    llm = drafting_llm(name)
    num_drafted, num_accepted = counts_of(serve_drafted(llm, wishes))
    assert num_drafted > 0
    assert num_accepted >= (num_drafted if DEVICE == "cpu" else 0.9 * num_drafted)  # rounding by sizes, on a GPU
    state = llm.core.draft_capture_state
    assert state.refusal is None or DEVICE == "cuda"  # mixtral's experts are looked up on the host
    assert state.num_graphs >= 3 or state.refusal is not None


@pytest.mark.parametrize("name", long_but(FAMILIES[:2], FAMILIES))
def test_a_draft_model_that_is_often_wrong_changes_no_answer(name: str) -> None:
    on_host = make_model(name)
    llm = drafting_llm(name, draft=near(on_host))
    requests = serve_drafted(llm, [replace(GREEDY, max_tokens=12, ignore_eos=True)] * 6)
    compare(requests, reference(moved(on_host, DEVICE), [prompt_of(place) for place in range(6)], num_new=12))
    num_drafted, num_accepted = counts_of(requests)
    assert 0 < num_accepted < num_drafted


@pytest.mark.skipif(DEVICE == "cuda", reason="sizes of other graphs round differently there")
def test_replayed_passes_propose_as_calls_do() -> None:
    draft = near(make_model("llama"))
    counts = []
    for captures in (True, False):
        llm = drafting_llm(draft=draft)
        if not captures:
            llm.core._parts.drafter._buffers = None  # type: ignore[union-attr]
        counts.append(counts_of(serve_drafted(llm, DRAWN)))
    assert counts[0] == counts[1]
    assert 0 < counts[0][1] < counts[0][0]


def test_rows_come_and_go_between_passes_of_short_pools() -> None:
    model = moved(make_model("llama"), DEVICE)
    llm = LLM(model, SHORT, draft_model=model)
    if DEVICE == "cpu":
        replay_on_cpu(llm, Again)
    answers = answers_of(llm, DRAWN)
    assert answers == [
        LLM(model, ROOMY).generate([prompt_of(place)], wish)[0].token_ids for place, wish in enumerate(DRAWN)
    ]


# Negative controls


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels would read wherever they are led")
@pytest.mark.parametrize("what", ["tables", "slots", "starts", "offsets"])
def test_a_pass_that_is_put_wrongly_would_be_noticed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    put = PassBuffers.put

    def wrongly(self: PassBuffers, each: DraftPass, step: StepMetadata) -> None:
        put(self, each, step)
        if what == "tables":
            self._tables[0].copy_(self._tables[0].roll(1, 0))
        elif what == "slots":
            self._slots[0].copy_(self._slots[0].roll(1, 0))
        elif what == "starts":
            self._starts[0] += 1
            self._ends[0] += 1
        else:
            self._offsets.fill_(0)

    monkeypatch.setattr(PassBuffers, "put", wrongly)
    llm = drafting_llm()
    requests = llm.submit([prompt_of(place) for place in range(6)], GREEDY)
    has_failed = False
    while llm.core.has_work:
        has_failed |= llm.step().failure is not None
    num_drafted, num_accepted = counts_of(requests)
    assert has_failed or num_accepted < 0.9 * num_drafted


@pytest.mark.skipif(DEVICE == "cuda", reason="a graph answers as its calls")
def test_passes_that_are_replayed_otherwise_never_propose() -> None:
    llm = LLM(make_model("llama"), ROOMY, draft_model=make_model("llama"))
    recording_otherwise(lambda record: replay_on_cpu(llm, record))
    num_drafted, num_accepted = counts_of(serve_drafted(llm, [GREEDY] * 4))
    assert num_drafted == num_accepted > 0
    assert "answers otherwise than its calls" in str(llm.core.draft_capture_state.refusal)


def test_an_engine_tells_what_of_a_draft_model_is_replayed() -> None:
    model = moved(make_model("llama"), DEVICE)
    assert LLM(model, ROOMY).core.draft_capture_state == (0, "there is no draft model")
    off = LLM(model, replace(ROOMY, capture_steps=False), draft_model=model)
    assert off.core.draft_capture_state == (0, "capture_steps is off")
    refusal = LLM(model, ROOMY, draft_model=model).core.draft_capture_state.refusal
    assert refusal == (None if DEVICE == "cuda" else "there are no CUDA graphs on cpu")
