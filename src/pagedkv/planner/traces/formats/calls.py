"""Calls of a log as requests: the parts of their texts, their lengths, failures and usages.

A log has texts, or stated lengths (usage, meta data), or tokens, or some of each. Stated lengths are used where they
exist; content comes from tokens or texts (:mod:`~pagedkv.planner.traces.formats.parts`), and both must fit each other
(:mod:`~pagedkv.planner.traces.formats.reconciling`). A length that is not stated is estimated from the characters of
its text, and a note reports this. Failed calls were not served in full: by default they are left out, and counted by
kind of failure. A usage counts tokens under the names of OpenAI's or Anthropic's interface, or of those like them. The
layout of each log determines which of a row's objects is the body, the answer or the usage.

Stated usage gives lengths without tokens; texts show which prompts begin alike. If every prompt were stretched to its
own length, two prompts that begin alike would get different tokens there, and nothing would hit. So a part keeps the
length that it first got after the same preceding parts. In a prompt that continues another, the known parts keep their
lengths, and the new parts share the rest by their weights. A text that begins like an earlier one after the same parts
is stretched at the rate of that one, as far as the two agree, so that equal texts get equal tokens.

The lengths always add up to the stated length. If the known parts are longer than the whole prompt (another model, an
answer without its thoughts), they keep their lengths as far as they fit, and the rest is divided anew.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec
import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.traces.clocks import ArrivalClock
from pagedkv.planner.traces.formats.parsing import (
    FIX_THE_ROW,
    MAX_LENGTH,
    MAX_SESSION_CHARACTERS,
    Lengths,
    Reading,
    RowFormat,
    check_range,
    check_row,
    decoded,
)
from pagedkv.planner.traces.formats.parts import PICTURE_TOKENS, JsonObject, Part, answer_parts, as_list
from pagedkv.planner.traces.formats.reconciling import Reconciler, refuse_sum
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import TextTokens, marked_tokens, stretched_tokens

MOST_REMEMBERED: Final = 2**17
"""Number of parts whose length is remembered, some 60 MiB; a turn comes soon after the previous one."""
HEAD_PIECES: Final = 16
"""A text begins like another one if this number of leading pieces are equal."""
_Value = TypeVar("_Value")


class _Recent(Generic[_Value]):
    """A dictionary of the most recently used entries."""

    def __init__(self) -> None:
        self._values: dict[bytes, _Value] = {}

    def get(self, key: bytes) -> _Value | None:
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        return value

    def set_default(self, key: bytes, value: _Value) -> _Value:
        known = self.get(key)
        if known is not None:
            return known
        self._values[key] = value
        if len(self._values) > MOST_REMEMBERED:
            del self._values[next(iter(self._values))]
        return value


class KnownLengths:
    """Makes the tokens of prompts and answers, and remembers the lengths of their parts."""

    def __init__(self) -> None:
        self._lengths: _Recent[int] = _Recent()
        self._rates: _Recent[tuple[int, int]] = _Recent()

    def prompt(self, parts: Sequence[Part], stated: int | None) -> tuple[Int32Array, bytes]:
        """Make the tokens of a prompt.

        Args:
            parts: parts of the prompt, in order.
            stated: length of the prompt; None where the log has none: then each part has its known length, or else
                that of its pieces.

        Returns:
            int32 ``[stated]``, and a digest that identifies the whole prompt, for :meth:`answer`. O(tokens).
        """
        return self._tokens(parts, stated, sha256(b"prompt").digest())

    def answer(self, parts: Sequence[Part], stated: int | None, prompt: bytes, num_thoughts: int = 0) -> Int32Array:
        """Make the tokens of an answer; a later prompt that contains it after the same prompt gets the same tokens.

        Args:
            parts: parts of the answer.
            stated: its length, including thoughts.
            prompt: the digest of the prompt.
            num_thoughts: tokens at its beginning that no later prompt contains.
        """
        if not num_thoughts:
            return self._tokens(parts, stated, prompt)[0]
        num_thoughts = num_thoughts if stated is None else min(num_thoughts, stated)
        visible = self._tokens(parts, None if stated is None else stated - num_thoughts, prompt)[0]
        return np.concatenate([marked_tokens(sha256(b"thoughts" + prompt).digest(), num_thoughts), visible])

    def _tokens(self, parts: Sequence[Part], stated: int | None, parent: bytes) -> tuple[Int32Array, bytes]:
        names = _names(parts, parent)
        if parts and all(part.is_exact for part in parts):
            return np.concatenate([part.pieces for part in parts]), names[-1]
        heads = [
            sha256(b"head" + name + part.pieces[:HEAD_PIECES].tobytes()).digest()
            for name, part in zip(names, parts, strict=False)
        ]
        known = [self._lengths.get(name) for name in names[1:]]
        if stated is None:
            lengths = [
                self._scaled(part, head) if length is None else length
                for part, head, length in zip(parts, heads, known, strict=True)
            ]
        else:
            lengths = _shared_out(parts, known, stated)
            for name, length in zip(names[1:], lengths, strict=True):
                self._lengths.set_default(name, length)
        tokens = []
        for part, head, length, name in zip(parts, heads, lengths, names[1:], strict=True):
            rate = (max(1, length), max(1, len(part.pieces)))
            rate = self._rates.set_default(head, rate) if length else rate
            tokens.append(stretched_tokens(part.pieces, rate, length, name))
        rest = 0 if stated is None else stated - sum(lengths)
        return np.concatenate([*tokens, marked_tokens(names[-1], rest)]), names[-1]

    def _scaled(self, part: Part, head: bytes) -> int:
        """Estimate the length of a new part of a prompt whose length is not stated."""
        most, least = self._rates.get(head) or (1, 1)
        return len(part.pieces) * most // least


def _shared_out(parts: Sequence[Part], known: Sequence[int | None], stated: int) -> list[int]:
    """Divide a stated length: known lengths first, as far as they leave some for the rest, then shares of the rest.

    The lengths add up to ``stated``, unless there are no parts.
    """
    lengths: list[int] = []
    num_left = stated
    for length in known:
        num_behind = len(parts) - len(lengths) - 1
        if length is None or length > num_left - num_behind or (not num_behind and length != num_left):
            break
        lengths.append(length)
        num_left -= length
    weights = np.cumsum([part.weight for part in parts[len(lengths) :]], dtype=np.int64)
    if len(weights):
        ends = weights * num_left // max(1, int(weights[-1]))
        ends[-1] = num_left
        lengths += np.diff(ends, prepend=0).tolist()
    return lengths


def _names(parts: Sequence[Part], parent: bytes) -> list[bytes]:
    """Return a digest of each part and all parts before it, starting from the parent's digest."""
    names = [parent]
    for part in parts:
        names.append(sha256(names[-1] + part.pieces.tobytes()).digest())
    return names


