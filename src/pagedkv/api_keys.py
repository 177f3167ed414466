"""API keys: making one, and the file that maps their digests to tenants. Read before anything is imported that serves.

Of each key only the SHA-256 digest is stored. A file of keys is TOML, with one entry for each key::

    [[keys]]
    tenant = "team-a"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

    [[keys]]
    tenant = "operations"
    sha256 = "..."
    admin = true

    [limits."team-a"]  # in blocks of each pool; optional
    cap = 4000
    floor = 500
"""

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagedkv.contract.space_config import TenantLimits
from pagedkv.errors import ConfigurationError

SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The owner of a key.

    Args:
        tenant: its name.
        is_admin: whether it may read metrics and the inspector.
    """

    tenant: str
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A file of keys, as read.

    Args:
        owners: the owner of each key, by the key's SHA-256 in hexadecimal digits.
        limits: caps and floors, by tenant; tenants without an entry have none.

    Raises:
        ConfigurationError: there is no key, or a limit is that of a tenant without one.
    """

    owners: Mapping[str, KeyOwner]
    limits: Mapping[str, TenantLimits]

    def __post_init__(self) -> None:
        if not self.owners:
            raise ConfigurationError("no API keys are given, so every request would be refused: give at least one")
        unknown = sorted(set(self.limits) - {owner.tenant for owner in self.owners.values()})
        if unknown:
            raise ConfigurationError(f"limits name {', '.join(unknown)}, but no key has such a tenant")


def new_key() -> tuple[str, str]:
    """Make a key; return it and its SHA-256 in hexadecimal digits. Store only the digest."""
    key = f"pk-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


def entry_of(owner: KeyOwner, digest: str) -> str:
    """Return the entry of a key for a file of keys."""
    tenant = json.dumps(owner.tenant, ensure_ascii=False)  # TOML's basic strings escape as JSON does
    admin = "admin = true\n" if owner.is_admin else ""
    return f'[[keys]]\ntenant = {tenant}\nsha256 = "{digest}"\n{admin}'


def read_key_file(path: Path) -> KeyFile:
    """Read a file of keys.

    Raises:
        ConfigurationError: the file cannot be read, an entry is invalid, or the file has no key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigurationError(f"the file of API keys {path} cannot be read: {reason}") from problem
    return parse_key_file(text, str(path))


def parse_key_file(text: str, path: str) -> KeyFile:
    """Parse the text of a file of keys, which messages call ``path``. Raises ConfigurationError as read_key_file."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigurationError(f"the file of API keys {path} cannot be read: {problem}") from problem
    entries = document.get("keys")
    if not isinstance(entries, list) or not set(document) <= {"keys", "limits"}:
        raise ConfigurationError(f"{path} must hold [[keys]] entries with tenant, sha256 and perhaps admin, and limits")
    owners: dict[str, KeyOwner] = {}
    for place, entry in enumerate(entries):
        digest, owner = _entry(entry, f"entry {place + 1} of {path}")
        if digest in owners:
            raise ConfigurationError(f"entry {place + 1} of {path} has the same key as one before it")
        owners[digest] = owner
    return KeyFile(owners, _limits(document.get("limits", {}), path))


def _entry(entry: object, where: str) -> tuple[str, KeyOwner]:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is not a table")
    unknown = sorted(set(entry) - {"tenant", "sha256", "admin"})
    if unknown:
        raise ConfigurationError(f"{where} has {', '.join(unknown)}, and may have tenant, sha256 and admin")
    tenant, digest, admin = entry.get("tenant"), entry.get("sha256"), entry.get("admin", False)
    if not isinstance(tenant, str) or not tenant:
        raise ConfigurationError(f"{where} needs the name of its tenant")
    if not isinstance(digest, str) or not SHA256.fullmatch(digest.lower()):
        raise ConfigurationError(f"{where} needs sha256, the SHA-256 of the key in 64 hexadecimal digits")
    if not isinstance(admin, bool):
        raise ConfigurationError(f"admin of {where} must be true or false")
    return digest.lower(), KeyOwner(tenant, admin)


def _limits(given: object, path: str) -> dict[str, TenantLimits]:
    if not isinstance(given, dict) or not all(isinstance(limits, dict) for limits in given.values()):
        raise ConfigurationError(f"limits of {path} must be tables with cap and floor, one a tenant")
    for tenant, limits in given.items():
        unknown = sorted(set(limits) - {"cap", "floor"})
        if unknown:
            raise ConfigurationError(
                f"limits of {tenant!r} in {path} have {', '.join(unknown)}; there are cap and floor"
            )
    return {tenant: TenantLimits(**limits) for tenant, limits in given.items()}
