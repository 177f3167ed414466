"""Codecs: how a store writes frames to its medium. None, zstd, AES-GCM, or keys and values in eight bits.

The codec is a part of the identity, so what another one wrote is in another subtree. *Exact* codecs seal a whole frame,
header and tokens included, into a container, which names the codec too::

    0    magic "pkvcoded" | 8 version u16 | 10 zeros (6) | 16 frame_nbytes u64 | 24 name of the codec, zeros (40)
    64   zstd: the frame, compressed
         AES-GCM: nonce (12) | the frame, encrypted | tag (16); the container's header and the entry's key are authentic

What cannot be unsealed, by damage or with another key, is a :class:`~pagedkv.tiers.frame.Refusal`; what can is verified
as any frame. AES-GCM encrypts with a key of 16, 24 or 32 bytes under a random nonce, so one key is for 2**32 entries.
Names of entries are digests of their tokens, and lengths are not hidden.

The *lossy* codec, ``fp8-e4m3``, changes the parts before the frame is made, and its check covers what is stored::

    part of n blocks    scales float32 [n, every dimension but N and C] | numbers e4m3 [n, every dimension]

So a head of a layer of a block has a scale for its keys and one for its values: the largest magnitude over 448.
Numbers are rounded by way of float16. Groups of other types, states among them, are stored as they are. An engine that
loads through a lossy codec computes other keys and values from there on, so all its tiers, and the files that it
exports, have another identity.
"""

import hashlib
import math
import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import as_count
from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.frame import Buffer, Refusal, RefusalReason
from pagedkv.tiers.identity import GroupLayout, Identity

MAGIC: Final = b"pkvcoded"
VERSION: Final = 1
NAME_NBYTES: Final = 40
HEADER: Final = struct.Struct(f"<8sH6xQ{NAME_NBYTES}s")
MOST_FRAME_NBYTES: Final = 2**31
"""A container that tells more is damaged: nothing is allocated for it."""
NONCE_NBYTES: Final = 12
TAG_NBYTES: Final = 16
KEY_SIZES: Final = (16, 24, 32)
KEY_DOMAIN: Final = b"pagedkv key of a tier 1"
HEXADECIMAL: Final = b"0123456789abcdefABCDEF"
COMMAND_WITHIN_S: Final = 60.0
MOST_ZSTD_LEVEL: Final = 22
LOADED: Final = "loaded through"


@dataclass(frozen=True, slots=True)
class Codec:
    """Frames as they are; other codecs change some of this.

    Attributes:
        name: in the identity; empty: none.
        is_lossy: whether other numbers are loaded than were stored.
    """

    is_lossy: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Its name in identities."""
        return ""

    def require_packages(self) -> None:
        """Import what it needs. Raises MissingExtraError."""

    def part_nbytes(self, layout: GroupLayout, nbytes: int) -> int:
        """Return the bytes of a part in the frame."""
        del layout
        return nbytes

    def encode(self, layout: GroupLayout, part: Buffer) -> Buffer:
        """Return a part as it is in the frame. O(bytes)."""
        del layout
        return part

    def decode(self, layout: GroupLayout, part: memoryview) -> memoryview | None:
        """Return a part as it is in blocks; None: its length is none of this codec's. O(bytes)."""
        del layout
        return part

    def most_nbytes(self, frame_nbytes: int) -> int:
        """Return the most bytes that a frame takes on the medium."""
        return frame_nbytes

    def seal(self, pieces: Sequence[Buffer], key: bytes) -> Sequence[Buffer]:
        """Return what is written for the pieces of a frame, the entry of ``key``. O(bytes)."""
        del key
        return pieces

    def unseal(self, stored: Buffer, key: bytes) -> Buffer | Refusal:
        """Return the frame in what was read, not verified yet. O(bytes)."""
        del key
        return stored

    def identity_of(self, identity: Identity) -> Identity:
        """Return the identity of content that is stored through it."""
        return _with_version(identity, "codec", self.name) if self.name else identity


NO_CODEC: Final = Codec()


def _with_version(identity: Identity, what: str, version: str) -> Identity:
    model = identity.model
    return Identity(identity.groups, replace(model, versions=(*model.versions, (what, version))))


def identity_through(identity: Identity, codecs: Sequence[Codec]) -> Identity:
    """Return the identity of what an engine computes whose tiers have these codecs."""
    lossy = sorted({codec.name for codec in codecs if codec.is_lossy})
    return _with_version(identity, LOADED, " ".join(lossy)) if lossy else identity