NO_ANSWER: Final = "no answer"
ABANDONED: Final = "aborted"
OTHER_CACHE: Final = "answered from a cache of answers"
MOST_HELD: Final = 256
"""Calls without an answer that are held until one has an answer; in a log without answers, no call counts as failed."""
FEWEST_AT_LIMIT: Final = 5
AT_LIMIT_SHARE: Final = 4
"""If at least a quarter of all prompts have the greatest length, prompts were probably cut to it."""


@dataclass(slots=True, eq=False)
class Call:
    """What a log states about one request.

    Args:
        line: the first line about the request.
        arrival_s: time of arrival.
        prompt: content of the prompt; None where the log has none.
        answer: content of the answer; None where the log has none.
        num_prompt: stated length of the prompt, or None.
        num_answer: stated length of the answers, all sequences together, or None.
        num_thoughts: tokens of the answer that are in none of its texts.
        num_most: the greatest allowed length of an answer, used if nothing else is known about it.
        session: name of the conversation.
        tenant: tenant of the request.
        num_samples: sequences of the one prompt.
        failure: the kind of failure, in a word; None if it succeeded.
        is_answered: whether the log has any part of an answer.
        is_cut: whether texts in the log were cut, so that the prompt is None.
    """

    line: Line
    arrival_s: float
    prompt: Sequence[Part] | None = None
    answer: Sequence[Part] | None = None
    num_prompt: int | None = None
    num_answer: int | None = None
    num_thoughts: int = 0
    num_most: int | None = None
    session: str | None = None
    tenant: str | None = None
    num_samples: int = 1
    failure: str | None = None
    is_answered: bool = True
    is_cut: bool = False


