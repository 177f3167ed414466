"""ServerConfig: the name, the limits and the parsers of a server; Access: who may ask, as which tenant, by which salt.

The salt of a request's cached blocks is derived from the tenant of the API key, never from a request's body. A caller
that could choose another tenant's salt would hit that tenant's blocks, and so learn its prompts (CVE-2025-46570,
vllm#53347). The file of keys is described in :mod:`pagedkv.api_keys`.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias, final

from pagedkv.api_keys import read_key_file
from pagedkv.contract.arguments import as_choice, as_count, as_number
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine.sampling.parameters import POOLINGS, Pooling
from pagedkv.errors import ConfigurationError
from pagedkv.server.http import ApiError

MIB = 2**20
Inspector: TypeAlias = Literal["off", "blocks", "texts"]
"""What the inspector of an engine in another process shows: nothing, blocks, or blocks and their texts."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of a server, apart from those of its engine.

    Args:
        model_name: the model's name for clients; requests that name another one are refused.
        aliases: further names of the model, which requests may give as well.
        root_path: path before all paths here, where a proxy serves them, such as /llm.
        max_body_nbytes: the largest body of a request, in bytes.
        max_header_nbytes: the largest header section of a request, request line included, in bytes; else its
            connection ends with 431.
        max_headers: most headers of a request; else the same.
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
        outlives_engine: whether the server goes on, and answers 503, after its engine has ended.
        cors_origins: origins of web pages that may call the server, such as https://chat.example.com; ``*``: all.
        strict_fields: whether requests with unknown fields are refused; else a header of the answer and the log name
            these.
        tells_usage: whether each chunk of a stream of chat or text completions has the usage so far, asked for or not.
        tokens_as_ids: whether log-probabilities name tokens by their ids, ``token_id:5``, unless a request sets
            ``return_tokens_as_token_ids``.
        tells_tokenizer: whether ``/tokenizer_info`` tells special tokens and the chat template.
        pooling: what ``/v1/embeddings`` gives: ``mean`` of a text's hidden states, or that of its ``last`` token; None:
            embeddings are not served.
        sampling_defaults: values of sampling fields that requests leave open, as of the model's generation_config.json:
            temperature, top_k, top_p, min_p, repetition_penalty.
        kept_tokens: most tokens of prompts and answers that are kept, 4 bytes each. A conversation's next turn reuses
            the exact tokens of its last answer from them. 0: none are kept.
        tool_parser: reads tool calls out of an answer: ``auto`` (by the tokenizer's template), a name of
            :data:`pagedkv.server.parsing.PARSER_NAMES`, or ``none``.
        reasoning_parser: reads reasoning out of an answer, likewise; :data:`pagedkv.server.parsing.REASONING_NAMES`.
    """

    model_name: str
    aliases: tuple[str, ...] = ()
    root_path: str = ""
    max_body_nbytes: int = 32 * MIB
    max_header_nbytes: int = 64 * 2**10
    max_headers: int = 256
    max_waiting: int = 1024
    max_prompts: int = 128
    max_answers: int = 128
    deadline_s: float | None = None
    header_deadline_s: float = 30.0
    body_deadline_s: float = 120.0
    write_deadline_s: float = 60.0
    drain_s: float = 30.0
    outlives_engine: bool = False
    cors_origins: tuple[str, ...] = ()
    strict_fields: bool = False
    tells_usage: bool = False
    tokens_as_ids: bool = False
    tells_tokenizer: bool = False
    pooling: Pooling | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    kept_tokens: int = 4_000_000
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name:
            raise ConfigurationError(f"model_name must be a text with at least one character, got {self.model_name!r}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(f"root_path must begin with / and not end with it, got {self.root_path!r}")
        if self.pooling is not None:
            as_choice(self.pooling, POOLINGS, "pooling")
        for name in (
            "max_body_nbytes",
            "max_header_nbytes",
            "max_headers",
            "max_waiting",
            "max_prompts",
            "max_answers",
        ):
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


BEARER: Final = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Args:
        tenant: name of the tenant; None: the server does not distinguish callers.
        salt: part of the identity of every block that the caller's prompts publish or hit.
        is_admin: whether the caller may read metrics and the inspector.
        trace: names and values of the request's trace headers.
    """

    tenant: str | None
    salt: bytes = b""
    is_admin: bool = False
    trace: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def has_no_tenant(self) -> bool:
        """Whether the server does not distinguish callers, so that the cache holds no other tenant's content."""
        return self.tenant is None


class Access(Protocol):
    """Identifies the caller of a request by its headers. Your own class needs this one method."""

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller of a request.

        Args:
            headers: the request's headers, names in lower case.

        Raises:
            ApiError: 401, for a request of an unknown caller.
        """


@final
class OpenAccess:
    """Serves every request; all callers share one cache. Meant for one's own machine."""

    def identify(self, headers: Mapping[str, str]) -> Caller:  # noqa: ARG002 - see Access
        """Return the same caller for every request."""
        return Caller(None, is_admin=True)


@final
class ApiKeys:
    """API keys and their tenants, by the keys' digests.

    Args:
        callers: the caller of each key, by the key's SHA-256 in hexadecimal digits.
        limits: caps and floors, by tenant; tenants without an entry have none.

    Attributes:
        limits: limits of every tenant, as the engine's configuration takes them.
    """

    def __init__(self, callers: Mapping[str, Caller], limits: Mapping[str, TenantLimits] | None = None) -> None:
        if not callers:
            raise ConfigurationError("no API keys are given, so every request would be refused: give at least one")
        self._callers = dict(callers)
        given = {} if limits is None else limits
        unknown = sorted(set(given) - self.tenants)
        if unknown:
            raise ConfigurationError(f"limits name {', '.join(unknown)}, but no key has such a tenant")
        self.limits = {tenant: given.get(tenant, TenantLimits()) for tenant in sorted(self.tenants)}

    @classmethod
    def read(cls, path: Path) -> "ApiKeys":
        """Read a file of keys.

        Raises:
            ConfigurationError: the file cannot be read, an entry is invalid, or the file has no key.
        """
        file = read_key_file(path)
        callers = {
            digest: Caller(owner.tenant, _salt(owner.tenant), owner.is_admin) for digest, owner in file.owners.items()
        }
        return cls(callers, file.limits)

    @property
    def tenants(self) -> frozenset[str]:
        """Names of all tenants."""
        return frozenset(caller.tenant for caller in self._callers.values() if caller.tenant is not None)

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Find the caller by ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""
        return _caller_of(headers, self._callers)


@final
class SharedKeys:
    """API keys whose holders are not told apart: they share one cache, and each is an administrator.

    Args:
        keys: the keys, at least one.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        everyone = Caller(None, is_admin=True)
        self._callers = {hashlib.sha256(key.encode()).hexdigest(): everyone for key in keys if key}
        if not self._callers:
            raise ConfigurationError("no API key is given, so every request would be refused: give at least one")

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Require one of the keys, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``."""
        return _caller_of(headers, self._callers)


def _caller_of(headers: Mapping[str, str], callers: Mapping[str, Caller]) -> Caller:
    """Find a caller by the digest of its key. Raises ApiError."""
    key = _key_of(headers)
    if key is None:
        raise ApiError(401, "there is no API key: send Authorization: Bearer KEY, or x-api-key: KEY")
    digest = hashlib.sha256(key.encode()).hexdigest()
    for known, caller in callers.items():
        if hmac.compare_digest(known, digest):
            return caller
    raise ApiError(401, "the API key is not one of this server's", code="invalid_api_key")


def _key_of(headers: Mapping[str, str]) -> str | None:
    given = headers.get("authorization", "")
    if given.lower().startswith(BEARER):
        return given[len(BEARER) :].strip() or headers.get("x-api-key") or None
    return headers.get("x-api-key") or None


def _salt(tenant: str) -> bytes:
    """Derive a tenant's salt. It is the same in every process, so that replicas can share stored blocks."""
    return hashlib.sha256(b"pagedkv tenant\0" + tenant.encode()).digest()
