"""Steps that are replayed answer as steps that are run call by call, for a model that may change meanwhile.

On a GPU a recording is a CUDA graph; elsewhere it is the calls themselves, run again on what the buffers hold then, so
that padding, proof and refusal are those of a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from pagedkv.attention import AttentionLayer, KeysInRows
from pagedkv.engine import LLM, EngineConfig, PromptLookup, SamplingParams, captured_passes, forward_pass, runner
from pagedkv.engine.captured_passes import CapturedPasses, Recorder, Recording, of_tables
from pagedkv.engine.runner import copy_written_states
from tests.choosing import long_but
from tests.engine.families import make_model, moved
from tests.engine.guesses import guess
from tests.engine.serving import CONFIG, PROMPTS, compare, poison, reference, reference_of, serve
from tests.engine.test_families import NUM_BLOCKS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ("llama", "gemma2", "gpt_oss", "mistral", "llama4_text", "qwen2_moe")
RECURRENT = ("falcon_h1", "lfm2", "qwen3_next", "bamba", "nemotron_h", "zamba2")
INDEXED = ("deepseek_v32", "glm_moe_dsa", "qwen4_exp_text", "axk2", "dots3_note_text", "hy_v4")
DENSE: dict[str, Any] = {"mlp_layer_types": ["dense"] * 3}
"""Of indexed families, without the experts below."""
ABSORB = [True] if DEVICE == "cuda" else [False, True]
"""Where the model unfolds latents, a GPU captures nothing."""
HOST_EXPERTS = {"gpt_oss", "qwen2_moe", "qwen3_next"}
"""Whose experts, in float32, are looked up on the host, with which nothing can be captured."""
ROOMY = replace(CONFIG, num_blocks=80)


@dataclass
class Again:
    """Calls that are run again."""

    calls: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        """Run them."""
        self.calls()
        self.num_replays += 1


@dataclass
class Otherwise(Again):
    """Calls whose answer is another one when it is replayed."""

    logits: torch.Tensor | None = None

    def replay(self) -> None:
        """Run them, and change what they answered."""
        super().replay()
        assert self.logits is not None
        self.logits += 0.25


def captured_llm(
    name: str = "llama",
    config: EngineConfig = ROOMY,
    record: Recorder | None = Again,
    **changes: Any,  # noqa: ANN401 - of configs
) -> LLM:
    """Build an engine whose steps are captured, on whatever device there is."""
    llm = LLM(moved(make_model(name, **changes), DEVICE), config)
    if DEVICE == "cpu":
        replay_on_cpu(llm, record)
    return llm


def replay_on_cpu(
    llm: LLM, record: Recorder | None, min_tokens: int = 1, agree: Callable[[bool], bool] | None = None
) -> CapturedPasses:
    """Let an engine on a CPU replay its steps."""
    core = llm.core
    has_states, in_rows = bool(llm.groups.states), llm.groups.in_rows
    captured = CapturedPasses(
        core._parts.runner._model,
        of_tables(core.executor.tables, None if in_rows else core.config.max_sequences),
        core.executor.storage.device,
        max_tokens=core.config.max_sequences if in_rows else core.config.max_batched_tokens,
        num_vocabulary=core.vocabulary_size,
        min_tokens=min_tokens,
        agree=agree,
        keep=partial(copy_written_states, llm.groups, core.executor) if has_states else None,
        record=record,
    )
    core._parts.runner._captured = captured
    core._parts.runner.prepare(core.config.max_sequences)
    return captured


@pytest.mark.parametrize("name", long_but(FAMILIES[:3], FAMILIES))
def test_a_family_answers_as_it_does_dense(name: str) -> None:
    llm = captured_llm(name, replace(CONFIG, num_blocks=NUM_BLOCKS.get(name, 28)))
    poison(llm)
    requests, records = serve(llm)
    compare(requests, reference_of(name, device=DEVICE))
    assert sum(record.num_recomputed for record in records) > 0
    if DEVICE == "cpu" or name not in HOST_EXPERTS:
        assert llm.core.capture_state.refusal is None
        assert llm.core.capture_state.num_graphs >= 3
    else:
        assert "cannot be captured" in str(llm.core.capture_state.refusal)


@pytest.mark.parametrize("name", long_but(RECURRENT[:2], RECURRENT))
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_decode_with_states_are_replayed(name: str, *, overlap: bool) -> None:
    config = replace(CONFIG, num_blocks=NUM_BLOCKS.get(name, 28), overlap=overlap)
    llm = captured_llm(name, config)
    poison(llm)
    requests, records = serve(llm)
    compare(requests, reference_of(name, device=DEVICE))
    assert sum(record.num_recomputed for record in records) > 0
    if DEVICE == "cuda" and name in HOST_EXPERTS:
        assert "cannot be captured" in str(llm.core.capture_state.refusal)
        return
    require_replayed(llm)


def require_replayed(llm: LLM) -> CapturedPasses:
    """See that several graphs are proven, and that steps were replayed; return the graphs."""
    assert llm.core.capture_state.refusal is None
    assert llm.core.capture_state.num_graphs >= 2
    captured = llm.core._parts.runner._captured
    assert captured is not None
    if DEVICE == "cpu":
        recordings = [cast("Again", graph.recording) for graph in captured._graphs.values()]
        assert sum(each.num_replays for each in recordings) > 10
    return captured


@pytest.mark.parametrize(
    ("name", "absorb", "overlap"),
    long_but(
        [(INDEXED[0], ABSORB[0], True), (INDEXED[1], True, False), (INDEXED[2], ABSORB[0], False)],
        product(INDEXED, ABSORB, [False, True]),
    ),
)
def test_steps_that_decode_with_an_indexer_are_replayed(
    name: str, monkeypatch: pytest.MonkeyPatch, *, absorb: bool, overlap: bool
) -> None:
    """By a graph for each number of rows and of keys: there are rows of 2 to 77 tokens."""
    monkeypatch.setattr(captured_passes, "LEAST_KEYS", 16)
    config = replace(CONFIG, absorb_latents=absorb, overlap=overlap)
    changes = {} if name == "qwen4_exp_text" else DENSE
    llm = captured_llm(name, config, **changes)
    poison(llm)
    requests, records = serve(llm)
    compare(requests, reference_of(name, device=DEVICE, **changes))
    assert sum(record.num_recomputed for record in records) > 0
    if DEVICE == "cuda" and name == "qwen4_exp_text":  # its indexer asks the device for numbers
        assert "cannot be captured" in str(llm.core.capture_state.refusal)
        return
    captured = require_replayed(llm)
    assert len({kind.num_keys for kind in captured._graphs}) > 1


def seeing_padding(layer: AttentionLayer, positions: torch.Tensor, num_keys: int) -> KeysInRows:
    """Let a token that is decoded see what is beyond its row's last key."""
    rows = KeysInRows(layer, positions, num_keys)
    if positions.shape[1] == 1:
        rows.mask = torch.ones_like(rows.mask)
    return rows