class _Side:
    """Counts the sources of lengths and contents, of prompts or of answers."""

    def __init__(self) -> None:
        self.num_stated = 0  # texts with a stated length
        self.num_exact = 0  # tokens
        self.num_estimated = 0  # texts alone
        self.num_lengths = 0  # a stated length alone

    def count(self, parts: Sequence[Part] | None, stated: int | None) -> None:
        if parts is None:
            self.num_lengths += stated is not None
        elif parts and all(part.is_exact for part in parts):
            self.num_exact += 1
        elif stated is not None:
            self.num_stated += 1
        else:
            self.num_estimated += any(len(part.pieces) for part in parts)

    @property
    def total(self) -> int:
        return self.num_stated + self.num_exact + self.num_estimated + self.num_lengths


class _CutDetector:
    """Detects prompts that the log's writer cut: many prompts have the greatest length, in tokens or in characters.

    Prompts that differ may have become equal by the cut, behind a long prompt that all share.
    """

    def __init__(self) -> None:
        self._num = 0
        self._longest: dict[str, tuple[int, int]] = {}

    def watch(self, unit: str, length: int) -> None:
        self._num += 1
        longest, num_longest = self._longest.get(unit, (0, 0))
        if length >= longest:
            self._longest[unit] = length, num_longest + 1 if length == longest else 1

    def notes(self) -> Iterator[str]:
        for unit, (longest, num_longest) in self._longest.items():
            if num_longest >= FEWEST_AT_LIMIT and num_longest * AT_LIMIT_SHARE >= self._num:
                yield (
                    f"{num_longest:,} of {self._num:,} prompts have {longest:,} {unit} and none has more: if the log "
                    "cuts prompts (--max-log-len of vLLM), their lengths and what they share are unknown"
                )


