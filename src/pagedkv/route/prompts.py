"""Prompts: the tokens of a request's prompt, as the engine that serves it will see them.

An engine applies its own chat template, so it is asked: POST /tokenize takes a prompt or a conversation (vLLM; SGLang
takes prompts). With a tokenizer here no engine is asked. A body that is not understood, or an engine that does not
answer in time, costs the hit: the request is then routed by load, and served as any other.

Anthropic's conversations are tokenised as vLLM turns them into OpenAI's: system texts joined, texts of a message as its
parts. What an engine turns into something else, such as images, ends the predicted prefix where it begins.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import aiohttp
import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
PATHS: Final = frozenset({COMPLETIONS, CHAT, MESSAGES, RESPONSES})
OF_CHATS: Final = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
OF_TEXTS: Final = ("model", "prompt", "add_special_tokens")
NBYTES_A_TOKEN: Final = 4
"""For the length of a prompt whose tokens are not known."""
MOST_TOKEN_ID: Final = 2**31 - 1
NO_PROMPT: Final = "it has no prompt"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request's prompt.

    Args:
        token_ids: int32 ``[n]``; None: not known.
        keys: its adapter and salt.
        num_tokens: its length, estimated where the tokens are not known.
        seconds: what tokenising took.
        problem: why the tokens are not known; None: they are.
    """

    token_ids: Int32Array | None
    keys: RequestKeys
    num_tokens: int
    seconds: float
    problem: str | None = None


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Tokenise a text: ``input_ids``."""
        ...

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:  # noqa: ANN401 - as transformers has it
        """Tokenise a conversation: ``input_ids``."""
        ...


@final
class Prompts:
    """Reads prompts.

    Args:
        session: asks engines; None: none is asked, so texts need a tokenizer.
        timeout_s: most seconds of one question.
        tokenizer: one of transformers, which is asked in place of engines; None: engines are.

    Attributes:
        adapters: names of models that are adapters of another one.
    """

    def __init__(
        self, session: aiohttp.ClientSession | None, timeout_s: float, tokenizer: Tokenizer | None = None
    ) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._tokenizer = tokenizer
        self.adapters: frozenset[str] = frozenset()

    async def read(self, path: str, body: bytes, url: str | None, authorization: str | None) -> Prompt:
        """Return the prompt of a request. Raises nothing: what is wrong with a body is for its engine to say.

        Args:
            path: the request's path; body: its body.
            url: an engine to ask; None: none is up.
            authorization: the request's header of that name, if it has one.
        """
        began_s = time.perf_counter()
        guess = len(body) // NBYTES_A_TOKEN
        keys = NO_KEYS
        try:
            values = json.loads(body)
            if not isinstance(values, dict):
                return Prompt(None, keys, guess, time.perf_counter() - began_s, "its body is no object")
            keys = self._keys(values)
            question = as_question(path, values)
            tokens = question if isinstance(question, list) else await self._ask(question, url, authorization)
            token_ids = as_tokens(tokens)
        except (ValueError, TypeError, AttributeError, LookupError) as problem:
            return Prompt(None, keys, guess, time.perf_counter() - began_s, f"{problem}"[:200] or NO_PROMPT)
        except (aiohttp.ClientError, TimeoutError) as problem:
            told = f"{url} did not tokenise it: {type(problem).__name__} {problem}"[:200]
            return Prompt(None, keys, guess, time.perf_counter() - began_s, told)
        return Prompt(token_ids, keys, len(token_ids), time.perf_counter() - began_s)

    def _keys(self, body: Any) -> RequestKeys:  # noqa: ANN401 - JSON
        salt, model = body.get("cache_salt"), body.get("model")
        lora = model if model in self.adapters else None
        return RequestKeys(lora, salt=salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else b"")

    async def _ask(self, question: dict[str, Any], url: str | None, authorization: str | None) -> Any:  # noqa: ANN401
        async with asyncio.timeout(self._timeout_s):
            if self._tokenizer is not None:
                return await asyncio.to_thread(_tokenize, self._tokenizer, question)
            if url is None or self._session is None:
                raise LookupError("no engine is up to tokenise it")
            headers = {"Content-Type": "application/json"}
            headers |= {} if authorization is None else {"Authorization": authorization}
            body = json.dumps(question).encode()
            async with self._session.post(f"{url}/tokenize", data=body, headers=headers) as answer:
                if answer.status != 200:  # noqa: PLR2004 - HTTP's
                    raise ValueError(f"{url}/tokenize answered {answer.status}")
                return json.loads(await answer.read())["tokens"]


def as_question(path: str, body: dict[str, Any]) -> dict[str, Any] | list[int]:
    """Turn a body into what /tokenize takes, or return its tokens if it has them. Raises as bodies can be wrong."""
    match path:
        case "/v1/completions":
            prompt = body["prompt"]
            if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
                prompt = prompt[0]  # of several, the first decides
            if isinstance(prompt, list):
                return prompt
            return {name: body[name] for name in OF_TEXTS if name in body} | {"prompt": prompt}
        case "/v1/messages":
            return _of_messages(body)
        case "/v1/responses":
            given = body["input"]
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            if body.get("instructions"):
                messages = [{"role": "system", "content": body["instructions"]}, *messages]
            return {"model": body.get("model"), "messages": messages}
        case _:
            return {name: body[name] for name in OF_CHATS if body.get(name) is not None}


def _of_messages(body: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if system:
        said = [system] if isinstance(system, str) else [part["text"] for part in system if part.get("text")]
        shown = [text for text in said if not text.startswith("x-anthropic-billing-header")]
        messages += [{"role": "system", "content": "".join(shown)}] if shown else []
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
            continue
        texts = [{"type": "text", "text": part["text"]} for part in content if part.get("type") == "text"]
        calls = [_call(part) for part in content if part.get("type") == "tool_use"]
        for part in content:
            if part.get("type") == "tool_result":
                told = part.get("content") or ""
                text = told if isinstance(told, str) else "\n".join(each.get("text", "") for each in told)
                messages.append({"role": "tool", "tool_call_id": part.get("tool_use_id", ""), "content": text})
        if texts or calls:
            plain: Any = texts[0]["text"] if len(texts) == 1 else texts
            content_of = {"content": plain} if texts else {}
            messages.append({"role": message["role"], **content_of, **({"tool_calls": calls} if calls else {})})
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool["input_schema"],
            },
        }
        for tool in body.get("tools") or ()
    ]
    return {"model": body.get("model"), "messages": messages, **({"tools": tools} if tools else {})}


def _call(part: dict[str, Any]) -> dict[str, Any]:
    function = {"name": part.get("name", ""), "arguments": json.dumps(part.get("input") or {})}
    return {"id": part.get("id", ""), "type": "function", "function": function}


def as_tokens(tokens: Sequence[object]) -> Int32Array:
    """Check token ids from outside. Raises TypeError: they are no int32."""
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each <= MOST_TOKEN_ID for each in tokens):
        raise TypeError("its prompt is no list of token ids")
    return np.array(tokens, np.int32)


def tokenizer_named(name: str) -> Tokenizer:
    """Load a tokenizer of transformers, from a folder or by its name. Raises as transformers does."""
    from pagedkv.probe.compat import load_tokenizer  # noqa: PLC0415 - imports torch, which a router else does not need

    loaded: Tokenizer = load_tokenizer(name)
    return loaded


def _tokenize(tokenizer: Tokenizer, question: dict[str, Any]) -> list[int]:
    if "messages" not in question:
        special = question.get("add_special_tokens", True)
        return list(tokenizer(question["prompt"], add_special_tokens=special)["input_ids"])
    found = tokenizer.apply_chat_template(
        question["messages"],
        tools=question.get("tools"),
        add_generation_prompt=question.get("add_generation_prompt", True),
        continue_final_message=question.get("continue_final_message", False),
        chat_template=question.get("chat_template"),
        tokenize=True,
        return_dict=True,
        **(question.get("chat_template_kwargs") or {}),
    )
    return list(found["input_ids"])
