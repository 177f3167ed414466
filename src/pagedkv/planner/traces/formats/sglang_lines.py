"""SGLang's log lines about requests, as text and as JSON: a line on arrival, and a line after the answer.

=====================================================  ================================================================
line                                                   what is taken from it
=====================================================  ================================================================
``Receive: obj=...(rid=...``, ``Finish: obj=...``      arrival; prompt, answer and counts
``{"event": "request.received", ...}``, ``finished``   the same; a time in brackets may stand before it
=====================================================  ================================================================

At level 2, texts and lists of tokens longer than 2,048 are cut in the middle: the content of such a prompt is unknown.
Its length is known, since ``meta_info`` counts tokens at every level.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pagedkv.planner.traces.formats.bodies import as_object
from pagedkv.planner.traces.formats.calls import ABANDONED, Call
from pagedkv.planner.traces.formats.messages import Part, ids_part, text_part
from pagedkv.planner.traces.formats.parsing import FIX_THE_ROW, MAX_SESSION_CHARACTERS, checked_tokens
from pagedkv.planner.traces.formats.vllm_lines import IDS, TEXT, written_ids, written_text
from pagedkv.planner.traces.formats.waiting import WaitingCalls
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.texts import TextTokens

__all__ = ["EVENT_KEYS", "SglangLines", "is_sglang_line"]

LOG_LINE: Final = re.compile(r"^\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)[^\]]*\]")
JSON_LINE: Final = re.compile(r"^(?:\[\d{4}-[^\]]*\] )?(?P<row>\{.*\})$")
EVENT: Final = re.compile(r"\] (?P<event>Receive|Finish): obj=\w+\(rid='(?P<id>[^']*)'")
ABORT: Final = re.compile(r"'finish_reason': \{'type': 'abort'(?:.*?'status_code': (?P<code>\d+))?")
SESSION: Final = re.compile(r"\bsession_id='(?P<id>[^']+)'")
EVENT_KEYS: Final = frozenset({"event", "timestamp"})
RECEIVED: Final = "request.received"
FINISHED: Final = "request.finished"
CUT_LENGTH: Final = 2048
"""Characters of a text, or entries of a list, that remain at level 2: half of them from each end."""
CUT: Final = "..."


def is_sglang_line(first: Line, keys: Mapping[str, object]) -> bool:
    """Return whether SGLang wrote a file, by its first line; ``keys`` are those of a JSON object."""
    if keys:
        event = as_object(first.text).get("event") if keys.keys() >= EVENT_KEYS else None
        return isinstance(event, str) and ("rid" in keys or event.startswith("request."))
    return bool(LOG_LINE.match(first.text))


@dataclass(slots=True)
class SglangLines:
    """Adds SGLang's lines to the waiting calls.

    Args:
        waiting: the calls.
        texts: how texts become tokens.
    """

    waiting: WaitingCalls
    texts: TextTokens

    def take(self, line: Line) -> bool:
        """Read a line, if it is about a request; return whether it is. Raises TraceError."""
        written = JSON_LINE.match(line.text)
        if written is not None:
            return self._take_json(line, written["row"])
        event = EVENT.search(line.text)
        if event is None:
            return False
        self._take_text(line, event)
        return True

    # As text

    def _take_text(self, line: Line, event: re.Match[str]) -> None:
        head = LOG_LINE.match(line.text)
        if head is None:
            raise line.fault(
                "a request has no time", "Keep SGLang's own format of log lines: [2025-05-01 12:30:00] ..."
            )
        when = head["time"]
        call = self.waiting.arrived(line, event["id"], lambda: when)
        obj, _, out = line.text.partition(", out=")
        self._set_prompt(call, *self._part(line, obj, "=", ("input_ids", "text")))
        most = re.search(r"'max_new_tokens': (\d+)", obj)
        call.num_most = call.num_most if most is None else int(most[1])
        session = SESSION.search(obj)
        call.session = call.session if session is None else session["id"][:MAX_SESSION_CHARACTERS]
        if event["event"] == "Finish":
            part, _ = self._part(line, out, "': ", ("output_ids", "text"))
            counts = {
                name: int(count[1])
                for name in ("prompt_tokens", "completion_tokens")
                if (count := re.search(rf"'{name}': (\d+)", out)) is not None
            }
            aborted = ABORT.search(out)
            self._finish(call, part, counts, None if aborted is None else aborted["code"] or ABANDONED)

    def _part(self, line: Line, text: str, between: str, keys: tuple[str, str]) -> tuple[Part | None, bool]:
        """Read the ids of a line, else its text; return the part, and whether it was cut."""
        quoted = re.search(rf"\b{keys[1]}{between}(?P<text>{TEXT})(?P<cut> \.\.\. )?", text)
        behind = text if quoted is None else text[quoted.end() :]  # since a text may contain anything
        ids = re.search(rf"\b{keys[0]}{between}(?P<ids>{IDS})(?P<cut> \.\.\. )?", behind)
        if ids is not None and not ids["cut"] and any(mark.isdigit() for mark in ids["ids"]):
            return ids_part(checked_tokens(line, written_ids(line, ids["ids"]))), False
        if quoted is None or quoted["cut"]:  # the content of a cut text is unknown
            return None, quoted is not None or (ids is not None and bool(ids["cut"]))
        return text_part(written_text(line, quoted["text"]), self.texts), False

    # As JSON

    def _take_json(self, line: Line, written: str) -> bool:
        try:
            row = msgspec.json.decode(written, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise line.fault(f"not a whole JSON object: {error}", FIX_THE_ROW) from error
        if row.get("event") not in {RECEIVED, FINISHED}:
            return False
        when = next((row[key] for key in ("timestamp", "time", "ts") if key in row), None)
        if not isinstance(when, str | int | float):
            raise line.fault("a request has no timestamp", "Keep SGLang's own JSON lines")
        names, obj = row.get("rid"), as_object(row.get("obj"))
        if isinstance(names, str):
            self._take_object(line, names, when, obj, row)
            return True
        for place, name in enumerate(names if isinstance(names, list) else ()):  # the requests of a batch
            if isinstance(name, str):
                self._take_object(line, name, when, _one_of(obj, place), row)
        return True

    def _take_object(
        self, line: Line, name: str, when: str | float, obj: Mapping[str, Any], row: Mapping[str, Any]
    ) -> None:
        call = self.waiting.arrived(line, name, lambda: when)
        self._set_prompt(call, *self._json_part(line, obj, "input_ids", "text"))
        parameters = as_object(obj.get("sampling_params"))
        most, num_samples = parameters.get("max_new_tokens"), parameters.get("n")
        call.num_most = most if type(most) is int else call.num_most
        call.num_samples = num_samples if type(num_samples) is int and num_samples > 0 else call.num_samples
        session = obj.get("session_id") or as_object(obj.get("session_params")).get("id")
        call.session = session[:MAX_SESSION_CHARACTERS] if isinstance(session, str) else call.session
        if row["event"] == FINISHED:
            out = as_object(row.get("out"))
            meta = as_object(out.get("meta_info"))
            reason = as_object(meta.get("finish_reason"))
            failure = str(reason.get("status_code") or ABANDONED) if reason.get("type") == "abort" else None
            self._finish(call, self._json_part(line, out, "output_ids", "text")[0], meta, failure)

    def _json_part(self, line: Line, obj: Mapping[str, Any], ids_key: str, text_key: str) -> tuple[Part | None, bool]:
        ids, text = obj.get(ids_key), obj.get(text_key)
        if isinstance(ids, list) and ids and CUT not in ids:
            return ids_part(checked_tokens(line, ids)), False
        if isinstance(text, str) and text and not _is_cut(text):
            return text_part(text, self.texts), False
        return None, bool(ids) or bool(text)

    # Both

    def _set_prompt(self, call: Call, part: Part | None, is_cut: bool) -> None:  # noqa: FBT001 - as _part returns
        if part is not None:
            call.prompt = [part]
        call.is_cut = call.prompt is None and (call.is_cut or is_cut)

    def _finish(self, call: Call, part: Part | None, counts: Mapping[str, Any], failure: str | None) -> None:
        call.answer = None if part is None else [part]
        for name in ("prompt_tokens", "completion_tokens"):
            count = counts.get(name)
            if type(count) is int and name == "prompt_tokens":
                call.num_prompt = count
            elif type(count) is int:
                call.num_answer = count * call.num_samples  # counted for each sequence
        call.failure = failure
        call.is_answered = True


def _is_cut(text: str) -> bool:
    half = CUT_LENGTH // 2
    return len(text) == CUT_LENGTH + len(CUT) and text[half : half + len(CUT)] == CUT


def _one_of(obj: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """Return one request of a batch, in which each list has one entry a request."""

    def entry(value: Sequence[Any]) -> object:
        return value[place] if isinstance(value, list) and place < len(value) else None

    batched = {key: entry(obj[key]) for key in ("text", "input_ids") if isinstance(obj.get(key), list)}
    return {**obj, **batched}