@pytest.mark.parametrize(
    ("broken", "absorb"),
    long_but(
        [(None, ABSORB[0]), ("padding is seen", True), ("keys are left out", True)],
        product([None, "padding is seen", "keys are left out"], ABSORB),
    ),
)
def test_padding_that_is_seen_is_noticed(monkeypatch: pytest.MonkeyPatch, broken: str | None, *, absorb: bool) -> None:
    """And so is a graph of fewer keys than a row has. One row alone has no other padding."""
    monkeypatch.setattr(captured_passes, "LEAST_KEYS", 64)
    if broken == "padding is seen":
        monkeypatch.setattr(forward_pass, "KeysInRows", seeing_padding)
    elif broken == "keys are left out":
        monkeypatch.setattr(runner, "padded_keys", lambda _: 16)
    llm = captured_llm("deepseek_v32", replace(ROOMY, absorb_latents=absorb), **DENSE)
    requests, _ = serve(llm, PROMPTS[3:4])
    expected = reference_of("deepseek_v32", PROMPTS[3:4], device=DEVICE, **DENSE)
    with pytest.raises(AssertionError) if broken else nullcontext():
        compare(requests, expected)


def test_keys_of_a_graph_are_a_power_of_two() -> None:
    given = [[0], [255], [3, 256], [2**20 - 1], [2**20], [2**19 - 1] * 2, [2**19 - 1] * 3]
    assert [captured_passes.padded_keys(np.array(each)) for each in given] == [
        256,
        256,
        512,
        2**20,
        None,
        2**19,
        None,
    ]


