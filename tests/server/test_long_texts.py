"""Long texts are tokenised beside the event loop: meanwhile other requests are served."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from tests.server.serving import PATIENCE_S, TOKENIZER, Script, make_service, running

LONG: Final = "a long text. " * 1500

CALLS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/tokenize": {"prompt": LONG, "add_special_tokens": False},
}


def test_others_are_served_while_a_long_text_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(Script(), longest=30_000)
    begun, may_go_on = threading.Event(), threading.Event()

    def encode(text: str) -> Sequence[int]:
        if len(text) >= len(LONG):
            begun.set()
            assert may_go_on.wait(PATIENCE_S)
            text = text[-50:]
        token_ids: Sequence[int] = TOKENIZER.encode(text, add_special_tokens=False)
        return token_ids

    monkeypatch.setattr(service.chats, "_encode", encode)
    monkeypatch.setattr(service, "encode_plain", encode)
    short = {"model": "small", "messages": [{"role": "user", "content": "short"}], "max_tokens": 2}
    with running(service) as url, ThreadPoolExecutor() as threads:
        for path, call in CALLS.items():
            begun.clear()
            may_go_on.clear()
            long = threads.submit(httpx.post, url + path, json={"model": "small", **call}, timeout=PATIENCE_S)
            assert begun.wait(PATIENCE_S), path
            assert httpx.post(f"{url}/v1/chat/completions", json=short, timeout=PATIENCE_S).status_code == 200
            may_go_on.set()
            assert long.result(PATIENCE_S).status_code == 200, path
