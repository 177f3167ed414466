"""The frame: a run of blocks with its identity and a check of every byte, as tiers and other programs store it.

docs/tier-format.md specifies it. All integers are little-endian::

    0    magic "pkvframe" | 8 version u16 | 10 flags u16 | 12 header_nbytes u32 | 16 frame_nbytes u64 | 24 zeros (8)
    32   check (32)       the whole frame, this field as zeros
    64   key (32)         chain digest of the run's last block
    96   parent (32)      chain digest of the block before its first one
    128  sections         tag u16, zero u16, length u32, bytes; tags 1 to 7, each once, in this order; zeros up to
    header_nbytes         the parts, one a group, each from a multiple of 64 on, zeros between them, up to frame_nbytes

Reading has two steps. :func:`open_frame` verifies the bytes by themselves. :meth:`OpenFrame.compare` compares the
content with what is expected, tokens included. A frame that fails either is a :class:`Refusal`, never an exception,
since damage is an ordinary answer of a tier.

The check is xxh3-128, or BLAKE3 with a secret where tenants share a store. xxh3-128 detects accidental damage: flipped
bits, torn and truncated writes. It does not detect forgery, since it can be computed without a secret. BLAKE3 with a
secret of 32 bytes detects both. The packages come with the extra ``tiers``. They are imported when the first check is
computed, so a simulation of tiers does not need them.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import IO, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.identity import Identity, Run

MAGIC: Final = b"pkvframe"
FRAME_VERSION: Final = 1
FIXED: Final = struct.Struct("<8sHHIQ8x")
SECTION: Final = struct.Struct("<HHI")
CHECK_AT: Final = FIXED.size
CHECK_NBYTES: Final = 32
KEY_AT: Final = CHECK_AT + CHECK_NBYTES
SECTIONS_AT: Final = KEY_AT + 64
ALIGNMENT: Final = 64
NO_CHECK: Final = bytes(CHECK_NBYTES)
KEYED: Final = 1
UNCHECKED: Final = 2
LAYOUT, MODEL, SALT, POSITION, TOKENS, EXTRA_KEYS, LENGTHS = range(1, 8)
NUM_SECTIONS: Final = LENGTHS


class RefusalReason(StrEnum):
    """The reason why a frame is refused."""

    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    VERSION = "version"
    CODEC = "codec"
    DAMAGED = "damaged"
    UNKEYED = "unkeyed"
    KEYED = "keyed"
    LAYOUT = "layout"
    MODEL = "model"
    SALT = "salt"
    KEY = "key"
    CHAIN = "chain"
    TOKENS = "tokens"
    EXTRA_KEYS = "extra keys"
    LENGTHS = "lengths"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a frame.

    Args:
        reason: the first fault that was found.
        detail: the numbers that explain the reason.
    """

    reason: RefusalReason
    detail: str


