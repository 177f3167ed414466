"""Log-probabilities of prompts are the model's own: with echo, as vLLM tells them, whole and streamed."""

import json
from typing import Any, Final

import httpx
import pytest
import torch

from tests.server.conftest import Running
from tests.server.serving import TOKENIZER, small_model, tokens_of

PROMPT: Final = "Of all the lamps é is red"
TOKENS: Final[list[int]] = TOKENIZER.encode(PROMPT, add_special_tokens=False)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Return the model's log-probabilities behind each token, by a pass of transformers."""
    with torch.inference_mode():
        logits = small_model()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)


def ask(server: Running, path: str = "/v1/completions", **wish: object) -> Any:  # noqa: ANN401 - JSON
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    response = httpx.post(f"{server.url}{path}", json={"model": "small", "temperature": 0, **asked, **wish}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_echo_tells_the_log_probabilities_of_the_prompt(server: Running, expected: torch.Tensor) -> None:
    for _ in range(2):  # the second time its blocks are cached
        answer = ask(server, echo=True, logprobs=2, max_tokens=0)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(TOKENS)
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        own = [float(expected[place, token]) for place, token in enumerate(TOKENS[1:])]
        assert told["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        best = [expected[place].max().item() for place in range(len(TOKENS) - 1)]
        assert [max(top.values()) for top in told["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)
        assert all(
            logprob in top.values()
            for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True)
        )
        assert told["text_offset"] == [
            len(str(TOKENIZER.decode(TOKENS[:place])).rstrip("\ufffd")) for place in range(len(TOKENS))
        ]
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["total_tokens"] == len(TOKENS)


def test_an_answer_follows_its_echoed_prompt(server: Running) -> None:
    (choice,) = ask(server, echo=True, logprobs=1, max_tokens=3)["choices"]
    (answer,) = ask(server, logprobs=1, max_tokens=3)["choices"]
    assert choice["text"] == PROMPT + answer["text"]
    told = choice["logprobs"]
    assert told["tokens"][-3:] == answer["logprobs"]["tokens"]
    assert told["token_logprobs"][-3:] == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-4)
    assert told["text_offset"][-3] == len(PROMPT)


def test_a_stream_tells_the_same(server: Running) -> None:
    wish: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 4, "n": 2, "prompt": [TOKENS, TOKENS[:5]]}
    whole = ask(server, **wish)["choices"]
    body = {"model": "small", "temperature": 0, "stream": True, **wish}
    streamed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    for place, choice in enumerate(whole):
        pieces = [each for event in events for each in event["choices"] if each["index"] == place]
        assert "".join(each["text"] for each in pieces) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for each in pieces if each["logprobs"] for value in each["logprobs"][name]] == values


def test_prompt_logprobs_are_in_the_form_of_vllm(server: Running, expected: torch.Tensor) -> None:
    (choice,) = ask(server, prompt_logprobs=2, max_tokens=1)["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(TOKENS) - 1
    for place, each in enumerate(others):
        own, best = TOKENS[place + 1], int(expected[place].argmax())
        assert each[str(own)]["logprob"] == pytest.approx(float(expected[place, own]), abs=1e-4)
        assert each[str(own)]["rank"] == int((expected[place] >= expected[place, own]).sum())
        assert each[str(best)]["rank"] == 1
        assert 2 <= len(each) <= 3
    assert others[0][str(TOKENS[1])]["decoded_token"] == TOKENIZER.decode(TOKENS[1])


def test_conversations_tell_them_beside_their_choices(server: Running) -> None:
    answer = ask(server, "/v1/chat/completions", prompt_logprobs=0, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(each) == 1 for each in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_ids_of_tokens_are_told_if_asked(server: Running, path: str) -> None:
    server.script.write("of all the lamps", "é red")
    asked = (
        {"messages": [{"role": "user", "content": "of all the lamps"}]}
        if "chat" in path
        else {"prompt": "of all the lamps"}
    )
    logprobs = {"logprobs": True} if "chat" in path else {"logprobs": 0}
    body = {"model": "small", "return_token_ids": True, "return_tokens_as_token_ids": True, **asked, **logprobs}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post(path, json=body).json()
        lines = client.post(path, json={**body, "stream": True}).text.splitlines()
    (choice,) = whole["choices"]
    assert choice["token_ids"] == tokens_of("é red")
    prompt = whole["prompt_token_ids"] if "chat" in path else choice["prompt_token_ids"]
    assert "of all the lamps" in TOKENIZER.decode(prompt)
    told = choice["logprobs"]
    named = [each["token"] for each in told["content"]] if "chat" in path else told["tokens"]
    assert named == [f"token_id:{token}" for token in choice["token_ids"]]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [token for event in events for each in event["choices"] for token in each.get("token_ids", ())] == choice[
        "token_ids"
    ]
    prompts = [event if "chat" in path else event["choices"][0] for event in events]
    assert [each["prompt_token_ids"] for each in prompts if "prompt_token_ids" in each] == [prompt]


@pytest.mark.parametrize(
    ("path", "wish", "reason"),
    [
        ("/v1/completions", {"max_tokens": 0}, "max_tokens is 0, which needs echo or prompt_logprobs"),
        ("/v1/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs are not streamed"),
        ("/v1/chat/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs are not streamed"),
        (
            "/v1/completions",
            {"prompt": [[7] * 1000] * 20, "prompt_logprobs": 20},
            "420,000 log-probabilities of prompt",
        ),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs: Input should be less than or equal to 20"),
        ("/v1/responses", {"input": "x", "prompt_logprobs": 1}, "prompt_logprobs is not served"),
    ],
)
def test_what_cannot_be_told_is_refused(server: Running, path: str, wish: dict[str, Any], reason: str) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    refused = httpx.post(f"{server.url}{path}", json={"model": "small", **asked, **wish}, timeout=60)
    assert refused.status_code == 400
    assert reason in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("continuous", [True, False])
def test_each_chunk_tells_the_usage_so_far_if_asked(server: Running, path: str, continuous: bool) -> None:  # noqa: FBT001 - a case
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"model": "small", "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options, **asked}
    text = httpx.post(f"{server.url}{path}", json=body, timeout=60).text
    *events, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    if not continuous:
        assert not any("usage" in event for event in events)
        return
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert {event["usage"]["prompt_tokens"] for event in events} == {last["usage"]["prompt_tokens"]}
