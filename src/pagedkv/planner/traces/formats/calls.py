"""Turns the calls of a log into requests; shared by all formats of logs.

A log has texts, or stated lengths (usage, meta data), or tokens, or some of each. Stated lengths are used where they
exist; content comes from tokens or texts; :mod:`~pagedkv.planner.traces.formats.lengths` combines the two. A length
that is not stated is estimated from the characters of its text, and a note reports this. Failed calls were not served
in full: by default they are left out, and counted by kind of failure.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pagedkv.contract.arrays import Int32Array
from pagedkv.planner.traces.clocks import ArrivalClock
from pagedkv.planner.traces.formats.lengths import KnownLengths
from pagedkv.planner.traces.formats.messages import PICTURE_TOKENS, Part
from pagedkv.planner.traces.formats.parsing import MAX_LENGTH, Lengths, check_range, check_row
from pagedkv.planner.traces.formats.row_format import Reading
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["ABANDONED", "NO_ANSWER", "OTHER_CACHE", "Call", "Calls"]

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
        return [*self._reading.notes_of(self.clock), *self._cut_detector.notes(), *self._assumed()]

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
        if call.prompt is None and call.num_prompt is None:
            raise call.line.fault(
                "neither the prompt of this request nor its length is in the log",
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

    def _tokens(self, call: Call, num_answer: int | None) -> tuple[Int32Array | None, Int32Array | None]:
        """Return the tokens of prompt and answer, as far as the log has their content."""
        prompt = output = None
        name = b""
        if call.prompt is not None:
            prompt, name = self._lengths.prompt(call.prompt, call.num_prompt)
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

    def _failed(self) -> str:
        return ", ".join(f"{name}: {count:,}" for name, count in self._failures.most_common())
