"""AnswerFormats: constrains an answer to a JSON schema, a regular expression, or a tool call.

Of an engine in another process the server checks the formats, and that process builds the matcher: a matcher holds the
state of a grammar, which cannot be sent, so RemoteFormats sends the arguments that it is built from.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

from pagedkv.engine import SamplingParams
from pagedkv.engine.sampling import TokenMatcher
from pagedkv.server.http import ApiError
from pagedkv.server.parsing import FORMATS, parser_name

if TYPE_CHECKING:
    from pagedkv.server.grammars import GrammarMatcher, Grammars, ThoughtsMatcher


class Formats(Protocol):
    """Makes token matchers: see :meth:`AnswerFormats.matcher`."""

    def matcher(  # noqa: PLR0913 - the fields of a request about formats
        self,
        response_format: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: object = None,
        *,
        several: bool = True,
        after: str | None = None,
        least: float = 0,
    ) -> TokenMatcher | None:
        """Return the matcher that constrains an answer; None: the answer is unconstrained."""
        ...


@final
class AnswerFormats:
    """Makes token matchers from the format fields of requests.

    Args:
        tokenizer: a tokenizer of transformers.
        vocabulary_size: columns of the logits.
        end_ids: tokens that end an answer.
        tool_parser: name of the parser that reads calls; forced calls are written in its format.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - of transformers, or like it
        vocabulary_size: int,
        end_ids: Collection[int],
        tool_parser: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_ids = sorted(end_ids)
        self._tool_parser = tool_parser

    def matcher(  # noqa: PLR0913 - the fields of a request about formats
        self,
        response_format: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: object = None,
        *,
        several: bool = True,
        after: str | None = None,
        least: float = 0,
    ) -> TokenMatcher | None:
        """Return the matcher that constrains an answer; None: the answer is unconstrained.

        Args:
            response_format: its type is ``text``, ``json_object``, ``json_schema`` or ``regex``.
            tools: offered tools.
            tool_choice: in OpenAI's form; ``required`` or a function's name forces a call.
            several: whether the answer may have more than one call.
            after: a marker, such as the end of reasoning; the answer is unconstrained up to it.
            least: tokens before which the answer ends only where the format is complete and nothing may follow.

        Raises:
            ApiError: a field is invalid, or the server has no parser of calls.
            RequestError: the schema or expression cannot be enforced.
            MissingExtraError: llguidance is not installed.
        """
        named = _named_tool(tool_choice)
        if named is not None or tool_choice == "required":
            made = self._call(tools, named, several=several, after=after)
        elif response_format is None or (free := self._format(response_format, after)) is None:
            return None
        else:
            made = free
        made.least = least
        return made

    @cached_property
    def _grammars(self) -> "Grammars":
        from pagedkv.server.grammars import Grammars  # noqa: PLC0415 - an extra of its own

        return Grammars(
            self._tokenizer,
            self._vocabulary_size,
            eos_token_ids=self._end_ids or None,
            call_format=FORMATS.get(parser_name(self._tool_parser, self._tokenizer)),
        )

    def _call(
        self, tools: Sequence[Mapping[str, Any]], named: str | None, *, several: bool, after: str | None
    ) -> "GrammarMatcher | ThoughtsMatcher":
        if not tools:
            raise ApiError(400, "tool_choice asks for a call, and no tools are offered", param="tool_choice")
        parser = parser_name(self._tool_parser, self._tokenizer)
        if parser == "none":
            raise ApiError(
                400,
                "this server parses no tool calls of this model: start it with the name of their format",
                param="tool_choice",
            )
        return self._grammars.tool_call(tools, parser, named=named, several=several and named is None, after=after)

    def _format(
        self, response_format: Mapping[str, Any], after: str | None
    ) -> "GrammarMatcher | ThoughtsMatcher | None":
        match response_format.get("type"):
            case "text":
                return None
            case "json_object":
                return self._grammars.json_object(after=after)
            case "json_schema":
                json_schema = response_format.get("json_schema", response_format)
                schema = json_schema.get("schema") if isinstance(json_schema, Mapping) else None
                if not isinstance(schema, Mapping):
                    raise ApiError(400, "response_format needs json_schema.schema, a schema", param="response_format")
                return self._grammars.json_schema(schema, strict=bool(json_schema.get("strict")), after=after)
            case "regex":
                if not isinstance(response_format.get("regex"), str):
                    raise ApiError(400, "response_format needs regex, a pattern", param="response_format")
                return self._grammars.regex(response_format["regex"], after=after)
            case other:
                raise ApiError(
                    400,
                    "the type of response_format must be text, json_object, json_schema or regex, got "
                    f"{str(other)[:50]!r}",
                    param="response_format",
                )


def _named_tool(tool_choice: object) -> str | None:
    """Return the name of the function that must be called, or None. Raises ApiError."""
    if tool_choice is None or tool_choice in ("auto", "none", "required"):
        return None
    function = tool_choice.get("function", tool_choice) if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ApiError(
            400, "tool_choice must be auto, none, required, or a function with its name", param="tool_choice"
        )
    return name


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


@final
@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Allows the same tokens at every place of an answer, as a processor of logits.

    Args:
        token_ids: the tokens, inside the vocabulary.
    """

    token_ids: tuple[int, ...]

    def __call__(self, token_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:  # noqa: ARG002 - as called
        """Return the scores, those of other tokens -inf."""
        allowed = torch.tensor(self.token_ids, device=scores.device)
        return torch.full_like(scores, -torch.inf).index_copy_(1, allowed, scores[:, allowed])