def _header(name: str, frame_nbytes: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, frame_nbytes, name.encode("ascii"))


def _opened(stored: Buffer, name: str) -> tuple[memoryview, memoryview, int] | Refusal:
    """Return header and content of a container, and the bytes of its frame."""
    view = memoryview(stored).cast("B")
    if view.nbytes < HEADER.size:
        return Refusal(RefusalReason.TRUNCATED, f"{view.nbytes} bytes, fewer than any container")
    magic, version, frame_nbytes, named = HEADER.unpack_from(view)
    if magic != MAGIC:
        return Refusal(RefusalReason.FOREIGN, f"it begins with {magic!r}")
    if version != VERSION:
        return Refusal(RefusalReason.VERSION, f"container version {version}, this reader has {VERSION}")
    if named.rstrip(b"\0") != name.encode("ascii") or bytes(view[: HEADER.size]) != _header(name, frame_nbytes):
        return Refusal(
            RefusalReason.CODEC, f"it was written by codec {named[:NAME_NBYTES]!r}, this reader has {name!r}"
        )
    if frame_nbytes > MOST_FRAME_NBYTES:
        return Refusal(RefusalReason.DAMAGED, f"a frame of {frame_nbytes} bytes")
    return view[: HEADER.size], view[HEADER.size :], frame_nbytes


@final
@dataclass(frozen=True, slots=True)
class Zstd(Codec):
    """Frames compressed by Zstandard; of the extra ``zstd``.

    Args:
        level: 1 to 22: more time for fewer bytes. It is no part of the identity.
    """

    level: int = 1

    def __post_init__(self) -> None:
        as_count(self.level, "the level of zstd", least=1, most=MOST_ZSTD_LEVEL)

    @property
    def name(self) -> str:
        """Its name in identities."""
        return "zstd"

    def require_packages(self) -> None:
        """Import zstandard. Raises MissingExtraError."""
        _zstandard()

    def most_nbytes(self, frame_nbytes: int) -> int:
        """Return the bound of Zstandard, and the header."""
        return HEADER.size + frame_nbytes + frame_nbytes // 256 + 2**17  # more than its ZSTD_COMPRESSBOUND

    def seal(self, pieces: Sequence[Buffer], key: bytes) -> Sequence[Buffer]:
        """Compress a frame."""
        del key
        frame = b"".join(pieces)
        return [_header(self.name, len(frame)), _zstandard().ZstdCompressor(level=self.level).compress(frame)]

    def unseal(self, stored: Buffer, key: bytes) -> Buffer | Refusal:
        """Decompress a frame."""
        del key
        opened = _opened(stored, self.name)
        if isinstance(opened, Refusal):
            return opened
        _, content, frame_nbytes = opened
        package = _zstandard()
        try:
            if package.frame_content_size(content) != frame_nbytes:
                return Refusal(RefusalReason.DAMAGED, f"its frame has not the {frame_nbytes} bytes that it tells")
            frame: bytes = package.ZstdDecompressor().decompress(content, allow_extra_data=False)
        except package.ZstdError as problem:
            return Refusal(RefusalReason.DAMAGED, f"it cannot be decompressed: {problem}")
        return frame


