"""Draft models on a GPU: answers are those of the model itself, with graphs and call by call."""

from dataclasses import replace

import pytest
import torch

from pagedkv.engine import LLM, SamplingParams
from tests.engine.drafts import ROOMY, counts_of, near, serve_drafted
from tests.engine.families import make_model, moved
from tests.engine.serving import compare, reference
from tests.engine.test_speculation import prompt_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = [replace(GREEDY, temperature=0.8, top_k=20, seed=seed) for seed in range(6)]


@pytest.mark.parametrize("capture_steps", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "mixtral"])
def test_greedy_answers_are_those_of_the_model(name: str, capture_steps: bool) -> None:  # noqa: FBT001 - a parameter
    on_host = make_model(name)
    model, draft = (moved(each, "cuda") for each in (on_host, near(on_host)))
    llm = LLM(model, replace(ROOMY, capture_steps=capture_steps), draft_model=draft)
    requests = serve_drafted(llm, [GREEDY] * 6)
    compare(requests, reference(model, [prompt_of(place) for place in range(6)], num_new=12))
    num_drafted, num_accepted = counts_of(requests)
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_drawn_answers_are_those_without_drafts(name: str) -> None:
    model = moved(make_model(name), "cuda")
    alone = [LLM(model, ROOMY).generate([prompt_of(place)], wish)[0].token_ids for place, wish in enumerate(DRAWN)]
    requests = serve_drafted(LLM(model, ROOMY, draft_model=model), DRAWN)
    assert [request.output().token_ids for request in requests] == alone
    num_drafted, num_accepted = counts_of(requests)
    assert num_accepted > 0.9 * num_drafted