def test_weights_change_between_steps_with_states() -> None:
    """The change is noticed before a step is replayed, whose states could not be computed again."""
    llm = captured_llm("falcon_h1", replace(ROOMY, max_sequences=2))
    before = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=30))
    model = llm.core._parts.runner._model
    requests = llm.submit(PROMPTS[:2], SamplingParams(max_tokens=30))
    while llm.core.has_work:
        llm.step()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert [each.samples[0].token_ids for each in requests] == [list(each.token_ids) for each in before]


def test_drafts_are_replayed_as_well() -> None:
    llm = captured_llm(config=replace(ROOMY, speculation=PromptLookup()))
    references = reference_of("llama", device=DEVICE)
    poison(llm)
    requests, records = serve(
        llm, greet=lambda request: guess(request, references[request.number].token_ids, wrong_every=3)
    )
    compare(requests, references)
    assert 0 < sum(record.num_accepted for record in records) < sum(record.num_drafted for record in records)
    assert llm.core.capture_state.num_graphs >= 3
    captured = llm.core._parts.runner._captured
    assert captured is not None
    assert {kind.has_chunks for kind in captured._graphs} == {False, True}, "steps without chunks have their own"


def test_answers_with_log_probabilities_of_their_prompts_are_run_call_by_call() -> None:
    params = SamplingParams(max_tokens=6, prompt_logprobs=0, logprobs=2)
    results = []
    for llm in (captured_llm(), LLM(moved(make_model("llama"), DEVICE), replace(ROOMY, capture_steps=False))):
        answers = [llm.generate([prompt] * 3, params) for prompt in PROMPTS for _ in range(2)]
        results.append([[each.token_ids for each in outputs] for outputs in answers])
        assert all(output.prompt_logprobs for outputs in answers for output in outputs)
    assert results[0] == results[1]


def test_an_engine_says_what_is_replayed() -> None:
    off = LLM(moved(make_model("llama"), DEVICE), replace(ROOMY, capture_steps=False))
    assert off.core.capture_state == (0, "capture_steps is off")
    latents = LLM(moved(make_model("deepseek_v3"), DEVICE), replace(ROOMY, absorb_latents=False))
    refusal = latents.core.capture_state.refusal
    assert "latents" in str(refusal) if DEVICE == "cuda" else refusal == "there are no CUDA graphs on cpu"


def recording_otherwise(replay: Callable[[Recorder], CapturedPasses]) -> list[Otherwise]:
    """Let an engine replay recordings that answer otherwise than their calls, and list them."""
    made: list[Otherwise] = []
    passes: list[CapturedPasses] = []

    def record(calls: Callable[[], None]) -> Recording:
        made.append(Otherwise(calls, logits=passes[0]._logits if passes else None))
        return made[-1]

    passes.append(replay(record))
    for each in made:
        each.logits = passes[0]._logits
    return made


@pytest.mark.skipif(DEVICE == "cuda", reason="a graph answers as its calls")
def test_a_recording_that_answers_otherwise_never_serves() -> None:
    llm = LLM(make_model("llama"), ROOMY)
    made = recording_otherwise(lambda record: replay_on_cpu(llm, record))
    requests, _ = serve(llm)
    compare(requests, reference_of("llama", device=DEVICE))
    assert "answers otherwise than its calls, by 0.25" in str(llm.core.capture_state.refusal)
    assert llm.core.capture_state.num_graphs == 0
    assert sum(each.num_replays for each in made) == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="there a model decides that")
