"""Formats of answers of an engine in another process: the server checks them, and that process builds the matcher.

A matcher holds the state of a grammar, which cannot be sent. The arguments that it is built from are sent instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from pagedkv.engine import SamplingParams
from pagedkv.engine.sampling import TokenMatcher
from pagedkv.server.answer_formats import Formats

__all__ = ["FormatSource", "RemoteFormats", "with_matchers"]


@final
@dataclass(frozen=True, slots=True)
class FormatSource:
    """The arguments that a matcher is built from, in the matcher's place in a request that is sent.

    Args:
        arguments, named: arguments of :meth:`~pagedkv.server.answer_formats.AnswerFormats.matcher`.
    """

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    def allowed_tokens(self, generated_ids: list[int], /) -> Any:  # noqa: ANN401, ARG002 - as of a matcher
        """Fail: the engine's process replaces this object by a matcher before it samples."""
        raise AssertionError("a format reached the sampler without its matcher")

    def fork(self) -> "FormatSource":
        """Return itself: it has no state."""
        return self


@final
class RemoteFormats:
    """Checks formats, and returns the arguments of their matchers.

    Args:
        formats: builds matchers, and so checks their arguments.
    """

    def __init__(self, formats: Formats) -> None:
        self._formats = formats

    def matcher(self, *arguments: Any, **named: Any) -> TokenMatcher | None:  # noqa: ANN401 - those of the formats
        """Return a :class:`FormatSource`; None: the answer is unconstrained. Arguments and errors as of the formats."""
        is_free = self._formats.matcher(*arguments, **named) is None
        return None if is_free else FormatSource(arguments, named)


def with_matchers(params: SamplingParams, formats: Formats) -> SamplingParams:
    """Return the parameters with a matcher in place of each :class:`FormatSource`."""
    if not any(isinstance(each, FormatSource) for each in params.logits_processors):
        return params
    processors = [
        formats.matcher(*each.arguments, **each.named) if isinstance(each, FormatSource) else each
        for each in params.logits_processors
    ]
    return replace(params, logits_processors=tuple(each for each in processors if each is not None))
