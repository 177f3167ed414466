"""ServerConfig: the name, the limits and the parsers of a server."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagedkv.contract.arguments import as_count, as_number
from pagedkv.errors import ConfigurationError

__all__ = ["Inspector", "ServerConfig", "SlowCause"]

MIB = 2**20

SlowCause: TypeAlias = Literal["header", "body", "write"]
"""What the client did too slowly: sending a header, sending a body, reading an answer."""

Inspector: TypeAlias = Literal["off", "blocks", "texts"]
"""What the inspector of an engine in another process shows: nothing, blocks, or blocks and their texts."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of a server, apart from those of its engine.

    Args:
        model_name: the model's name for clients; requests that name another one are refused.
        max_body_nbytes: the largest body of a request, in bytes.
        max_waiting: most requests that wait for admission; further ones are answered 429.
        max_prompts: most prompts of one request of ``/v1/completions``.
        max_answers: most answers of one request (``n`` times its prompts).
        deadline_s: seconds after which a request ends with an error; None: no deadline. A request may set a shorter
            one.
        header_deadline_s: seconds in which a client must send a request's header; else its connection ends with 408.
        body_deadline_s: seconds in which a client must then send the body; else its connection ends with 408.
        write_deadline_s: seconds in which a client must read a full write buffer, some 64 KiB; else its connection and
            its request end.
        drain_s: seconds that requests under way have left once the server is stopped.
        kept_tokens: most tokens of prompts and answers that are kept, 4 bytes each. A conversation's next turn reuses
            the exact tokens of its last answer from them. 0: none are kept.
        tool_parser: reads tool calls out of an answer: ``auto`` (by the tokenizer's template), a parser's name, or
            ``none``.
        reasoning_parser: reads reasoning out of an answer: ``auto``, ``think`` or ``none``.
    """

    model_name: str
    max_body_nbytes: int = 32 * MIB
    max_waiting: int = 1024
    max_prompts: int = 128
    max_answers: int = 128
    deadline_s: float | None = None
    header_deadline_s: float = 30.0
    body_deadline_s: float = 120.0
    write_deadline_s: float = 60.0
    drain_s: float = 30.0
    kept_tokens: int = 4_000_000
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name:
            raise ConfigurationError(f"model_name must be a text with at least one character, got {self.model_name!r}")
        for name in ("max_body_nbytes", "max_waiting", "max_prompts", "max_answers"):
            as_count(getattr(self, name), name, least=1)
        as_count(self.kept_tokens, "kept_tokens")
        for name in ("deadline_s", "header_deadline_s", "body_deadline_s", "write_deadline_s"):
            seconds = getattr(self, name)
            if seconds is None and name == "deadline_s":
                continue
            if as_number(seconds, name) <= 0:
                raise ConfigurationError(f"{name} must be above 0, got {seconds}")
        if as_number(self.drain_s, "drain_s") < 0:
            raise ConfigurationError(f"drain_s must be at least 0, got {self.drain_s}")
