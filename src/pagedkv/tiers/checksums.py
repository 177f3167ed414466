"""Checks of a frame's bytes: xxh3-128, or BLAKE3 with a secret where tenants share a store.

xxh3-128 detects accidental damage: flipped bits, torn and truncated writes. It does not detect forgery, since it can be
computed without a secret. BLAKE3 with a secret of 32 bytes detects both. The packages come with the extra ``tiers``.
They are imported when the first check is computed, so a simulation of tiers does not need them.
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final, TypeAlias

from pagedkv.contract.errors import ConfigurationError
from pagedkv.contract.extras import needing

__all__ = ["CHECK_NBYTES", "SECRET_NBYTES", "Buffer", "compute_check", "require_secret"]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes of a frame or of a payload: one-dimensional, contiguous."""

CHECK_NBYTES: Final = 32
SECRET_NBYTES: Final = 32


@cache
def _package(name: str, what: str) -> ModuleType:
    with needing("tiers", what):
        return import_module(name)


def compute_check(pieces: Iterable[Buffer], secret: bytes | None) -> bytes:
    """Compute the check over the concatenation of several buffers: 32 bytes, the last 16 zero without a secret.

    Cost: 20 GB/s by xxh3-128. Raises MissingExtraError if the package is not installed.
    """
    hasher: Any
    if secret is None:
        hasher = _package("xxhash", "a frame of a tier").xxh3_128()
    else:
        hasher = _package("blake3", "a frame with a secret").blake3(key=secret)
    for piece in pieces:
        hasher.update(piece)
    return bytes(hasher.digest()).ljust(CHECK_NBYTES, b"\0")


def require_secret(secret: bytes | None) -> None:
    """Raise ConfigurationError for a secret that is neither None, for frames without a keyed check, nor 32 bytes."""
    if secret is not None and (not isinstance(secret, bytes) or len(secret) != SECRET_NBYTES):
        kind = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ConfigurationError(f"the secret of frames must be {SECRET_NBYTES} bytes or None, got {kind}")
