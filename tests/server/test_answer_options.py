"""What a server tells in any case by its options: usage in streams, ids in place of tokens' texts, its tokenizer."""

import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from pagedkv.server import ServerConfig, Service
from pagedkv.server.http import ApiError
from pagedkv.server.openai.completions import tokenizer_info
from tests.server.conftest import Running
from tests.server.serving import HERMES, Script, make_service, running, tokens_of

CUE: Final = "name the tokens"
CHAT: Final = {"model": "small", "messages": [{"role": "user", "content": CUE}], "logprobs": True, "temperature": 0}
TEXT: Final = {"model": "small", "prompt": CUE, "logprobs": 1, "max_tokens": 8, "temperature": 0}
RESPONSE: Final = {"model": "small", "input": CUE, "top_logprobs": 1, "temperature": 0}


@pytest.fixture(scope="module")
def told() -> Iterator[Running]:
    """Run a server with all three."""
    script = Script()
    script.write(CUE, "abc")
    service = make_service(script, tells_usage=True, tokens_as_ids=True, tells_tokenizer=True)
    with running(service) as url:
        yield Running(url, service, script)


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Read the events of a stream of completions."""
    return [json.loads(each) for each in text.split("data: ")[1:-1]]


@pytest.mark.parametrize(("path", "wish"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_each_chunk_has_usage_and_the_last_has_that_of_the_whole(
    told: Running, server: Running, path: str, wish: dict[str, object], options: dict[str, object]
) -> None:
    streamed = {**wish, **options, "stream": True}
    chunks = chunks_of(httpx.post(f"{told.url}{path}", json=streamed, timeout=60).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(tokens_of("abc"))
    assert chunks[-1]["choices"] == []
    server.script.write(CUE, "abc")
    plain = chunks_of(httpx.post(f"{server.url}{path}", json=streamed, timeout=60).text)
    assert not any("usage" in chunk for chunk in plain)


def test_tokens_are_named_by_ids_unless_a_request_says_otherwise(told: Running) -> None:
    ids = [f"token_id:{token}" for token in tokens_of("abc")]
    with httpx.Client(base_url=told.url, timeout=60) as client:
        for more, names in (({}, ids[:3]), ({"return_tokens_as_token_ids": False}, ["a", "b", "c"])):
            chat = client.post("/v1/chat/completions", json={**CHAT, **more}).json()
            assert [each["token"] for each in chat["choices"][0]["logprobs"]["content"]][:3] == names
            text = client.post("/v1/completions", json={**TEXT, **more}).json()
            assert text["choices"][0]["logprobs"]["tokens"][:3] == names
        response = client.post("/v1/responses", json=RESPONSE).json()
    (part,) = response["output"][0]["content"]
    assert [each["token"] for each in part["logprobs"]] == ids[:3]


def test_the_tokenizer_is_told_only_where_the_server_says_so(told: Running, server: Running) -> None:
    answer = httpx.get(f"{told.url}/tokenizer_info", timeout=60).json()
    special = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": None, "unk_token": None}
    assert special.items() <= answer.items()
    assert answer["chat_template"] == HERMES
    assert answer["model_max_length"] == told.service.longest
    refused = httpx.get(f"{server.url}/tokenizer_info", timeout=60)
    assert refused.status_code == 404
    assert "tells_tokenizer" in refused.json()["error"]["message"]


def test_without_a_tokenizer_there_is_nothing_to_tell(server: Running) -> None:
    config = ServerConfig("small", tells_tokenizer=True)
    service = Service(server.service.engine, config, server.service.access)
    with pytest.raises(ApiError, match="this server has no tokenizer"):
        tokenizer_info(service)