class Calls:
    """Makes requests from the calls of one file.

    Args:
        reading: the user's statements about the file.
        unit: unit of its times, unless their values determine it.
        usage: name of the field with stated lengths, for messages.
    """

    def __init__(self, reading: Reading, unit: str = "s", usage: str = "usage") -> None:
        self.clock = ArrivalClock(unit, reading.time_unit)
        self._reading = reading
        self._usage = usage
        self._lengths = KnownLengths()
        self._prompts, self._answers = _Side(), _Side()
        self._cut_detector = _CutDetector()
        self._prompt_reconciler, self._answer_reconciler = Reconciler("prompt"), Reconciler("answer")
        self._unknown: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._num_pictures = self._num_cut = self._num_served = 0
        self._num_without_output = self._num_allowed = 0
        self._held: list[Call] | None = []
        self._has_answers = False
        self._last: Line | None = None

    @property
    def description(self) -> str:
        """Sources of times, lengths and contents, and what was left out, as text for users."""
        return ", ".join(filter(None, [self.times_description, self._lengths_description(), *self._details()]))

    @property
    def times_description(self) -> str:
        """The unit of the times that were read, as text; empty where generated times replace them."""
        return "" if self._reading.has_generated_arrivals else self.clock.description

    @property
    def notes(self) -> list[str]:
        """List warnings about figures of these requests."""
        notes = [*self._reading.notes_of(self.clock), *self._cut_detector.notes()]
        return [*notes, *self._assumed(), *self._not_understood()]

    def arrival_s(self, line: Line, value: object) -> float:
        """Read a time. Raises TraceError."""
        if self._reading.has_generated_arrivals:
            return 0.0
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            raise line.fault(f"the time is {value!r:.60}", "Give a number, or a date as in 2024-05-01T12:30:00.250Z")
        return self.clock.seconds(line, value, any_order=self._reading.any_order)

    def requests(self, call: Call) -> Iterator[Request]:
        """Yield the requests that are complete and in order after this call.

        Raises:
            TraceError: a length is out of range, or there is neither a length nor a content.
        """
        self._last = call.line
        if call.failure is not None or call.is_answered:
            if call.failure is None and not self._has_answers:
                self._has_answers = True
                yield from self._release(NO_ANSWER)
            yield from self._counted(call)
        elif self._has_answers:
            call.failure = NO_ANSWER
            yield from self._counted(call)
        elif self._held is None:
            yield from self._counted(call)
        else:
            self._held.append(call)
            if len(self._held) > MOST_HELD:
                yield from self._release(None)

    def finish(self) -> Iterator[Request]:
        """Yield the requests that were held back.

        Raises:
            TraceError: every call failed.
        """
        yield from self._release(None)
        self._prompt_reconciler.finish()
        self._answer_reconciler.finish()
        if self._failures and not self._num_served:
            assert self._last is not None
            raise self._last.fault(f"every request of the file failed ({self._failed()})", "Keep them: `keep_failed`")

    def _release(self, failure: str | None) -> Iterator[Request]:
        held, self._held = self._held or [], None
        for call in held:
            call.failure = failure
            yield from self._counted(call)

    def _counted(self, call: Call) -> Iterator[Request]:
        if call.failure is not None:
            self._failures[call.failure] += 1
            if not self._reading.keep_failed:
                return
        self._num_served += 1
        yield self._request(call)

    def _request(self, call: Call) -> Request:
        for name, stated in (("input_length", call.num_prompt), ("output_length", call.num_answer)):
            if stated is not None:
                check_range(call.line, name, stated, 0, MAX_LENGTH)
        num_answer = None if call.num_answer is None else -(-call.num_answer // call.num_samples)
        unknown = self._forget_unknown(call, num_answer)
        if call.prompt is None and call.num_prompt is None:
            raise call.line.fault(
                unknown or "neither the prompt of this request nor its length is in the log",
                "Let the engine log prompts (vLLM: --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG; SGLang: "
                "--log-requests --log-requests-level 3), or a service messages, a prompt or usage",
            )
        prompt, output = self._tokens(call, num_answer)
        num_output = num_answer if output is None else len(output)
        if num_output is None:
            self._num_without_output += call.num_most is None
            self._num_allowed += call.num_most is not None
            num_output = call.num_most
        self._num_cut += call.is_cut
        num_prompt = call.num_prompt or 0 if prompt is None else len(prompt)
        check_row(call.line, Lengths(num_prompt, num_output or 0), max(0.0, call.arrival_s))
        self._count(call, prompt, num_answer)
        return Request(
            call.arrival_s,
            num_prompt,
            num_output or 0,
            session=call.session,
            num_samples=call.num_samples,
            prompt_token_ids=prompt,
            output_token_ids=output if prompt is not None else None,
            tenant=call.tenant,
        )

    def _forget_unknown(self, call: Call, num_answer: int | None) -> str | None:
        """Drop contents that are not known; return why that of the prompt is not. Raises TraceError."""
        if call.answer is not None and _unknown(call.answer, num_answer) is not None:
            call.answer = None
        unknown = None if call.prompt is None else _unknown(call.prompt, call.num_prompt)
        if unknown is not None:
            call.prompt = None
            self._unknown[unknown] += 1
        return unknown

    def _tokens(self, call: Call, num_answer: int | None) -> tuple[Int32Array | None, Int32Array | None]:
        """Return the tokens of prompt and answer, as far as the log has their content."""
        prompt = output = None
        name = b""
        if call.prompt is not None:
            prompt, name = self._lengths.prompt(call.prompt, call.num_prompt)
            self._prompt_reconciler.watch(call.line, call.prompt, call.num_prompt, name)
        if call.answer is not None and call.num_samples == 1 and num_answer is not None:
            self._answer_reconciler.watch(call.line, call.answer, num_answer - call.num_thoughts)
        if call.answer is not None and (call.prompt is not None or num_answer is None):
            output = self._lengths.answer(call.answer, num_answer, name, call.num_thoughts)
        return prompt, output

    def _count(self, call: Call, prompt: Int32Array | None, num_answer: int | None) -> None:
        self._prompts.count(call.prompt, call.num_prompt)
        self._answers.count(call.answer, num_answer)
        if prompt is not None and call.num_prompt is None:
            num_characters = sum(part.num_characters for part in call.prompt or ())
            if num_characters:
                self._cut_detector.watch("characters", num_characters)
            else:
                self._cut_detector.watch("tokens", len(prompt))
            self._num_pictures += sum(part.is_media for part in call.prompt or ())

    def _lengths_description(self) -> str:
        prompts, answers = self._prompts, self._answers
        if not prompts.num_stated + prompts.num_exact + prompts.num_estimated:
            return f"lengths from its {self._usage}"
        if not prompts.num_stated + answers.num_stated + answers.num_lengths + prompts.num_lengths:
            if not prompts.num_exact:
                return self._reading.texts.description
            return ", ".join(filter(None, ["tokens of the log", self._estimated()]))
        texts = self._reading.texts
        by = "" if texts.is_estimate else f" ({texts.description})"
        content = "tokens" if not prompts.num_stated + prompts.num_estimated else f"texts{by}"
        estimated = self._estimated()
        return f"lengths of its {self._usage}, content of its {content}" + (f", {estimated}" if estimated else "")

    def _estimated(self) -> str:
        sides = [("prompts", self._prompts), ("answers", self._answers)]
        counts = [f"{side.num_estimated:,} of {side.total:,} {name}" for name, side in sides if side.num_estimated]
        return f"estimated for {' and '.join(counts)}: {self._reading.texts.description}" if counts else ""

    def _details(self) -> Iterator[str]:
        if self._num_pictures:
            yield f"pictures and files without a stated length: {self._num_pictures:,} ({PICTURE_TOKENS:,} tokens each)"
        for reason, _ in self._unknown.most_common(1):
            more = f"; {len(self._unknown) - 1:,} other reasons" if len(self._unknown) > 1 else ""
            yield f"content unknown for {self._unknown.total():,} prompts ({reason}{more})"
        if self._num_cut:
            yield f"truncated prompts: {self._num_cut:,} (what they share is unknown)"
        if self._num_allowed:
            yield f"answers missing in it: {self._num_allowed:,} (each counted with its greatest allowed length)"
        if self._num_without_output:
            yield f"without an answer: {self._num_without_output:,}"
        if self._failures:
            kept = "failed, but kept" if self._reading.keep_failed else "left out"
            yield f"{kept}: {self._failures.total():,} ({self._failed()})"

    def _assumed(self) -> Iterator[str]:
        if self._num_allowed:
            how_many = f"{self._num_allowed:,} of {self._num_served:,} requests"
            yield (
                f"the log lacks the answers of {how_many}: each counts with its greatest allowed length, which is "
                "usually too long"
            )

    def _not_understood(self) -> Iterator[str]:
        if self._unknown:
            yield (
                f"the content of {self._unknown.total():,} of {self._num_served:,} prompts is unknown "
                f"({self._unknown.most_common(1)[0][0]}): they are counted as sharing nothing"
            )

    def _failed(self) -> str:
        return ", ".join(f"{name}: {count:,}" for name, count in self._failures.most_common())


def _unknown(parts: Sequence[Part], stated: int | None) -> str | None:
    """Return why the content of these parts is not known, if it is not: it cannot be empty where it has a length."""
    reason = next((part.unknown for part in parts if part.unknown is not None), None)
    is_empty = bool(stated) and not any(len(part.pieces) for part in parts if not part.is_mark)
    return "its messages have a length and no text" if reason is None and is_empty else reason


PROMPT_COUNTS: Final = ("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "promptTokenCount")
OUTSIDE_INPUT: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Anthropic counts these apart from input_tokens; OpenAI's cached tokens are part of prompt_tokens."""
ANSWER_COUNTS: Final = (
    "completion_tokens",
    "output_tokens",
    "completionTokens",
    "outputTokens",
    "candidatesTokenCount",
)
THOUGHTS: Final = ("completion_tokens_details", "output_tokens_details", "output_token_details")
REASONING: Final = ("reasoning_tokens", "reasoning")
STATUSES: Final = ("status_code", "statusCode", "http_status", "response_status", "status")
CHOICES: Final = MappingProxyType(
    {"choices": ("message", "text"), "candidates": ("content",), "results": ("outputText",)}
)
"""Lists of answers, the first of which counts, and where it has its text."""
ANSWER_KEYS: Final = ("content", "text", "generation", "completion")
FAILED_WORDS: Final = frozenset(
    {"failure", "failed", "error", "cancelled", "canceled", "timeout", "rate_limited", "aborted", "expired"}
)
FIRST_FAILED_CODE: Final = 400
LAST_FAILED_CODE: Final = 599
MOST_SAMPLES: Final = 2**16
LONGEST_NAME: Final = 40


class Usage(msgspec.Struct, frozen=True):
    """Stated lengths: of the prompt, of the answer, and of the part of the answer that is not in its texts."""

    num_prompt: int | None = None
    num_answer: int | None = None
    num_thoughts: int = 0


def usage_of(line: Line, usage: JsonObject) -> Usage:
    """Read a usage; an empty one states nothing. Raises TraceError."""
    num_prompt, num_answer = count_of(line, usage, PROMPT_COUNTS), count_of(line, usage, ANSWER_COUNTS)
    if num_prompt is not None:
        num_prompt += sum(count_of(line, usage, (key,)) or 0 for key in OUTSIDE_INPUT)
    apart = count_of(line, usage, ("thoughtsTokenCount",))
    if apart is not None:  # Gemini counts thoughts beside the answer, OpenAI within
        return Usage(num_prompt, (num_answer or 0) + apart, apart)
    details: JsonObject = next((usage[key] for key in THOUGHTS if isinstance(usage.get(key), dict)), {})
    return Usage(num_prompt, num_answer, count_of(line, details, REASONING) or 0)


def parts_of_answer(answer: JsonObject, texts: TextTokens) -> Sequence[Part] | None:
    """Return the parts of an answer: OpenAI's first choice, Anthropic's content, the output of the Responses API...

    Others are Gemini's first candidate, a message within, and the texts of the models that Bedrock serves.
    """
    output = answer.get("output")
    if isinstance(output, list):
        items = [item for item in output if isinstance(item, dict) and item.get("type") != "reasoning"]
        taken = [answer_parts(item if "role" in item else [item], texts) or [] for item in items]
        return [part for parts in taken for part in parts]
    for key, inside in CHOICES.items():
        choices = answer.get(key)
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            return answer_parts(next((choices[0][name] for name in inside if choices[0].get(name)), None), texts)
    if "role" in answer or isinstance(answer.get("message"), dict):
        return answer_parts(answer, texts)
    return answer_parts(next((answer[key] for key in ANSWER_KEYS if answer.get(key)), None), texts)


def has_answer(answer: JsonObject) -> bool:
    """Return whether an object is an answer, with or without a text."""
    return bool(answer.keys() & {"choices", "content", "text", "output", "usage", "role", "candidates"})


def failure_of(*objects: JsonObject) -> str | None:
    """Describe how a request failed, by the first object that states it as an HTTP status, a word or an error."""
    for each in objects:
        for key in STATUSES:
            value = each.get(key)
            code = int(value) if isinstance(value, str) and value.isdecimal() else value
            if type(code) is int and (FIRST_FAILED_CODE <= code <= LAST_FAILED_CODE or code < 0):
                return str(code) if code > 0 else NO_ANSWER
            if isinstance(value, str) and value.lower() in FAILED_WORDS:
                return _code(each.get("error")) or _code(each.get("error_information")) or value.lower()
        if each.get("error"):
            return _code(each["error"]) or "error"
    return None


def num_samples_of(line: Line, body: JsonObject) -> int:
    """Read the number of requested answers. Raises TraceError."""
    num_samples = body.get("n") or 1
    if type(num_samples) is not int:
        raise line.fault(f"n is {num_samples!r:.40}, no whole number", FIX_THE_ROW)
    check_range(line, "n", num_samples, 1, MOST_SAMPLES)
    return num_samples


def first_named(keys: Sequence[str], *objects: JsonObject) -> str | None:
    """Return the first text or number under one of these keys, as a name; None if there is none."""
    for each in objects:
        for key in keys:
            value = each.get(key)
            if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                return str(value)[:MAX_SESSION_CHARACTERS]
    return None


def found_under(row: object, path: str) -> object:
    """Follow a path into objects and lists; None where the path does not exist."""
    if isinstance(row, dict) and path in row:
        return row[path]
    for name in path.split("."):
        row = as_list(row)
        if isinstance(row, list) and name.isdecimal() and int(name) < len(row):
            row = row[int(name)]
        elif isinstance(row, dict):
            row = row.get(name)
        else:
            return None
    return row


def name_under(row: object, path: str) -> str | None:
    """Return the text or number under a path as a name; None if there is none."""
    value = found_under(row, path)
    is_name = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return str(value)[:MAX_SESSION_CHARACTERS] if is_name else None


def _code(error: object) -> str | None:
    """Return the code of an error."""
    if isinstance(error, dict):
        names = (error.get(key) for key in ("status_code", "error_code", "code", "type", "error_class"))
        error = next((name for name in names if isinstance(name, str | int) and name), None)
    return str(error)[:LONGEST_NAME] if isinstance(error, str | int) and not isinstance(error, bool) else None


def count_of(line: Line, usage: JsonObject, names: Sequence[str]) -> int | None:
    """Return the first count of tokens under these names. Raises TraceError."""
    for name in names:
        value = usage.get(name)
        if value is not None:
            if type(value) is not int or value < 0:
                raise line.fault(f"usage.{name} is {value!r:.40}, no number of tokens", FIX_THE_ROW)
            return value
    return None


class LogRows(RowFormat):
    """Reads a log whose rows are JSON objects: each subclass knows one log, and locates the items in its rows.

    Args:
        reading: the user's statements about the file.
        unit: unit of the times, unless their values determine it.
        usage: name of the field with stated lengths, for messages.
    """

    KEYS: ClassVar[tuple[frozenset[str], ...]] = ()
    """Keys that the first row of such a log has: all of one set."""
    TITLE: ClassVar[str] = ""
    """Name of the log, for users."""
    OTHERS: ClassVar[str] = "rows of another kind, skipped"
    """What rows are called that are skipped, for users."""

    def __init__(self, reading: Reading, unit: str = "s", usage: str = "usage") -> None:
        self._reading = reading
        self._texts = reading.texts
        self._calls = Calls(reading, unit, usage)
        self._num_others = 0

    @classmethod
    def matches(cls, keys: Mapping[str, object]) -> bool:
        """Return whether a file is such a log, by the keys of its first row."""
        return any(keys.keys() >= each for each in cls.KEYS)

    @property
    def title(self) -> str:
        """Name of the log, for users."""
        return self._titled(self.TITLE)

    def _titled(self, title: str) -> str:
        """Return a name with the number of rows that were skipped."""
        return f"{title} ({self.OTHERS}: {self._num_others:,})" if self._num_others else title

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the calls of a row: one, several, or none. Raises TraceError."""
        raise NotImplementedError

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return f"{self.title}, {self._calls.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about the file."""
        return self._calls.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests that are complete and in order."""
        row = decoded(line, dict[str, Any])
        if self.KEYS and not self.matches(row):
            self._num_others += 1
            return
        refuse_sum(line, row)
        for call in self.calls(line, row):
            if self._reading.tenant_by is not None and call.tenant is None:
                call.tenant = name_under(row, self._reading.tenant_by)
            yield from self._calls.requests(call)

    def finish(self) -> Iterator[Request]:
        """Yield the requests that were held back."""
        return self._calls.finish()