def test_what_cannot_be_captured_is_run_call_by_call_and_told() -> None:
    def record(calls: Callable[[], None]) -> Recording:
        del calls
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    llm = captured_llm(record=record)
    requests, _ = serve(llm)
    compare(requests, reference_of("llama", device=DEVICE))
    refusal = str(llm.core.capture_state.refusal)
    assert refusal.startswith("a step of 16 tokens cannot be captured: operation not permitted")
    assert "more" not in refusal


@pytest.mark.skipif(DEVICE == "cuda", reason="graphs of one GPU ask no other rank")
@pytest.mark.parametrize(
    ("num_agreed", "why"),
    [
        (0, "a hook on another rank"),
        (1, "cannot be captured: on another rank"),
        (None, "answers otherwise than its calls on another rank"),
    ],
)
def test_what_another_rank_cannot_replay_is_run_call_by_call_here_too(num_agreed: int | None, why: str) -> None:
    left = num_agreed
    made: list[Again] = []

    def record(calls: Callable[[], None]) -> Recording:
        made.append(Again(calls))
        return made[-1]

    def agree(finding: bool) -> bool:  # noqa: FBT001 - as it is called
        nonlocal left
        if left is not None:
            left -= 1
        return finding and (left is None or left >= 0) and not any(each.num_replays for each in made)

    llm = LLM(make_model("llama"), ROOMY)
    captured = replay_on_cpu(llm, record, agree=agree)
    assert (len(captured._graphs) > 0) == (num_agreed is None)
    requests, _ = serve(llm)
    compare(requests, reference_of("llama", device=DEVICE))
    assert why in str(llm.core.capture_state.refusal)
    assert llm.core.capture_state.num_graphs == 0


def test_a_hook_is_called_in_every_step() -> None:
    llm = captured_llm()
    serve(llm)
    assert llm.core.capture_state.num_graphs
    calls: list[int] = []
    hook = llm.core._parts.runner._model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    _, records = serve(llm)
    assert "hook" in str(llm.core.capture_state.refusal)
    assert len(calls) >= sum(record.num_tokens > 0 for record in records) - 1  # the first is noticed when it is over
    hook.remove()
    for _ in range(2):
        serve(llm)
    assert llm.core.capture_state.refusal is None
    assert llm.core.capture_state.num_graphs


def other_head(llm: LLM) -> None:
    model = llm.core._parts.runner._model
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0).clone())


def other_memory(llm: LLM) -> None:
    head = llm.core._parts.runner._model.lm_head
    head.weight.data = head.weight.data.flip(0).clone()


def other_module(llm: LLM) -> None:
    model = llm.core._parts.runner._model
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False, device=model.device)
    head.weight.data = model.lm_head.weight.data.flip(0).clone()
    model.lm_head = head


def in_place(llm: LLM) -> None:
    head = llm.core._parts.runner._model.lm_head
    head.weight.data.copy_(head.weight.data.flip(0).clone())


@pytest.mark.parametrize("change", [other_head, other_memory, other_module, in_place])
def test_weights_may_change_between_steps(change: Callable[[LLM], None]) -> None:
    llm = captured_llm()
    serve(llm)
    llm.set_weights_epoch("2", change=partial(change, llm))
    requests, _ = serve(llm)
    compare(requests, reference(llm.core._parts.runner._model, PROMPTS))
    assert llm.core.capture_state.refusal is None
    assert llm.core.capture_state.num_graphs


def test_engines_that_share_a_model_have_graphs_of_their_own() -> None:
    model = moved(make_model("llama"), DEVICE)
    engines = [LLM(model, ROOMY) for _ in range(2)]
    if DEVICE == "cpu":
        for llm in engines:
            replay_on_cpu(llm, Again)
    expected = reference_of("llama", device=DEVICE)
    for llm in engines:
        compare(serve(llm)[0], expected)
        compare(serve(llm)[0], expected)
