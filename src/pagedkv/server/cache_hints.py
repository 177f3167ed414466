"""Agents' words about the cache of their prompts, put into the engine's: leases, retention, priority.

Three engines have such words, and a request may have each of them here::

    kv_hints                     SGLang's and vLLM's envelope, version 0.1, of actions: type, version 1, payload
      pin {ttl_seconds, token_end}     the prompt up to token_end (all of it) is leased for that time
      retain {ttl_seconds}             the same; without a time prompt and answer are evicted after what is not leased
      demote {}                        prompt and answer are evicted first; tiers keep what they have
      prefetch {}                      ignored: each prompt is loaded from tiers before it is computed
      any other type or version        ignored, as the protocol has it
    nvext.agent_hints            Dynamo's
      strict_priority, priority        the order of requests that wait; the first goes before the second
      osl, speculative_prefill         ignored: no blocks are reserved, and a turn's end is cached as it was computed
    kv_cache_retention_config    TensorRT-LLM's, whose priorities are 0 to 100, and 35 where none is given
      a range above 35                 the prompt up to its end is leased for duration_ms: a hit begins at the start
      decode_retention_priority > 35   prompt and answer are leased once the request has ended (decode_duration_ms)
      any of them below 35             prompt and answer are evicted first, but for what is leased

A lease is soft and within its tenant's share. Without a duration it lasts 12 hours. Each answer tells what became of
each hint: ``applied`` with the number of leased tokens, ``refused`` by the cache, or ``ignored`` with the reason. A
form that is not this one is refused with the name of the field.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from pagedkv.engine import Breakpoint, RequestOutput
from pagedkv.server.http import ApiError, Body

LONGEST_S: Final = 12 * 3600.0
"""The longest lease that a request may ask for: OpenAI's longest."""
DEFAULT_PRIORITY: Final = 35
"""TensorRT-LLM's priority of content for which none is given."""
STRICT: Final = 2**16
"""A step of the strict priority, in steps of the other one."""

Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Milliseconds = Annotated[float, Field(gt=0, le=1000 * LONGEST_S)]
Name = Annotated[str, Field(max_length=256)]
Level = Annotated[int, Field(ge=0, le=100)]
Position = Annotated[int, Field(ge=0, lt=2**31)]


class Exact(Body):
    """A form that has these fields alone."""

    model_config = ConfigDict(extra="forbid")


class KvHintAction(Exact):
    """One action of an envelope."""

    action_id: Name
    action_type: Name
    action_version: Name
    payload: dict[str, Any] = Field(default_factory=dict)


class KvHintsEnvelope(Exact):
    """SGLang's and vLLM's hints."""

    protocol_version: Literal["0.1"]
    message_id: Name
    actions: Annotated[list[KvHintAction], Field(max_length=16, fail_fast=True, default_factory=list)]


class Pin(Exact):
    """The payload of a pin."""

    ttl_seconds: Seconds
    token_end: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Retain(Exact):
    """The payload of a retention."""

    ttl_seconds: Seconds | None = None


class Empty(Exact):
    """The payload of an action that has none."""


PAYLOADS: Final[Mapping[str, type[Exact]]] = {"pin": Pin, "retain": Retain, "demote": Empty, "prefetch": Empty}
VERSIONS: Final = frozenset({"1", "1.0", "0.1"})


class AgentHints(Exact):
    """Dynamo's hints of an agent."""

    priority: Annotated[int, Field(ge=-(2**15), lt=2**15)] | None = None
    strict_priority: Annotated[int, Field(ge=-(2**14), lt=2**14)] | None = None
    osl: Position | None = None
    speculative_prefill: bool | None = None


class NvExt(Exact):
    """Dynamo's extension of OpenAI's requests, of which hints are served."""

    agent_hints: AgentHints | None = None


class TokenRange(Exact):
    """TensorRT-LLM's retention of a range of the prompt."""

    token_start: Position = 0
    token_end: Position | None = None
    priority: Level
    duration_ms: Milliseconds | None = None


class RetentionConfig(Exact):
    """TensorRT-LLM's retention of a prompt and its answer."""

    token_range_retention_configs: Annotated[
        list[TokenRange], Field(max_length=16, fail_fast=True, default_factory=list)
    ]
    decode_retention_priority: Level = DEFAULT_PRIORITY
    decode_duration_ms: Milliseconds | None = None


