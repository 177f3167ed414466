"""Requests of OpenAI's protocols, by OpenAI's reference, with the fields of vLLM that clients use.

Fields that are declared here are served: they are put in the engine's terms, sampling parameters, conversations,
formats. :mod:`pagedkv.server.fields` has the others.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field
from pydantic_core import from_json

from pagedkv.engine import Breakpoint, Chat, SamplingParams
from pagedkv.engine.sampling import LogitsProcessor, TokenMatcher
from pagedkv.errors import RequestError
from pagedkv.scheduling.config import MOST_BREAKPOINTS
from pagedkv.server.cache_hints import CacheHints, HintFields, read_hints
from pagedkv.server.config import Caller
from pagedkv.server.generation import PreparedPrompt
from pagedkv.server.http import ApiError, Body

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LARGEST_COUNT = 2**31 - 1

LEAST_TEMPERATURE: Final = 1e-4
"""Below this temperature, sampling is greedy."""
TEMPLATE_ARGUMENTS: Final = frozenset(
    {
        *("chat_template", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "processor_kwargs"),
    }
)
"""Arguments of ``apply_chat_template``, which requests must not set: a chat template is a program."""
ROLES: Final = {"developer": "system", "function": "tool"}
"""Roles that few templates support, and the roles that replace them."""
MEDIA: Final = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "sound",
    "file": "files",
}


class Fields(Body):
    """Fields of a body; of others those that are known are refused, unless they change no answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # not OpenAI's


class CacheBreakpoint(Fields):
    """A mark on a part: the prompt up to it is to stay cached."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(Fields):
    """How long a prompt stays cached, and whether all of it or only the part up to its breakpoints."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class DrawingFields(HintFields, Fields):
    """How the tokens of one answer are chosen, when it ends, and what its client says about the cache."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    # Not OpenAI's
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = None
    structured_outputs: dict[str, Any] | None = None


class TruncationFields(Fields):
    """How a prompt is shortened; not OpenAI's."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class SamplingFields(TruncationFields, DrawingFields):
    """The same of several answers, and what is returned with them."""

    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # Not OpenAI's
    explain: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=256)] | None = None


class Message(Fields):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]  # templates have roles of their own: document, ipython
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Conversation: TypeAlias = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatFields(SamplingFields):
    """How a conversation is answered."""

    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_options: CacheOptions | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    # Not OpenAI's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None


class ChatRequest(ChatFields):
    """The body of ``/v1/chat/completions``."""

    messages: Conversation


class ChatBatchRequest(ChatFields):
    """The body of ``/v1/chat/completions/batch``, which is not OpenAI's: several conversations."""

    messages: Annotated[list[Conversation], Field(fail_fast=True, min_length=1)]

    def requests(self) -> list[ChatRequest]:
        """Return the request for each conversation."""
        shared = {name: getattr(self, name) for name in ChatFields.model_fields}
        return [ChatRequest.model_validate({**shared, "messages": messages}) for messages in self.messages]


PromptInput: TypeAlias = (
    str
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[TokenId], Field(fail_fast=True)]
    | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
)
"""A text, token ids, or several of either."""


class PromptFields(TruncationFields):
    """How texts become token ids; not OpenAI's."""

    add_special_tokens: bool | None = None


class CompletionRequest(PromptFields, SamplingFields):
    """The body of ``/v1/completions``."""

    prompt: PromptInput
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None


class Reasoning(Fields):
    """How long the model is to think; a summary is not made, since thoughts are returned whole."""

    effort: Annotated[str, Field(max_length=64)] | None = None


