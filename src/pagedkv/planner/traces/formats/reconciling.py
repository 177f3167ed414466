"""Whether the lengths that a log states are those of its texts: contradictions are refused.

A stated length may well exceed that of its text: tools, a system prompt or a picture may not be in the log. Three
things do not happen in a log that was understood:

* Prompts that are equal, with lengths that differ: the text that sets them apart was not read.
* Lengths far below those of the texts: they count something else, such as the part that no cache had.
* As many tokens as bytes, in every row: the lengths are bytes or characters.

Lengths and texts are compared as they come, and judged after the last row, or when there are enough; so a file that is
read in part is judged, too. Rows that are sums over many requests are refused one by one.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from pagedkv.planner.traces.formats.parts import Part
from pagedkv.planner.traces.lines import Line

CONTRADICTING_SHARE: Final = 100
"""More than one in this number of prompts that equal an earlier one, with another length, is a contradiction."""
FEWEST_CONTRADICTIONS: Final = 3
"""Number of contradictions that is refused before the end of the file."""
MOST_REMEMBERED: Final = 2**17
MOST_COMPARED: Final = 2**12
"""Number of texts that are compared with their lengths; those that come later are taken to be like them."""
FEWEST_TOKENS: Final = 32
"""Texts with fewer tokens say little about lengths."""
FEWEST_JUDGED: Final = 32
"""Number of texts that is judged before the end of the file."""
LEAST_SHARE: Final = 0.5
"""A stated length below this share of its text's estimated tokens counts something else."""
BYTES_OF_A_TOKEN: Final = 1.35
"""No text has as few bytes a token: plain text has 3 to 5, Chinese 2 and more, digits and base64 about 1.5."""
SPREAD: Final = 0.15
FEWEST_ALIKE: Final = 4
"""From this number of texts on, nearly all must have one number of bytes a token; below it, exactly one byte."""
NINE_TENTHS: Final = 0.9
EQUAL: Final = 0.02
LENGTHS_ALONE: Final = (
    "Name the fields that agree (`fields=arrival=...,input=...,output=...,prompt=...`): leave out prompt=... to "
    "read lengths alone, or input=... to count the texts"
)
REQUEST_COUNTS: Final = (
    "num_model_requests",
    "n_requests",
    "num_requests",
    "request_count",
    "requests_count",
    "api_requests",
    "successful_requests",
    "requests",
)
MOST_DIGITS: Final = 18
BUCKETS_S: Final = frozenset({60, 3600, 86_400})


def refuse_sum(line: Line, row: Mapping[str, Any]) -> None:
    """Refuse a row that is a sum over several requests: it counts them, or covers a whole minute, hour or day.

    Raises:
        TraceError: it is such a sum.
    """
    for key in REQUEST_COUNTS:
        number = _whole(row.get(key))
        if number is not None and number > 1:
            raise line.fault(f"{key} is {number:,}: the row is a sum over as many requests", ONE_A_ROW)
    begin, end = _whole(row.get("start_time")), _whole(row.get("end_time"))
    if begin and end and begin % 60 == 0 and end - begin in BUCKETS_S:
        raise line.fault(f"the row is a sum over the {end - begin:,} s from start_time to end_time", ONE_A_ROW)


def _whole(value: object) -> int | None:
    """Return a whole number, which tables may hold as a text; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS:
        return int(value)
    return value if type(value) is int else None


ONE_A_ROW: Final = "Give a log with a row for each request: lengths and times of single requests are not in sums"


class Reconciler:
    """Compares the stated lengths of one side, prompts or answers, with its texts.

    Args:
        side: "prompt" or "answer", for messages.
    """

    def __init__(self, side: str) -> None:
        self._side = side
        self._stated: dict[bytes, int] = {}
        self._num = self._num_contradicting = 0
        self._example = ""
        self._shares: list[float] = []
        self._bytes_a_token: list[float] = []
        self._last: Line | None = None

    def watch(self, line: Line, parts: Sequence[Part], stated: int | None, name: bytes | None = None) -> None:
        """Take one text. O(parts).

        Args:
            line: where it stands.
            parts: its parts.
            stated: its stated length, in tokens; None: nothing is stated, and nothing compared.
            name: a digest of the whole text; None: it may recur with other lengths.

        Raises:
            TraceError: the lengths so far contradict the texts; or the text is given as tokens, of another number.
        """
        if stated is None:
            return
        contents = [part for part in parts if not part.is_mark]
        num_tokens = sum(len(part.pieces) for part in contents)
        if name is not None and contents and all(part.is_exact for part in contents) and num_tokens != stated:
            reason = f"{stated:,} tokens are stated for a {self._side}, and {num_tokens:,} are in the log"
            raise line.fault(reason, LENGTHS_ALONE)
        self._num += 1
        self._last = line
        if name is not None:
            self._compare_equal(line, stated, name)
        is_text = not any(part.is_media or part.is_exact for part in contents)
        if is_text and num_tokens >= FEWEST_TOKENS and len(self._shares) < MOST_COMPARED:
            self._shares.append(stated / num_tokens)
            self._bytes_a_token.append(sum(part.weight for part in contents) / max(1, stated))
            if len(self._shares) == FEWEST_JUDGED:
                self._judge_lengths(line)

    def finish(self) -> None:
        """Judge all of them. Raises TraceError."""
        if self._last is None:
            return
        if self._num_contradicting * CONTRADICTING_SHARE > self._num:
            raise self._contradiction(self._last)
        if self._shares:
            self._judge_lengths(self._last)

    def _compare_equal(self, line: Line, stated: int, name: bytes) -> None:
        before = self._stated.setdefault(name, stated)
        if len(self._stated) > MOST_REMEMBERED:
            del self._stated[next(iter(self._stated))]
        if before == stated:
            return
        self._num_contradicting += 1
        self._example = f"here {stated:,} tokens are stated, and {before:,} before"
        is_enough = self._num_contradicting >= FEWEST_CONTRADICTIONS
        if is_enough and self._num_contradicting * CONTRADICTING_SHARE > self._num:
            raise self._contradiction(line)

    def _contradiction(self, line: Line) -> Exception:
        share = (
            f"{self._num_contradicting:,} of {self._num:,} {self._side}s equal an earlier one and have another length"
        )
        return line.fault(f"{share} ({self._example}): what sets them apart was not read", LENGTHS_ALONE)

    def _judge_lengths(self, line: Line) -> None:
        share, per_token = median(self._shares), median(self._bytes_a_token)
        num = f"{len(self._shares):,} {self._side}s"
        if share < LEAST_SHARE:
            raise line.fault(
                f"the stated lengths of {num} are in the median {share:.2g} of the tokens of their texts: they count "
                "something else",
                LENGTHS_ALONE,
            )
        if per_token >= BYTES_OF_A_TOKEN:
            return
        limit = SPREAD if len(self._bytes_a_token) >= FEWEST_ALIKE else EQUAL
        centre = per_token if len(self._bytes_a_token) >= FEWEST_ALIKE else 1.0
        num_alike = sum(abs(each - centre) <= limit * centre for each in self._bytes_a_token)
        if num_alike >= NINE_TENTHS * len(self._bytes_a_token):
            raise line.fault(
                f"the stated lengths of {num} have {per_token:.2g} bytes of text a token: they are bytes or "
                "characters, not tokens",
                LENGTHS_ALONE,
            )
