"""Load: many clients of one server, some of which leave in the middle, read slowly, or send what is no request."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

__all__ = ["Heard", "Mix", "ask_all"]

MAX_TOKENS: Final = 8
SLOW_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Mix:
    """What clients do, as shares of all requests.

    Args:
        streamed: answers are streamed; left: of these, clients that leave after the first token.
        slow: of the streamed, clients that wait before each read; bad: bodies that are none.
    """

    streamed: float = 0.5
    left: float = 0.4  # a fifth of all
    slow: float = 0.05
    bad: float = 0.05


@dataclass(slots=True)
class Heard:
    """What clients heard.

    Args:
        answers: text by prompt, of whole and of streamed answers that were read to their end.
        num_prompt, num_cached, num_generated: sums of usage; num_chunks: streamed.
        statuses: of answers, how often; num_left: clients that left.
        request_ids: identities of the answers that were read to their end.
    """

    answers: dict[str, set[str]] = field(default_factory=dict)
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_chunks: int = 0
    num_left: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    request_ids: set[str] = field(default_factory=set)

    def note(self, prompt: str, text: str, usage: dict[str, Any], request_id: str) -> None:
        """Note an answer that was read to its end."""
        self.request_ids.add(request_id)
        self.answers.setdefault(prompt, set()).add(text)
        self.num_prompt += usage["prompt_tokens"]
        self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        self.num_generated += usage["completion_tokens"]


async def ask_all(url: str, prompts: Sequence[str], num_connections: int, mix: Mix, seed: int = 0) -> Heard:
    """Send all prompts, so many at a time. Raises AssertionError if a response is not an answer."""
    heard, chance = Heard(), random.Random(seed)
    queue = [(prompt, chance.random(), chance.random()) for prompt in prompts]
    limits = httpx.Limits(max_connections=num_connections, max_keepalive_connections=num_connections)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as client:

        async def work() -> None:
            while queue:
                await _ask(client, *queue.pop(), mix, heard)

        await asyncio.gather(*(work() for _ in range(num_connections)))
    return heard


async def _ask(  # noqa: PLR0913, PLR0917 - a prompt, chances, and where to note
    client: httpx.AsyncClient, prompt: str, first: float, second: float, mix: Mix, heard: Heard
) -> None:
    path = "/v1/chat/completions"
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    if first < mix.bad:
        answer = await client.post(path, content=b'{"messages": [', headers={"Content-Type": "application/json"})
        heard.statuses[answer.status_code] = heard.statuses.get(answer.status_code, 0) + 1
        return
    if first < mix.bad + mix.streamed:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", path, json={**body, **options}) as streamed:
            heard.statuses[streamed.status_code] = heard.statuses.get(streamed.status_code, 0) + 1
            await _read(streamed, prompt, second, mix, heard)
        return
    answer = await client.post(path, json=body)
    heard.statuses[answer.status_code] = heard.statuses.get(answer.status_code, 0) + 1
    if answer.status_code == httpx.codes.OK:
        document = answer.json()
        heard.note(prompt, document["choices"][0]["message"]["content"], document["usage"], document["id"])


async def _read(streamed: httpx.Response, prompt: str, chance: float, mix: Mix, heard: Heard) -> None:
    text: list[str] = []
    usage: dict[str, Any] | None = None
    request_id = ""
    async for line in streamed.aiter_lines():
        if not line.startswith("data: {"):
            continue
        heard.num_chunks += 1
        document = httpx.Response(200, text=line[6:]).json()
        usage, request_id = document.get("usage", usage), document["id"]
        text += [choice["delta"].get("content", "") for choice in document["choices"]]
        if chance < mix.left and heard.num_chunks and len(text) > 1:
            heard.num_left += 1
            return
        if chance > 1 - mix.slow:
            await asyncio.sleep(SLOW_S)
    assert usage is not None, "a stream has ended without usage"
    heard.note(prompt, "".join(text), usage, request_id)