class ResponsesRequest(DrawingFields):
    """The body of ``/v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # not OpenAI's


class CloseSessionRequest(Fields):
    """The body of ``/close_session``: a name that requests gave as ``session_id``."""

    session_id: Annotated[str, Field(min_length=1, max_length=256)]


class TokenizeRequest(Fields):
    """The body of ``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def as_params(  # noqa: PLR0913 - what fields do not say by themselves, by keywords
    body: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    processors: Sequence[LogitsProcessor | TokenMatcher] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    """Turn fields into sampling parameters.

    Raises:
        ApiError: fields contradict each other.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    is_greedy = temperature < LEAST_TEMPERATURE
    top_p = 1.0 if body.top_p is None else body.top_p
    if top_p == 0:  # OpenAI's range includes 0: the most likely token alone
        is_greedy, top_p = True, 1.0
    is_held = any(isinstance(each, TokenMatcher) for each in processors)  # whose format decides when it may end
    try:
        return SamplingParams(
            n=body.n or 1,
            temperature=0.0 if is_greedy else temperature,
            top_k=0 if is_greedy else body.top_k or 0,
            top_p=1.0 if is_greedy else top_p,
            min_p=0.0 if is_greedy else body.min_p or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            bad_words=bad_words,
            logit_bias=_as_bias(body.logit_bias or {}),
            min_tokens=0 if is_held else body.min_tokens or 0,
            max_tokens=max_tokens,
            stop=_as_stops(body.stop),
            stop_token_ids=body.stop_token_ids or (),
            ignore_eos=bool(body.ignore_eos) and not is_held,
            seed=None if body.seed is None else body.seed % 2**63,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logprob_token_ids=body.logprob_token_ids or (),
            logits_processors=processors,
        )
    except RequestError as problem:
        raise ApiError(400, str(problem)) from problem


def as_chat(body: ChatRequest) -> Chat:
    """Turn a request into a conversation for the template. Raises ApiError for media."""
    is_continued = bool(body.continue_final_message)
    if is_continued and body.add_generation_prompt:
        raise ApiError(400, "continue_final_message and add_generation_prompt contradict each other: give one")
    taken = sorted(TEMPLATE_ARGUMENTS & set(body.chat_template_kwargs or ()))
    if taken:
        raise ApiError(400, f"chat_template_kwargs may not have {taken[0]}", param="chat_template_kwargs")
    tools = offered_tools(body)
    return Chat(
        [_as_message(message, place) for place, message in enumerate(body.messages)],
        tools=tools or None,
        is_continued=is_continued,
        options={**_effort(body), **(body.chat_template_kwargs or {})},
        opens_answer=body.add_generation_prompt is not False,
    )


def _effort(body: ChatRequest) -> dict[str, Any]:
    """Return the variables of templates for the effort of reasoning, as vLLM names them."""
    effort = body.reasoning_effort
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def offered_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that the model may call. Raises ApiError for a tool that is not a function."""
    tools = body.tools or []
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ApiError(
                400,
                f"tools[{place}] must be a function with a name: this server does not run tools itself",
                param=f"tools[{place}]",
            )
    return tools


def predicted_text(body: ChatRequest) -> str:
    """Return the predicted text of the answer; empty without a prediction. Raises ApiError."""
    if body.prediction is None:
        return ""
    content = body.prediction.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if body.prediction.get("type") != "content" or not (isinstance(content, str) or is_parts):
        raise ApiError(
            400, "prediction must be of type content, its content a text or parts of type text", param="prediction"
        )
    return as_text(content, "prediction.content")


def refuse_unserved_in_batch(body: ChatBatchRequest) -> None:
    """Refuse what belongs to a single conversation, as vLLM does. Raises ApiError."""
    for name, is_set in (
        ("stream", bool(body.stream)),
        ("n", (body.n or 1) > 1),
        ("tools", bool(body.tools)),
        ("prompt_logprobs", body.prompt_logprobs is not None),
    ):
        if is_set:
            raise ApiError(400, f"{name} is not served for several conversations: send each by itself", param=name)


def answer_format(body: SamplingFields) -> dict[str, Any] | None:
    """Return the format of the answer; vLLM's ``structured_outputs`` is turned into a ``response_format``.

    Raises:
        ApiError: there are structured outputs and a response format, several structured outputs, or an unserved one.
    """
    structured = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    if not structured:
        return body.response_format
    (name, value), *others = structured.items()
    match name, value:
        case _ if others or body.response_format is not None:
            problem = "contradicts response_format" if body.response_format is not None else "must have one format"
            raise ApiError(400, f"structured_outputs {problem}: give one", param="structured_outputs")
        case "json", dict():
            return {"type": "json_schema", "json_schema": {"schema": value}}
        case "json_object", True:
            return {"type": "json_object"}
        case "regex", str():
            return {"type": "regex", "regex": value}
        case "choice", [str(), *rest] if all(isinstance(each, str) for each in rest):
            longest = max(len(each.encode()) for each in value)
            if longest < (body.min_tokens or 0):
                raise ApiError(
                    400,
                    f"min_tokens is {body.min_tokens}, and the longest choice has {longest} bytes: each ends before",
                    param="min_tokens",
                )
            return {"type": "regex", "regex": "|".join(map(re.escape, value))}
        case _:
            raise ApiError(
                400,
                "structured_outputs must have json, a schema, regex, a pattern, choice, a list of texts, or "
                f"json_object, true; got {name[:50]!r}",
                param="structured_outputs",
            )


def least_tokens(body: DrawingFields) -> float:
    """Return the number of tokens before which an answer of a format ends only where it must."""
    return math.inf if body.ignore_eos else body.min_tokens or 0


def as_priority(body: SamplingFields, hinted: int, caller: Caller) -> int:
    """Return the engine's priority: the hinted one, else the negative of the field, of which lower ones go first.

    Raises:
        ApiError: the caller is no administrator, and so must not precede other tenants.
    """
    if (body.priority or hinted) and not caller.is_admin:
        raise ApiError(403, "only keys of administrators may give requests a priority: leave it out", param="priority")
    return hinted or -(body.priority or 0)


def hints_of(
    body: SamplingFields, caller: Caller, prompts: Sequence[PreparedPrompt], breakpoints: Sequence[Breakpoint] = ()
) -> CacheHints:
    """Put the hints of a request about the cache, its breakpoints and its priority into the engine's words.

    Raises:
        ApiError: a hint is invalid, contradicts another field, or the caller may not give it.
    """
    found = read_hints(body, len(prompts[0].token_ids), breakpoints)
    if found.hints and len(prompts) > 1:
        raise ApiError(400, f"{found.hints[0].name} is of one prompt, and the request has {len(prompts)}")
    if len(found.breakpoints) > MOST_BREAKPOINTS:
        raise ApiError(
            400, f"a request may keep its prompt up to {MOST_BREAKPOINTS} places, got {len(found.breakpoints)}"
        )
    if found.priority and body.priority:
        raise ApiError(400, "priority and nvext.agent_hints.priority are both given: give one", param="priority")
    found.priority = as_priority(body, found.priority, caller)
    return found


def truncated(token_ids: Sequence[int], body: TruncationFields, longest: int) -> Sequence[int]:
    """Return a prompt shortened as its request asks: by default to its last tokens.

    Args:
        token_ids: the prompt.
        body: the request; with -1 the prompt leaves room for one token of the longest sequence.
        longest: tokens of the longest sequence.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return token_ids
    most = longest - 1 if most < 0 else most
    return token_ids[:most] if body.truncation_side == "right" else token_ids[max(0, len(token_ids) - most) :]


def require_few(given: Sequence[object], most: int, param: str, kind: str) -> None:
    """Refuse more than so many of a kind in one request. Raises ApiError."""
    if len(given) > most:
        raise ApiError(
            400, f"{param} has {len(given)} {kind}, and at most {most} are allowed in one request", param=param
        )


def require_consistent(body: SamplingFields) -> None:
    """Refuse fields that contradict each other. Raises ApiError."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true: leave one out", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not streamed: leave stream out", param="prompt_logprobs")


def _as_message(message: Message, place: int) -> dict[str, Any]:
    """Turn a message into the form that templates take: content as text, arguments of calls as objects."""
    fields = message.model_dump(exclude_none=True)
    fields["role"] = ROLES.get(message.role, message.role)
    fields["content"] = as_text(message.content, f"messages[{place}].content")
    if message.tool_calls is not None:
        fields["tool_calls"] = [
            _as_call(call, f"messages[{place}].tool_calls[{at}]") for at, call in enumerate(message.tool_calls)
        ]
    return fields


def as_text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Return the text of a message's content. Raises ApiError for other media; ``where``: its place."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type")
        if isinstance(kind, str) and kind in MEDIA:
            raise ApiError(400, f"{where}[{place}] has {MEDIA[kind]}, and this server takes text alone", param=where)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{where}[{place}] must be a part of type text, with its text", param=where)
        texts.append(text)
    return "\n".join(texts)


def _as_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where} must have a function with a name", param=where)
    return {**call, "type": "function", "function": {**function, "arguments": _as_arguments(function.get("arguments"))}}


def _as_arguments(arguments: object) -> object:
    """Parse JSON arguments, since templates write objects in their own way; other text stays as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = from_json(arguments)  # refuses lone surrogates and endless nesting
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_bias(bias: Mapping[str, float]) -> dict[int, float]:
    wrong = [token for token in bias if not token.isdecimal()]
    if wrong:
        raise ApiError(
            400,
            f"logit_bias must map token ids to numbers, and has {', '.join(repr(key[:50]) for key in wrong[:8])}",
            param="logit_bias",
        )
    return {int(token): value for token, value in bias.items()}


def _as_stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    return [text for text in stops if text]
