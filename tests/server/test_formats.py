"""Formats beside other fields of a request: what cannot be is refused before an answer begins, and answers end."""

from typing import Any, Final

import httpx
import pytest

from tests.server.conftest import Running

PATHS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "held"}]},
    "/v1/completions": {"prompt": "held"},
}
CHOICE: Final = {"choice": ["red lamp", "blue lamp"]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"structured_outputs": {"regex": "a[^\\s\\S]"}}, "no text matches it"),
        ({"structured_outputs": {"json": {"enum": []}}}, "the JSON schema cannot be served: Unsatisfiable schema"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs must have json"),
        ({"structured_outputs": CHOICE, "min_tokens": 10}, "the longest choice has 9 bytes"),
    ],
)
def test_what_no_answer_can_be_is_refused_before_it_begins(
    server: Running,
    path: str,
    stream: bool,  # noqa: FBT001 - a parameter
    more: dict[str, Any],
    told: str,
) -> None:
    wish = {"model": "small", **PATHS[path], "stream": stream, "max_tokens": 40, **more}
    answer = httpx.post(f"{server.url}{path}", json=wish, timeout=60)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 9}, {"min_tokens": 12}])
def test_an_answer_whose_format_is_complete_ends(server: Running, path: str, more: dict[str, Any]) -> None:
    """Else the tokens that end an answer would follow each other, or no token would be left."""
    held = {"structured_outputs": {"regex": "red lamp|blue lamp!{0,20}"}}
    wish = {"model": "small", **PATHS[path], "max_tokens": 100, **held, **more}
    answer = httpx.post(f"{server.url}{path}", json=wish, timeout=60).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= 30


def test_an_answer_goes_on_while_its_format_does_if_its_end_is_ignored(server: Running) -> None:
    wish = {"model": "small", "prompt": "held", "max_tokens": 100, "ignore_eos": True, "n": 4}
    held = {"structured_outputs": {"regex": "lamp!{0,20}"}, "logit_bias": {"262": 100}}
    answer = httpx.post(f"{server.url}/v1/completions", json={**wish, **held}, timeout=60).json()
    assert {each["text"] for each in answer["choices"]} == {"lamp" + "!" * 20}