class HintFields(Body):
    """The fields of a request that have hints."""

    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_hints: KvHintsEnvelope | None = None
    nvext: NvExt | None = None
    kv_cache_retention_config: RetentionConfig | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint of a request.

    Args:
        name: of its field.
        ignored: why it does nothing; empty: it does something.
        place: index of its lease among the request's breakpoints; None: it leases none.
        keeps_end: whether prompt and answer are leased when the request ends.
        action_id: of an action.
    """

    name: str
    ignored: str = ""
    place: int | None = None
    keeps_end: bool = False
    action_id: str | None = None

    def told(self, output: RequestOutput) -> dict[str, Any]:
        """Tell what became of it, for the answer."""
        named = {"hint": self.name} if self.action_id is None else {"hint": self.name, "action_id": self.action_id}
        if self.ignored:
            return {**named, "status": "ignored", "reason": self.ignored}
        if self.place is None and not self.keeps_end:
            return {**named, "status": "applied"}
        num_tokens = output.num_leased_tokens if self.place is None else output.breakpoint_tokens[self.place]
        return {**named, "status": "applied" if num_tokens else "refused", "num_tokens": num_tokens}


@dataclass(slots=True)
class CacheHints:
    """What a request's hints ask of the engine.

    Args:
        breakpoints: of the request, those that its hints add last.
        priority: of scheduling.
        keep_for_s: seconds for which prompt and answer are leased when it ends; None: they are not.
        retention: as of an :class:`~pagedkv.engine.Intent`.
        hints: each of them.
    """

    breakpoints: tuple[Breakpoint, ...] = ()
    priority: int = 0
    keep_for_s: float | None = None
    retention: int = 0
    hints: list[Hint] = field(default_factory=list)

    def told(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the field of an answer that tells what became of each hint; empty without hints."""
        return {"cache_hints": [each.told(outputs[0]) for each in self.hints]} if self.hints else {}

    def lease(self, num_tokens: int, keep_for_s: float) -> int:
        """Add a breakpoint; return its index."""
        self.breakpoints = (*self.breakpoints, Breakpoint(num_tokens, keep_for_s))
        return len(self.breakpoints) - 1

    def retain(self, retention: int, name: str) -> None:
        """Set the retention. Raises ApiError: another hint asks for another one."""
        if self.retention not in {0, retention}:
            raise ApiError(400, f"{name} contradicts another hint: one keeps what the other gives up", param=name)
        self.retention = retention


def read_hints(fields: HintFields, num_prompt_tokens: int, breakpoints: Sequence[Breakpoint] = ()) -> CacheHints:
    """Put the hints of a request into the engine's words.

    Args:
        fields: of the request.
        num_prompt_tokens: tokens of its prompt.
        breakpoints: of other fields.

    Raises:
        ApiError: a payload has another form, or hints contradict each other.
    """
    found = CacheHints(tuple(breakpoints))
    if fields.kv_hints is not None:
        for place, action in enumerate(fields.kv_hints.actions):
            found.hints.append(_of_action(found, action, f"kv_hints.actions.{place}", num_prompt_tokens))
    if fields.nvext is not None and fields.nvext.agent_hints is not None:
        found.hints += _of_agent(found, fields.nvext.agent_hints)
    if fields.kv_cache_retention_config is not None:
        found.hints += _of_ranges(found, fields.kv_cache_retention_config, num_prompt_tokens)
    if found.retention and found.keep_for_s is not None:
        raise ApiError(400, "hints contradict each other: one leases prompt and answer, another gives them an order")
    return found


def _of_action(found: CacheHints, action: KvHintAction, name: str, num_prompt_tokens: int) -> Hint:
    form = PAYLOADS.get(action.action_type)
    if form is None or action.action_version not in VERSIONS:
        return Hint(name, "this server has no action of this type and version", action_id=action.action_id)
    try:
        payload = form.model_validate(action.payload)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, (name, "payload", *first["loc"])))
        raise ApiError(400, f"{where}: {first['msg']}", param=where) from problem
    place = None
    match payload:
        case Pin(ttl_seconds=seconds, token_end=end):
            place = found.lease(min(end or num_prompt_tokens, num_prompt_tokens), seconds)
        case Retain(ttl_seconds=float(seconds)):
            place = found.lease(num_prompt_tokens, seconds)
        case Retain():
            found.retain(1, name)
        case _ if action.action_type == "demote":
            found.retain(-1, name)
        case _:
            ignored = "prompts are loaded from tiers before they are computed"
            return Hint(name, ignored, action_id=action.action_id)
    return Hint(name, place=place, action_id=action.action_id)


def _of_agent(found: CacheHints, given: AgentHints) -> Iterator[Hint]:
    name = "nvext.agent_hints"
    found.priority = STRICT * (given.strict_priority or 0) + (given.priority or 0)
    for each in ("strict_priority", "priority"):
        if getattr(given, each) is not None:
            yield Hint(f"{name}.{each}")
    if given.osl is not None:
        yield Hint(f"{name}.osl", "blocks are taken as tokens are generated, and none are reserved")
    if given.speculative_prefill is not None:
        yield Hint(f"{name}.speculative_prefill", "prompt and answer stay cached as they were computed")


def _of_ranges(found: CacheHints, given: RetentionConfig, num_prompt_tokens: int) -> Iterator[Hint]:
    name = "kv_cache_retention_config"
    of_answer = given.decode_retention_priority
    for place, each in enumerate(given.token_range_retention_configs):
        field_name = f"{name}.token_range_retention_configs.{place}"
        end = num_prompt_tokens if each.token_end is None else min(each.token_end, num_prompt_tokens)
        if end <= each.token_start:
            yield Hint(field_name, "the prompt has no token in this range")
        elif each.priority > DEFAULT_PRIORITY:
            yield Hint(field_name, place=found.lease(end, _seconds(each.duration_ms)))
        elif each.priority == DEFAULT_PRIORITY:
            yield Hint(field_name, "this is the priority of all content")
        elif of_answer > DEFAULT_PRIORITY:
            yield Hint(field_name, "what stands behind it is kept longer, and is hit with it alone")
        else:
            found.retain(-1, field_name)
            yield Hint(field_name)
    if of_answer > DEFAULT_PRIORITY:
        found.keep_for_s = _seconds(given.decode_duration_ms)
        yield Hint(f"{name}.decode_retention_priority", keeps_end=True)
    elif of_answer < DEFAULT_PRIORITY:
        found.retain(-1, name)
        yield Hint(f"{name}.decode_retention_priority")


def _seconds(duration_ms: float | None) -> float:
    return LONGEST_S if duration_ms is None else duration_ms / 1000