@final
@dataclass(frozen=True, slots=True)
class AesGcm(Codec):
    """Frames encrypted by AES-GCM; of the extra ``encryption``.

    Args:
        key: 16, 24 or 32 random bytes. Its digest is a part of the identity; it is in no message.

    Raises:
        ConfigurationError: a key of another length.
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) not in KEY_SIZES:
            raise ConfigurationError(f"a key of AES-GCM is 16, 24 or 32 bytes, got {_measure(self.key)}")

    @property
    def name(self) -> str:
        """Its name in identities, with a digest of the key."""
        return f"aes-gcm-{hashlib.sha256(KEY_DOMAIN + self.key).hexdigest()[:16]}"

    def require_packages(self) -> None:
        """Import cryptography. Raises MissingExtraError."""
        _aesgcm()

    def most_nbytes(self, frame_nbytes: int) -> int:
        """Return the bytes with header, nonce and tag."""
        return HEADER.size + NONCE_NBYTES + frame_nbytes + TAG_NBYTES

    def seal(self, pieces: Sequence[Buffer], key: bytes) -> Sequence[Buffer]:
        """Encrypt a frame."""
        frame, nonce = b"".join(pieces), os.urandom(NONCE_NBYTES)
        header = _header(self.name, len(frame))
        return [header, nonce, _aesgcm()(self.key).encrypt(nonce, frame, header + key)]

    def unseal(self, stored: Buffer, key: bytes) -> Buffer | Refusal:
        """Decrypt a frame that is authentic."""
        opened = _opened(stored, self.name)
        if isinstance(opened, Refusal):
            return opened
        header, content, frame_nbytes = opened
        if content.nbytes != NONCE_NBYTES + frame_nbytes + TAG_NBYTES:
            return Refusal(RefusalReason.TRUNCATED, f"{content.nbytes} bytes for a frame of {frame_nbytes}")
        with needing("encryption", "codec aes-gcm"):
            invalid: type[Exception] = import_module("cryptography.exceptions").InvalidTag
        try:
            frame: bytes = _aesgcm()(self.key).decrypt(
                content[:NONCE_NBYTES], content[NONCE_NBYTES:], bytes(header) + key
            )
        except invalid:
            return Refusal(RefusalReason.DAMAGED, "it is not authentic: another key, other bytes, or of another entry")
        return frame


def _measure(key: object) -> str:
    return f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__


@cache
def _zstandard() -> Any:  # noqa: ANN401 - a package without types
    with needing("zstd", "codec zstd"):
        return import_module("zstandard")


@cache
def _aesgcm() -> Any:  # noqa: ANN401 - of an optional package
    with needing("encryption", "codec aes-gcm"):
        return import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM


Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]
LARGEST: Final = 448.0
NAN_CODE: Final = 127
SIGN: Final = 128
ITEM_NBYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_NBYTES: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Fp8(Codec):
    """Keys and values in eight bits, e4m3, with a scale for each head of each layer of each block."""

    is_lossy: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Its name in identities."""
        return "fp8-e4m3"

    def part_nbytes(self, layout: GroupLayout, nbytes: int) -> int:
        """Return the bytes of scales and numbers."""
        if not _is_float(layout) or nbytes % _block_nbytes(layout):
            return nbytes
        return nbytes // _block_nbytes(layout) * _coded_nbytes(layout)

    def encode(self, layout: GroupLayout, part: Buffer) -> Buffer:
        """Round a part to eight bits."""
        view = memoryview(part).cast("B")
        if not _is_float(layout) or view.nbytes % _block_nbytes(layout):
            return part
        numbers = _as_float32(layout.dtype, view).reshape(-1, *layout.shape)
        largest = np.abs(numbers, where=np.isfinite(numbers), out=np.zeros_like(numbers)).max(
            _reduced(layout), keepdims=True
        )
        scales = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1.0)).astype("<f4")
        with np.errstate(invalid="ignore", over="ignore"):
            halves = np.clip(numbers / scales, -LARGEST, LARGEST).astype(np.float16)
        codes: Codes = _code_of_half()[halves.view(np.uint16)]
        return bytes(scales.tobytes() + codes.tobytes())

    def decode(self, layout: GroupLayout, part: memoryview) -> memoryview | None:
        """Return the numbers of a part in their own type; None: its length is none of this codec's."""
        if not _is_float(layout):
            return part
        num_blocks, rest = divmod(part.nbytes, _coded_nbytes(layout))
        if rest:
            return None
        shape = [1 if place in _reduced(layout) else size for place, size in enumerate((num_blocks, *layout.shape))]
        num_scales = math.prod(shape)
        scales = np.frombuffer(part[: SCALE_NBYTES * num_scales], "<f4").reshape(shape)
        codes = np.frombuffer(part[SCALE_NBYTES * num_scales :], np.uint8).reshape(num_blocks, *layout.shape)
        return _as_bytes(layout.dtype, _value_of_code()[codes] * scales).data


def _is_float(layout: GroupLayout) -> bool:
    """Whether blocks of a group are contiguous numbers of a type that is rounded."""
    contiguous = tuple(math.prod(layout.shape[place + 1 :]) for place in range(len(layout.shape)))
    return layout.dtype in ITEM_NBYTES and {"N", "C"} <= set(layout.letters) and layout.strides == contiguous


def _block_nbytes(layout: GroupLayout) -> int:
    return ITEM_NBYTES[layout.dtype] * math.prod(layout.shape)


