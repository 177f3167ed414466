"""Embeddings are the model's own hidden states, pooled, of length one; OpenAI's client takes them."""

import base64
import struct
from collections.abc import Iterator
from typing import Any, Final

import httpx
import openai
import pytest
import torch

from tests.server.conftest import Running
from tests.server.serving import TOKENIZER, Script, make_service, running, small_model

TEXTS: Final = ["Of all the lamps é is red", "a", "Of all the lamps é is blue, and longer than the others are"]


@pytest.fixture(scope="module", params=["mean", "last"])
def pooled(request: pytest.FixtureRequest) -> Iterator[Running]:
    script = Script()
    service = make_service(script, pooling=request.param, max_prompts=2)
    with running(service) as url:
        yield Running(url, service, script)


def expected(text: str | list[int], pooling: str | None) -> list[float]:
    """Return a text's embedding, by a pass of transformers."""
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    with torch.inference_mode():
        hidden = small_model().model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    states = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
    found: list[float] = torch.nn.functional.normalize(states, dim=0).tolist()
    return found


def test_inputs_of_each_form_get_the_states_of_a_pass_of_transformers(pooled: Running) -> None:
    ids = [TOKENIZER.encode(text) for text in TEXTS]
    pooling = pooled.service.config.pooling
    with openai.OpenAI(base_url=f"{pooled.url}/v1", api_key="none", max_retries=0) as client:
        for given in (TEXTS, ids, TEXTS[0], ids[0]):  # more than are computed at once, then again, from the cache
            answer = client.embeddings.create(model="small", input=given)  # the client asks for base64
            several: Any = given if isinstance(given[0], list) or given is TEXTS else [given]
            assert [each.index for each in answer.data] == list(range(len(several)))
            for each, text in zip(answer.data, several, strict=True):
                assert each.embedding == pytest.approx(expected(text, pooling), abs=1e-5)
            num_tokens = sum(len(TOKENIZER.encode(text) if isinstance(text, str) else text) for text in several)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_numbers_and_base64_are_the_same(pooled: Running) -> None:
    wish = {"model": "small", "input": TEXTS[0]}
    with httpx.Client(base_url=pooled.url, timeout=60) as client:
        numbers = client.post("/v1/embeddings", json=wish).json()["data"][0]["embedding"]
        text = client.post("/v1/embeddings", json={**wish, "encoding_format": "base64"}).json()["data"][0]["embedding"]
        assert struct.unpack(f"<{len(numbers)}f", base64.b64decode(text)) == pytest.approx(numbers, abs=1e-7)
        assert sum(each * each for each in numbers) == pytest.approx(1, abs=1e-5)


def test_last_tokens_hit_and_means_are_computed_whole(pooled: Running) -> None:
    text = f"seen before by {pooled.service.config.pooling}, and long enough for some blocks of sixteen tokens"
    length = len(TOKENIZER.encode(text))
    served: list[int] = []
    pooled.service.on_served.append(lambda each: served.extend(output.num_cached_tokens for output in each.outputs))
    for _ in range(2):
        httpx.post(f"{pooled.url}/v1/embeddings", json={"model": "small", "input": text}, timeout=60)
    pooled.service.on_served.pop()
    assert served == [0, 0 if pooled.service.config.pooling == "mean" else (length - 1) // 16 * 16]


def test_texts_are_shortened_as_asked(pooled: Running) -> None:
    with httpx.Client(base_url=pooled.url, timeout=60) as client:
        ids = TOKENIZER.encode(TEXTS[0])
        for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
            wish = {"model": "small", "input": TEXTS[0], "truncate_prompt_tokens": 4, "truncation_side": side}
            answer = client.post("/v1/embeddings", json=wish).json()
            assert answer["data"][0]["embedding"] == pytest.approx(
                expected(kept, pooled.service.config.pooling), abs=1e-5
            )


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[65], []]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ],
)
def test_what_has_no_embedding_is_refused(pooled: Running, wish: dict[str, object], param: str) -> None:
    refused = httpx.post(f"{pooled.url}/v1/embeddings", json={"model": "small", **wish}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_the_models_own_dimensions_may_be_named(pooled: Running) -> None:
    wish = {"model": "small", "input": "a", "dimensions": 32}
    assert httpx.post(f"{pooled.url}/v1/embeddings", json=wish, timeout=60).status_code == 200


def test_a_server_without_pooling_says_how_to_serve_them(server: Running) -> None:
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"model": "small", "input": "a"}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_embeddings")
    assert "pooling mean" in refused.json()["error"]["message"]
