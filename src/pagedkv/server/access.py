"""Access: maps a request's API key to a caller, its tenant, and the salt of its cached blocks.

The salt is derived from the tenant of the API key, never from a request's body. A caller that could choose another
tenant's salt would hit that tenant's blocks, and so learn its prompts (CVE-2025-46570, vllm#53347). The file of keys
is described in :mod:`pagedkv.api_keys`.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, final

from pagedkv.api_keys import read_key_file
from pagedkv.contract.space_config import TenantLimits
from pagedkv.errors import ConfigurationError
from pagedkv.server.errors import ApiError

__all__ = ["Access", "ApiKeys", "Caller", "OpenAccess"]

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
        key = _key_of(headers)
        if key is None:
            raise ApiError(401, "there is no API key: send Authorization: Bearer KEY, or x-api-key: KEY")
        digest = hashlib.sha256(key.encode()).hexdigest()
        for known, caller in self._callers.items():
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
