"""The text of a Prometheus metrics page: lines of names, labels and values.

It reads the text format 0.0.4 and the additions of OpenMetrics (``# EOF``, exemplars, ``_created``). Comments, which
state types, are skipped.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pagedkv.errors import RecordingError

__all__ = ["Sample", "parse_exposition"]

SAMPLE: Final = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(?P<labels>(?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*)\})?"
    r"\s+(?P<value>\S+)(?:\s+-?[0-9.]+)?(?:\s+#\s.*)?\s*"
)
LABEL: Final = re.compile(r"\s*(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"(?P<value>(?:[^\"\\]|\\.)*)\"\s*(?:,|$)")
ESCAPE: Final = re.compile(r"\\(.)")
REMEDY: Final = "Name the metrics page of the engine, as in http://127.0.0.1:8000/metrics"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a page.

    Args:
        name: name of the metric, including suffixes such as ``_total``.
        labels: values by name.
        value: the value, possibly infinite or NaN.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def parse_exposition(text: str, source: str) -> Iterator[Sample]:
    """Read a page line by line.

    Args:
        text: text of the page.
        source: address of the page, for errors.

    Raises:
        RecordingError: a line does not belong to a metrics page.
    """
    for number, line in enumerate(text.splitlines(), 1):
        tidy = line.strip()
        if tidy and not tidy.startswith("#"):
            yield _sample(tidy, f"{source}, line {number}")


def _sample(line: str, source: str) -> Sample:
    found = SAMPLE.fullmatch(line)
    if found is None:
        raise RecordingError(source, f"{line!r:.80} is no metric", REMEDY)
    try:
        value = float(found["value"])
    except ValueError as error:
        raise RecordingError(source, f"{found['value']!r:.40} is no value", REMEDY) from error
    return Sample(found["name"], _labels(found["labels"] or "", source), value)


def _labels(text: str, source: str) -> dict[str, str]:
    labels, place = {}, 0
    while text[place:].strip():
        found = LABEL.match(text, place)
        if found is None:
            raise RecordingError(source, f"{text[place:]!r:.80} is no label", REMEDY)
        labels[found["name"]] = ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], found["value"])
        place = found.end()
    return labels
