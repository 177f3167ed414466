"""Steps of a running server with OpenAI's protocol, from the times at which its tokens arrive.

Requests are sent whose steps can be told apart, by the rules of :func:`steps_of_bench`: prompts alone, of many lengths,
whose first token took one step; and batches that decode together, of 1 to 64 sequences. Rounds of both go on until the
time is up. Prompts are random text, so that nothing of them is cached. The prompts of a batch are short enough to be
computed in a twentieth of the time, by the speed seen so far. In turn they are of the shorter and of the longer half of
these lengths, so that a batch of a size has little context once, and much another time: else the seconds of a
sequence and those of its context could not be told apart.

A first token also takes the time of the network and the server. That is estimated by the shortest prompts, whose step
takes about as long as one of a sequence that decodes alone, and is taken from all first tokens.

Nobody else may use the server meanwhile: steps are attributed to these requests alone.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.planner.traces.lines import Line
from pagedkv.simulation.calibration.steps import LONGEST_PROMPT, MeasuredSteps, steps_of_bench

with needing("route", "measuring a server"):
    import aiohttp

LEAST_S: Final = 1.0
BATCHES: Final = (8, 1, 64, 2, 16, 4, 32)
PROMPTS_A_ROUND: Final = 4
SHORTEST: Final = 8
MOST_IN_BATCH: Final = 16_384
SHARE_OF_BATCH: Final = 1 / 20
NUM_OUTPUT: Final = 64
NUM_OUTPUT_ALONE: Final = 8
MOST_OVERHEAD: Final = 0.9
"""Share of the quickest first token: a step takes some time in any case."""
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
WORD: Final = 5
PATIENCE_S: Final = 600.0
REMEDY: Final = "Give the address of a server with /v1/models and /v1/completions, such as http://127.0.0.1:8000"


def measure_server(
    url: str,
    seconds: float,
    *,
    api_key: str | None = None,
    show: Callable[[float], None] = lambda _: None,
    seed: int = 0,
) -> MeasuredSteps:
    """Measure a server that serves nothing else meanwhile, for so many seconds and until its last batch has ended.

    Args:
        url: its address, with or without ``/v1``.
        seconds: how long requests are sent.
        api_key: its key, if it needs one.
        show: called with the seconds so far.
        seed: of the prompts.

    Raises:
        ConfigurationError: the seconds are fewer than one.
        RecordingError: the server does not answer, or not as OpenAI's protocol has it.
    """
    if not seconds >= LEAST_S:
        raise ConfigurationError(f"a server is measured for {LEAST_S:g} second or longer, got {seconds:g}")
    root = url.rstrip("/").removesuffix("/v1")
    answers = asyncio.run(_measured(root, seconds, api_key, show, random.Random(seed)))  # noqa: S311 - of prompts
    result = {
        "start_times": [each.start_s for each in answers],
        "ttfts": [each.token_s[0] - each.start_s for each in answers],
        "itls": [[later - earlier for earlier, later in pairwise(each.token_s)] for each in answers],
        "input_lens": [each.num_prompt for each in answers],
        "output_lens": [each.num_output for each in answers],
    }
    return steps_of_bench(Line(url, 1, ""), result, source=f"the server at {root}", overhead_s=_overhead_s(answers))


@dataclass(slots=True)
class _Answer:
    """An answer: when its request was sent, and when each token arrived, in seconds."""

    start_s: float
    is_alone: bool
    token_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0


def _overhead_s(answers: Sequence[_Answer]) -> float:
    """Return the seconds of a first token that no step took, as the module explains; 0 if they are not known."""
    alone = [each for each in answers if each.is_alone]
    shortest = min(each.num_prompt for each in alone)
    gaps_s = [later - earlier for each in alone for earlier, later in pairwise(each.token_s)]
    first_s = [each.token_s[0] - each.start_s for each in alone]
    of_short_s = [seconds for seconds, each in zip(first_s, alone, strict=True) if each.num_prompt <= 2 * shortest]
    return max(0.0, min(MOST_OVERHEAD * min(first_s), median(of_short_s) - median(gaps_s))) if gaps_s else 0.0


@dataclass(slots=True)
class _Client:
    """Sends requests to a server.

    Args:
        session: with the server's address.
        model: the served model.
        chance: draws prompts.
        num_chars: characters of a token, by the answers so far.
    """

    session: aiohttp.ClientSession
    model: str
    chance: random.Random
    num_chars: float = 1.0

    async def ask(self, num_tokens: int, num_output: int, *, is_alone: bool) -> _Answer:
        """Let a random prompt of about so many tokens be answered. Raises RecordingError."""
        num_words = max(1, round(num_tokens * self.num_chars / (WORD + 1)))
        prompt = " ".join("".join(self.chance.choices(LETTERS, k=WORD)) for _ in range(num_words))
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        answer = _Answer(time.perf_counter(), is_alone)
        async with self.session.post("/v1/completions", json=body) as response:
            await _require_ok(response)
            async for line in response.content:
                now_s = time.perf_counter()
                if line.startswith(b"data: {"):
                    self._note(answer, json.loads(line[len("data: ") :]), now_s, str(response.url))
        if not (answer.token_s and answer.num_prompt):
            raise RecordingError(str(response.url), "streams no tokens, or no usage at their end", REMEDY)
        self.num_chars = len(prompt) / answer.num_prompt
        return answer

    @staticmethod
    def _note(answer: _Answer, event: dict[str, Any], now_s: float, url: str) -> None:
        """Note the tokens of an event, each with its time, or the usage at the end."""
        if "error" in event:
            raise RecordingError(url, f"ended an answer with {json.dumps(event['error']):.200}", REMEDY)
        usage = event.get("usage")
        if usage:
            answer.num_prompt, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices", ()):
            is_one = bool(choice["text"])  # of servers that do not tell the tokens of an event
            answer.token_s += [now_s] * (len(choice["token_ids"]) if "token_ids" in choice else is_one)


async def _measured(
    root: str, seconds: float, api_key: str | None, show: Callable[[float], None], chance: random.Random
) -> list[_Answer]:
    """Send rounds of requests until the time is up."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(root, headers=headers, timeout=timeout, connector=connector) as session:
            model, longest = await _model(session, root)
            client = _Client(session, model, chance)
            await client.ask(SHORTEST, NUM_OUTPUT_ALONE, is_alone=True)  # loads what loads at first
            return await _rounds(client, min(LONGEST_PROMPT, longest - NUM_OUTPUT), seconds, show)
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as problem:
        raise RecordingError(root, f"{type(problem).__name__}: {problem}", REMEDY) from problem


