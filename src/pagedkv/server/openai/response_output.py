"""ResponseOutput: turns an answer's parts into items of the Responses protocol and the events that build them."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final

from pagedkv.server.parsing import CallArguments, CallBegin, CallEnd, Part, ReasoningPart, TextPart
from pagedkv.server.service import new_id

__all__ = ["ResponseOutput"]

Event: TypeAlias = dict[str, Any]


@final
class ResponseOutput:
    """Builds the output of one answer. Its events have no sequence number yet.

    Attributes:
        items: the items so far; an item is complete once it has ended.
        reasoning: the text of all reasoning.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._is_open = False
        self._pieces: list[str] = []

    def add(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Add parts; yield the events that report them."""
        for part in parts:
            match part:
                case TextPart():
                    if not self._has_open("message"):
                        yield from self.finish()
                        yield from self._begin_content(
                            {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": []}
                        )
                    yield self._delta("response.output_text.delta", part.text, content_index=0, logprobs=[])
                case ReasoningPart():
                    if not self._has_open("reasoning"):
                        yield from self.finish()
                        yield from self._begin_content(
                            {"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": []}
                        )
                    self.reasoning += part.text
                    yield self._delta("response.reasoning_text.delta", part.text, content_index=0)
                case CallBegin():
                    yield from self.finish()
                    item = {"id": new_id("fc_"), "type": "function_call", "call_id": part.call_id, "name": part.name}
                    yield self._begin({**item, "arguments": ""})
                case CallArguments():
                    yield self._delta("response.function_call_arguments.delta", part.text)
                case CallEnd():
                    yield from self.finish()

    def finish(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if there is one; yield the events that report its end.

        Args:
            status: the item's status: ``completed`` or ``incomplete``.
        """
        if not self._is_open:
            return
        item = self.items[-1]
        text = "".join(self._pieces)
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = _content(item["type"], text)
            item["content"] = [part]
            if item["type"] == "message":
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        self._is_open = False
        self._pieces.clear()
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def _has_open(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _begin(self, item: dict[str, Any]) -> Event:
        self._is_open = True
        self.items.append({**item, "status": "in_progress"})
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }

    def _begin_content(self, item: dict[str, Any]) -> Iterator[Event]:
        yield self._begin(item)
        yield self._event("response.content_part.added", content_index=0, part=_content(item["type"], ""))

    def _delta(self, kind: str, text: str, **more: object) -> Event:
        self._pieces.append(text)
        return self._event(kind, delta=text, **more)

    def _event(self, kind: str, **more: object) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
