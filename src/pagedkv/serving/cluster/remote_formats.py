"""Formats of answers in a cluster: the front checks them, and the replica that answers builds the matcher.

A matcher holds the state of a grammar, which is not sent. What it is built of is.
"""

from collections.abc import Mapping, Sequence
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
        response_format, tools, tool_choice, several, after: arguments of
            :meth:`~pagedkv.serving.server.answer_formats.AnswerFormats.matcher`.
    """

    response_format: Mapping[str, Any] | None
    tools: tuple[Mapping[str, Any], ...]
    tool_choice: object
    several: bool
    after: str | None

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

    def matcher(
        self,
        response_format: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: object = None,
        *,
        several: bool = True,
        after: str | None = None,
    ) -> TokenMatcher | None:
        """Return what constrains the answer; None: the answer is free. Raises as the formats."""
        if self._formats.matcher(response_format, tools, tool_choice, several=several, after=after) is None:
            return None
        return FormatSource(response_format, tuple(tools), tool_choice, several, after)


def with_matchers(params: SamplingParams, formats: Formats) -> SamplingParams:
    """Return the parameters with matchers in place of what they are built of."""
    if not any(isinstance(each, FormatSource) for each in params.logits_processors):
        return params
    processors = [_built(each, formats) for each in params.logits_processors]
    return replace(params, logits_processors=tuple(each for each in processors if each is not None))


def _built(processor: Any, formats: Formats) -> Any:  # noqa: ANN401 - a processor of any kind
    if not isinstance(processor, FormatSource):
        return processor
    return formats.matcher(
        processor.response_format,
        processor.tools,
        processor.tool_choice,
        several=processor.several,
        after=processor.after,
    )