async def _rounds(client: _Client, longest: int, seconds: float, show: Callable[[float], None]) -> list[_Answer]:
    answers: list[_Answer] = []
    begun_s = time.perf_counter()
    num_rounds = 0
    while (so_far_s := time.perf_counter() - begun_s) < seconds:
        show(so_far_s)
        for place in range(PROMPTS_A_ROUND):
            share = (place + client.chance.random() * (place > 0)) / PROMPTS_A_ROUND
            length = round(SHORTEST * (longest / SHORTEST) ** share)
            answers.append(await client.ask(length, NUM_OUTPUT_ALONE, is_alone=True))
        number = BATCHES[num_rounds % len(BATCHES)]
        tokens_per_s = max(each.num_prompt / (each.token_s[0] - each.start_s) for each in answers if each.is_alone)
        most = min(longest, MOST_IN_BATCH // number, int(tokens_per_s * seconds * SHARE_OF_BATCH) // number)
        halves = [(num_rounds % 2 + client.chance.random()) / 2 for _ in range(number)]
        lengths = [round(SHORTEST * (max(SHORTEST, most) / SHORTEST) ** half) for half in halves]
        answers += await asyncio.gather(*(client.ask(each, NUM_OUTPUT, is_alone=False) for each in lengths))
        num_rounds += 1
    return answers


async def _model(session: aiohttp.ClientSession, root: str) -> tuple[str, int]:
    """Return the first served model, and the tokens of its longest sequence, which some servers tell."""
    async with session.get("/v1/models") as response:
        await _require_ok(response)
        models = (await response.json())["data"]
    if not models:
        raise RecordingError(root, "serves no model", REMEDY)
    longest = models[0].get("max_model_len")
    return models[0]["id"], longest if isinstance(longest, int) else LONGEST_PROMPT + NUM_OUTPUT


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    if not response.ok:
        told = (await response.text())[:200]
        raise RecordingError(str(response.url), f"answered {response.status}: {told}", REMEDY)
