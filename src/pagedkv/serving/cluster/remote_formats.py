"""Formats of answers in a cluster: the front checks them, and the replica that answers builds the matcher.

A matcher holds the state of a grammar, which is not sent. What it is built of is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from pagedkv.serving.engine import SamplingParams
from pagedkv.serving.engine.sampling import TokenMatcher
from pagedkv.serving.server.answer_formats import Formats

__all__ = ["FormatSource", "RemoteFormats", "with_matchers"]


@final
@dataclass(frozen=True, slots=True)
class FormatSource:
    """What a matcher is built of; it stands for the matcher in the parameters of a request on its way.

    Args:
        arguments, named: arguments of :meth:`~pagedkv.serving.server.answer_formats.AnswerFormats.matcher`.
    """

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    def allowed_tokens(self, generated_ids: list[int], /) -> Any:  # noqa: ANN401, ARG002 - as of a matcher
        """Fail: a replica has put a matcher in its place before a token is sampled."""
        raise AssertionError("a format reached the sampler without its matcher")

    def fork(self) -> "FormatSource":
        """Return itself: it has no state."""
        return self


@final
class RemoteFormats:
    """Checks formats, and returns what their matchers are built of.

    Args:
        formats: builds matchers.
    """

    def __init__(self, formats: Formats) -> None:
        self._formats = formats

    def matcher(self, *arguments: Any, **named: Any) -> TokenMatcher | None:  # noqa: ANN401 - those of the formats
        """Return what constrains the answer; None: the answer is free. Arguments and errors as of the formats."""
        is_free = self._formats.matcher(*arguments, **named) is None
        return None if is_free else FormatSource(arguments, named)


def with_matchers(params: SamplingParams, formats: Formats) -> SamplingParams:
    """Return the parameters with matchers in place of what they are built of."""
    if not any(isinstance(each, FormatSource) for each in params.logits_processors):
        return params
    processors = [
        formats.matcher(*each.arguments, **each.named) if isinstance(each, FormatSource) else each
        for each in params.logits_processors
    ]
    return replace(params, logits_processors=tuple(each for each in processors if each is not None))
