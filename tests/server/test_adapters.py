"""Clients choose an adapter by the name of a model; answers tell it, and its blocks are its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedkv.errors import ConfigurationError
from tests.engine.adapters import make_adapter
from tests.server.conftest import Running
from tests.server.serving import Script, make_service, running, small_model

pytest.importorskip("peft")
PATIENCE_S = 60.0
LONG = "the same long question of everyone " * 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at: Path = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(at / name, small_model(), seed) for seed, name in enumerate(("legal", "rude"))}


@pytest.fixture(scope="module")
def adapted(folders: dict[str, str]) -> Iterator[Running]:
    script = Script()
    service = make_service(script, adapters=folders)
    with running(service) as url:
        yield Running(url, service, script)


def post(server: Running, path: str, **body: Any) -> Any:  # noqa: ANN401 - JSON
    response = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()


def completion(server: Running, **body: Any) -> Any:  # noqa: ANN401 - JSON
    fields = {"prompt": LONG, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **body}
    return post(server, "/v1/completions", **fields)


def test_models_are_listed_with_their_adapters(adapted: Running, folders: dict[str, str]) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{adapted.url}/v1/models").json()["data"]}
    assert list(cards) == ["small", "legal", "rude"]
    assert (cards["small"]["root"], cards["small"]["parent"]) == ("small", None)
    assert [(cards[name]["parent"], cards[name]["root"]) for name in folders] == [
        ("small", folder) for folder in folders.values()
    ]
    assert httpx.get(f"{adapted.url}/v1/models/rude").json() == cards["rude"]
    unknown = httpx.post(f"{adapted.url}/v1/completions", json={"model": "polite", "prompt": "a"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_each_model_answers_otherwise_and_hits_its_own_blocks(adapted: Running) -> None:
    names = ["small", "legal", "rude"]
    first = {name: completion(adapted, model=name) for name in names}
    assert [first[name]["model"] for name in names] == names
    assert len({tuple(each["choices"][0]["token_ids"]) for each in first.values()}) == len(names)
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in first.values()] == [0, 0, 0]
    for name in names:
        again = completion(adapted, model=name)
        assert again["choices"] == first[name]["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(LONG) // 16 * 16
    missed = completion(adapted, prompt=f"{LONG}?", model="rude", explain=True)
    assert missed["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_all_protocols_choose_an_adapter_by_the_model(adapted: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = {"messages": messages, "max_tokens": 6, "temperature": 0}
    bare = post(adapted, "/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
    told = post(adapted, "/v1/chat/completions", model="rude", **chat)
    assert told["model"] == "rude"
    answer = told["choices"][0]["message"]["content"]
    assert answer != bare
    message = post(adapted, "/v1/messages", model="rude", **chat)
    assert (message["model"], message["content"][0]["text"]) == ("rude", answer)
    fields = {"model": "rude", "input": messages, "max_output_tokens": 6, "temperature": 0}
    response = post(adapted, "/v1/responses", **fields)
    assert (response["model"], response["output"][0]["content"][0]["text"]) == ("rude", answer)


def test_a_closed_session_of_an_adapter_frees_its_blocks(adapted: Running) -> None:
    prompt = f"a session of its own, {LONG}"
    completion(adapted, model="legal", prompt=prompt, session_id="one")
    closed = post(adapted, "/close_session", session_id="one")
    assert closed["num_freed_blocks"] >= len(prompt) // 16
    again = completion(adapted, model="legal", prompt=prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_adapter_has_a_name_of_its_own(folders: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="'rude' is a name of the model and of an adapter"):
        make_service(Script(), name="rude", adapters=folders)
