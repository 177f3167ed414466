"""Prompts of ``pagedkv generate``: on the command line, or in a file of JSON lines.

A line is a text, or an object with one of ``prompt`` (a text), ``token_ids`` and ``messages``, and fields of
SamplingParams that override the options::

    {"prompt": "The red kite is in", "max_tokens": 8}
    {"messages": [{"role": "user", "content": "Where is the red kite?"}], "n": 2}
    {"token_ids": [5, 17, 256]}
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedkv.errors import RequestError, TraceError

if TYPE_CHECKING:
    from pagedkv.engine import SamplingParams

__all__ = ["PromptFile", "PromptRequest", "typed_prompts"]

KINDS: Final = ("prompt", "token_ids", "messages")
REMEDY: Final = (
    'Each line must be a text in quotes, or an object with one of "prompt", "token_ids" and "messages", as '
    '{"prompt": "...", "max_tokens": 8}'
)


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt, and its sampling parameters.

    Args:
        where: place of the prompt, for errors.
        prompt: a text, token ids or messages.
        params: its sampling parameters.
    """

    where: str
    prompt: Any
    params: "SamplingParams"


def typed_prompts(prompts: Sequence[str], params: "SamplingParams", *, is_chat: bool) -> Iterator[PromptRequest]:
    """Yield the prompts of the command line; with ``is_chat`` each is a user's message."""
    for number, prompt in enumerate(prompts, 1):
        yield PromptRequest(f"--prompt {number}", [{"role": "user", "content": prompt}] if is_chat else prompt, params)


class PromptFile:
    """A file of prompts, read whole; its lines are interpreted later, when the default parameters are known.

    Raises:
        TraceError: the file cannot be read, or has no prompt. The message has file, line, reason and remedy.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = f"cannot be read: {getattr(problem, 'strerror', None) or problem}"
            raise TraceError(self._path, None, reason, "Name a file of JSON lines in UTF-8") from problem
        self._lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if not self._lines:
            raise TraceError(self._path, None, "has no prompt", REMEDY)

    def requests(self, params: "SamplingParams") -> list[PromptRequest]:
        """Make a prompt from each line, with ``params`` where the line does not override them. Raises TraceError."""
        return [_prompt_request(self._path, number, line, params) for number, line in self._lines]


def _prompt_request(path: str, number: int, line: str, params: "SamplingParams") -> PromptRequest:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise TraceError(path, number, f"is no JSON ({problem})", REMEDY) from problem
    if isinstance(row, str):
        return PromptRequest(where, row, params)
    kinds = [kind for kind in KINDS if isinstance(row, dict) and kind in row]
    if len(kinds) != 1:
        found = f"has {', '.join(kinds)}" if kinds else "has no prompt"
        raise TraceError(path, number, found if isinstance(row, dict) else f"is {line[:40]!r}", REMEDY)
    prompt = row.pop(kinds[0])
    if not isinstance(prompt, str if kinds[0] == "prompt" else list):
        raise TraceError(path, number, f'"{kinds[0]}" is {json.dumps(prompt)[:40]}', REMEDY)
    known = {each.name for each in fields(params)}
    if row.keys() - known:
        strange = ", ".join(sorted(row.keys() - known))
        raise TraceError(path, number, f"has unknown fields: {strange}", f"Known fields: {', '.join(sorted(known))}")
    try:
        return PromptRequest(where, prompt, replace(params, **row))
    except (RequestError, TypeError) as problem:
        raise TraceError(path, number, str(problem), "Change it, or leave it to the options") from problem