def _refuse(reason: RefusalReason, detail: str) -> Refusal:
    return Refusal(reason, detail)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes of a frame or of a payload: one-dimensional, contiguous."""


def frame_pieces(
    identity: Identity, run: Run, parts: Sequence[Buffer], secret: bytes | None = None, *, checked: bool = True
) -> list[Buffer]:
    """Write a frame as buffers to be concatenated: its header, then the parts themselves and the zeros between them.

    Args:
        identity: layout and model.
        run: the blocks.
        parts: the bytes of each group's blocks, in the order of ``identity.groups``. They are not copied.
        secret: 32 bytes for a keyed check; None for xxh3-128.
        checked: False for frames that stay in the memory of this process: the check is left out.

    Raises:
        ConfigurationError: the number of parts is not that of groups, or the secret is not 32 bytes.
        MissingExtraError: the package that computes the check is not installed.
    """
    require_secret(secret)
    if len(parts) != len(identity.groups):
        raise ConfigurationError(f"a frame of {len(identity.groups)} groups needs as many parts, got {len(parts)}")
    views = [memoryview(part).cast("B") for part in parts]
    contents = (
        identity.layout_text,
        identity.model_text,
        run.salt_digest,
        struct.pack("<Q", run.first_token),
        run.token_bytes,
        run.extra_keys,
        struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views)),
    )
    sections = b"".join(SECTION.pack(tag, 0, len(content)) + content for tag, content in enumerate(contents, LAYOUT))
    header_nbytes = _padded(SECTIONS_AT + len(sections))
    frame_nbytes = header_nbytes + sum(_padded(view.nbytes) for view in views)
    flags = (KEYED if secret is not None else 0) | (0 if checked else UNCHECKED)
    fixed = FIXED.pack(MAGIC, FRAME_VERSION, flags, header_nbytes, frame_nbytes)
    rest = run.key + run.parent + sections.ljust(header_nbytes - SECTIONS_AT, b"\0")
    payload: list[Buffer] = []
    for view in views:
        payload.append(view)
        if view.nbytes % ALIGNMENT:
            payload.append(bytes(_padded(view.nbytes) - view.nbytes))
    check = compute_check([fixed, NO_CHECK, rest, *payload], secret) if checked else NO_CHECK
    return [fixed + check + rest, *payload]


def frame_nbytes(identity: Identity, run: Run, part_nbytes: Sequence[int]) -> int:
    """Compute the size of a frame from the sizes of its parts. O(groups)."""
    texts = len(identity.layout_text) + len(identity.model_text) + len(run.salt_digest) + len(run.extra_keys)
    numbers = 8 + run.token_ids.nbytes + 8 * len(part_nbytes)
    return _padded(SECTIONS_AT + NUM_SECTIONS * SECTION.size + texts + numbers) + sum(map(_padded, part_nbytes))


def write_frame(identity: Identity, run: Run, parts: Sequence[Buffer], secret: bytes | None = None) -> bytes:
    """Write a frame as one buffer. Raises as :func:`frame_pieces` does. O(bytes)."""
    return b"".join(frame_pieces(identity, run, parts, secret))


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """A frame whose bytes are verified; :meth:`compare` finds whether it is the expected one.

    Args:
        key, parent: digests of the chain.
        sections: the sections' contents, in the order of their tags.
        parts: the bytes of each group's blocks, views of the buffer.
    """

    key: bytes
    parent: bytes
    sections: tuple[bytes, ...]
    parts: tuple[memoryview, ...]

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Its tokens: int32 ``[n]``. A rest of fewer than four bytes is left out; :meth:`compare` refuses it."""
        tokens = self.sections[TOKENS - 1]
        return np.frombuffer(tokens, "<i4", len(tokens) // 4).astype(np.int32)

    def compare(self, identity: Identity, run: Run) -> Refusal | None:
        """Compare with the expected identity and run; None if all is equal. O(tokens). Changes nothing."""
        expected = (
            (RefusalReason.LAYOUT, self.sections[LAYOUT - 1], identity.layout_text),
            (RefusalReason.MODEL, self.sections[MODEL - 1], identity.model_text),
            (RefusalReason.SALT, self.sections[SALT - 1], run.salt_digest),
            (RefusalReason.KEY, self.key, run.key),
            (RefusalReason.CHAIN, self.parent, run.parent),
            (RefusalReason.CHAIN, self.sections[POSITION - 1], struct.pack("<Q", run.first_token)),
            (RefusalReason.TOKENS, self.sections[TOKENS - 1], run.token_bytes),
            (RefusalReason.EXTRA_KEYS, self.sections[EXTRA_KEYS - 1], run.extra_keys),
        )
        for reason, found, wanted in expected:
            if found != wanted:
                return _refuse(reason, f"the frame has another {reason} than run {run.key.hex()[:16]}")
        if len(self.parts) != len(identity.groups):
            return _refuse(RefusalReason.LENGTHS, f"{len(self.parts)} parts for {len(identity.groups)} groups")
        return None


def read_frames(file: IO[bytes], most_nbytes: int) -> bytearray | None:
    """Read consecutive frames from a file, each as long as its header says. Nothing is verified.

    Returns their bytes, up to what is no frame if there is such a thing; None: they have more than ``most_nbytes``. So
    a file without an end is not read for ever.
    """
    buffer = bytearray()
    while begin := file.read(SECTIONS_AT):
        buffer += begin
        if len(begin) < SECTIONS_AT or not begin.startswith(MAGIC):
            break
        nbytes = int(FIXED.unpack_from(begin)[-1]) - len(begin)
        if len(buffer) + nbytes > most_nbytes:
            return None
        buffer += file.read(max(0, nbytes))
    return buffer


def frames_of(buffer: Buffer, secret: bytes | None = None) -> list[OpenFrame] | Refusal:
    """Verify consecutive frames, such as a file of an exported prefix. O(bytes). Raises as :func:`open_frame`."""
    view = memoryview(buffer).cast("B")
    frames, begin = [], 0
    while begin < view.nbytes:
        if view.nbytes - begin < SECTIONS_AT:
            return _refuse(RefusalReason.TRUNCATED, f"{view.nbytes - begin} bytes, fewer than any frame")
        nbytes = FIXED.unpack_from(view, begin)[-1]
        opened = open_frame(view[begin : begin + max(nbytes, SECTIONS_AT)], secret)
        if isinstance(opened, Refusal):
            return opened
        frames.append(opened)
        begin += nbytes
    return frames


def open_frame(buffer: Buffer, secret: bytes | None = None, *, trusted: bool = False) -> OpenFrame | Refusal:
    """Verify the bytes of a frame by themselves. O(bytes). Changes nothing.

    Args:
        buffer: the whole frame; nothing may follow it.
        secret: 32 bytes: only frames with the keyed check of this secret are accepted; None: only frames without one.
        trusted: whether the buffer never left the memory of this process; then only frames without a check are
            accepted, and else only those with one.

    Raises:
        ConfigurationError: a secret that is not 32 bytes.
        MissingExtraError: the package that computes the check is not installed.
    """
    require_secret(secret)
    view = memoryview(buffer).cast("B")
    extent = _read_extent(view)
    if isinstance(extent, Refusal):
        return extent
    flags, header_nbytes = extent
    refusal = _verify(view, flags, secret, trusted=trusted)
    if refusal is not None:
        return refusal
    sections = _read_sections(view[SECTIONS_AT:header_nbytes])
    if sections is None:
        return _refuse(RefusalReason.DAMAGED, "its sections do not fill the header")
    lengths = struct.unpack(f"<{len(sections[LENGTHS - 1]) // 8}Q", sections[LENGTHS - 1])
    parts, begin = [], header_nbytes
    for length in lengths:
        parts.append(view[begin : begin + length])
        begin += _padded(length)
    if begin != view.nbytes:
        return _refuse(RefusalReason.DAMAGED, f"its parts end at {begin}, the frame at {view.nbytes}")
    key, parent = bytes(view[KEY_AT : KEY_AT + 32]), bytes(view[KEY_AT + 32 : SECTIONS_AT])
    return OpenFrame(key, parent, sections, tuple(parts))


def _read_extent(view: memoryview) -> tuple[int, int] | Refusal:
    """Read flags and the header's length, after a check of magic, version and lengths."""
    if view.nbytes < SECTIONS_AT:
        return _refuse(RefusalReason.TRUNCATED, f"{view.nbytes} bytes, fewer than any frame")
    magic, version, flags, header_nbytes, frame_nbytes = FIXED.unpack_from(view)
    if magic != MAGIC:
        return _refuse(RefusalReason.FOREIGN, f"it begins with {magic!r}")
    if version != FRAME_VERSION:
        return _refuse(RefusalReason.VERSION, f"version {version}, this reader has {FRAME_VERSION}")
    if frame_nbytes != view.nbytes:
        reason = RefusalReason.TRUNCATED if frame_nbytes > view.nbytes else RefusalReason.DAMAGED
        return _refuse(reason, f"{view.nbytes} bytes of {frame_nbytes}")
    if not SECTIONS_AT <= header_nbytes <= frame_nbytes or header_nbytes % ALIGNMENT:
        return _refuse(RefusalReason.DAMAGED, f"a header of {header_nbytes} bytes")
    return flags, header_nbytes


def _verify(  # noqa: PLR0911 - one return a refusal
    view: memoryview, flags: int, secret: bytes | None, *, trusted: bool
) -> Refusal | None:
    """Refuse a frame whose check is not that of its bytes, or is of another kind than expected; None if it is valid."""
    if flags & ~(KEYED | UNCHECKED):
        return _refuse(RefusalReason.DAMAGED, f"flags {flags:#x}")
    if bool(flags & UNCHECKED) != trusted:
        return _refuse(RefusalReason.DAMAGED, "only frames of this process's memory carry no check")
    if bool(flags & KEYED) != (secret is not None):
        if secret is None:
            return _refuse(RefusalReason.KEYED, "its check needs a secret")
        return _refuse(RefusalReason.UNKEYED, "its check was made without a secret")
    if trusted:
        return None
    computed = compute_check([view[:CHECK_AT], NO_CHECK, view[KEY_AT:]], secret)
    if computed != view[CHECK_AT:KEY_AT]:
        return _refuse(RefusalReason.DAMAGED, "check and bytes differ")
    return None


def _read_sections(view: memoryview) -> tuple[bytes, ...] | None:
    """Read the sections and the zeros behind them; None if they are not as specified."""
    sections, at = [], 0
    for expected in range(1, NUM_SECTIONS + 1):
        if at + SECTION.size > view.nbytes:
            return None
        tag, zero, length = SECTION.unpack_from(view, at)
        at += SECTION.size
        if tag != expected or zero or at + length > view.nbytes:
            return None
        sections.append(bytes(view[at : at + length]))
        at += length
    if view.nbytes - at >= ALIGNMENT or any(view[at:]) or len(sections[LENGTHS - 1]) % 8:
        return None
    return tuple(sections)


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
