"""ContentBlocks: turns an answer's parts into Anthropic's content blocks and the events that stream them."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, final

from pydantic_core import from_json

from pagedkv.server.parsing import CallArguments, CallBegin, CallEnd, Part, ReasoningPart, TextPart

__all__ = ["ContentBlocks"]

NEW: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


@final
class ContentBlocks:
    """Builds the content of one answer.

    Attributes:
        blocks: the blocks so far; the input of a call is complete once its block has ended.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: str | None = None
        self._pieces: list[str] = []

    def add(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        """Add parts; yield the events that report them."""
        for part in parts:
            match part:
                case TextPart():
                    yield from self._opened("text")
                    yield self._delta("text_delta", "text", part.text)
                case ReasoningPart():
                    yield from self._opened("thinking")
                    yield self._delta("thinking_delta", "thinking", part.text)
                case CallBegin():
                    yield from self._closed()
                    block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
                    yield self._begin("tool_use", block)
                case CallArguments():
                    yield self._delta("input_json_delta", "partial_json", part.text)
                case CallEnd():
                    yield from self._closed()

    def finish(self) -> Iterator[dict[str, Any]]:
        """End the last block; yield the event that reports its end."""
        yield from self._closed()

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._closed()
            yield self._begin(kind, dict(NEW[kind]))

    def _begin(self, kind: str, block: dict[str, Any]) -> dict[str, Any]:
        self._open = kind
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        self._pieces.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, field: text}}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        text = "".join(self._pieces)
        block = self.blocks[-1]
        if self._open == "tool_use":
            block["input"] = _as_input(text)
        else:
            block[self._open] = text
        self._open = None
        self._pieces.clear()
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}


def _as_input(text: str) -> dict[str, Any]:
    """Read a call's arguments; incomplete ones give an empty object."""
    with suppress(ValueError):
        value = from_json(text)
        if isinstance(value, dict):
            return value
    return {}