def _coded_nbytes(layout: GroupLayout) -> int:
    num_scales = math.prod(
        size for letter, size in zip(layout.letters, layout.shape, strict=True) if letter not in "NC"
    )
    return SCALE_NBYTES * num_scales + math.prod(layout.shape)


def _reduced(layout: GroupLayout) -> tuple[int, ...]:
    """Return the dimensions that share a scale, behind that of the blocks."""
    return tuple(place for place, letter in enumerate(layout.letters, 1) if letter in "NC")


def _as_float32(dtype: str, view: memoryview) -> Floats:
    if dtype == "bfloat16":
        return (np.frombuffer(view, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(view, "<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _as_bytes(dtype: str, numbers: Floats) -> npt.NDArray[np.uint8]:
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(numbers), 0x7FC0, rounded).astype("<u2").reshape(-1).view(np.uint8)
    with np.errstate(over="ignore"):
        return numbers.astype("<f2" if dtype == "float16" else "<f4").reshape(-1).view(np.uint8)


@cache
def _value_of_code() -> Floats:
    """The number of each of 256 codes: sign, four bits of exponent, three of mantissa; no infinity."""
    codes = np.arange(SIGN)
    exponents, mantissas = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    positive = np.where(exponents > 0, normal, np.ldexp(mantissas / 8, -6)).astype(np.float32)
    positive[NAN_CODE] = np.nan
    return np.concatenate((positive, -positive))


@cache
def _code_of_half() -> Codes:
    """The code of each float16, by its bits: the nearest number, of two the one with an even mantissa."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = _value_of_code()[:NAN_CODE]
    middles = (values[:-1] + values[1:]) / 2
    magnitudes = np.abs(halves)
    codes = np.searchsorted(middles, magnitudes, side="left")
    is_tie = (codes < len(middles)) & (magnitudes == middles[np.minimum(codes, len(middles) - 1)])
    codes += is_tie & (codes % 2 == 1)
    codes[np.isnan(halves)] = NAN_CODE
    signs = np.where(np.signbit(halves), SIGN, 0)
    return (codes + signs).astype(np.uint8)


def parse_codec(text: str) -> Codec:
    """Read a codec: ``none``, ``zstd``, ``zstd:LEVEL``, ``fp8-e4m3``, ``aes-gcm:file:PATH``, ``aes-gcm:command:LINE``.

    A key is 16, 24 or 32 bytes, or as many in hexadecimal digits: the content of a file, or what a command line prints.

    Raises:
        ConfigurationError: it is none of these, or there is no such key.

    >>> parse_codec("zstd:3").name, parse_codec("none").name
    ('zstd', '')
    """
    kind, _, rest = text.partition(":")
    if kind == "zstd" and (not rest or rest.isdecimal()):
        return Zstd(int(rest)) if rest else Zstd()
    source, _, where = rest.partition(":")
    if kind == "aes-gcm" and source in {"file", "command"} and where:
        return AesGcm(_key_of(_from_file(where) if source == "file" else _from_command(where)))
    if text in {"none", "fp8-e4m3"}:
        return Fp8() if text == "fp8-e4m3" else NO_CODEC
    raise ConfigurationError(
        f"a codec is none, zstd, zstd:LEVEL, fp8-e4m3, aes-gcm:file:PATH or aes-gcm:command:LINE; got {text!r:.80}"
    )


def _from_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise ConfigurationError(f"the key of a tier cannot be read: {path}: {problem.strerror}") from problem


def _from_command(line: str) -> bytes:
    try:
        ended = subprocess.run(line, shell=True, stdout=subprocess.PIPE, timeout=COMMAND_WITHIN_S, check=True)  # noqa: S602 - its user's
    except (OSError, subprocess.SubprocessError) as problem:
        kind = (
            f"exit status {problem.returncode}" if isinstance(problem, subprocess.CalledProcessError) else "no answer"
        )
        raise ConfigurationError(f"the command that prints the key of a tier failed: {kind}") from None
    return ended.stdout


def _key_of(content: bytes) -> bytes:
    """Return the key in a file or an output: its bytes, or those of its hexadecimal digits."""
    digits = content.strip()
    if len(digits) in {2 * size for size in KEY_SIZES} and set(digits) <= set(HEXADECIMAL):
        return bytes.fromhex(digits.decode("ascii"))
    return content
