"""Extra keys: the inputs besides the tokens that determine a block's content.

Each kind of key has its own tag in the encoding, so that a tenant's salt never equals a LoRA name
(a fault seen in vLLM, see docs/faults.md). Keys of a whole sequence are encoded in its first block only, since the
digest chain covers the blocks after it. A media key is encoded in every block that overlaps its placeholder tokens.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import LARGEST_SIZE, as_count
from pagedkv.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image, a sound or a video in the prompt, in place of ``num_tokens`` placeholder tokens.

    Args:
        start: position of its first placeholder token.
        num_tokens: number of placeholder tokens, at least 1.
        digest: identifies the content, for example its SHA-256.
    """

    start: int
    num_tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes):
            raise ConfigurationError(f"the digest of a media span must be bytes, got {self.digest!r}")
        object.__setattr__(self, "start", as_count(self.start, "the start of a media span"))
        num_tokens = as_count(
            self.num_tokens, "the num_tokens of a media span", least=1, most=LARGEST_SIZE - self.start
        )
        object.__setattr__(self, "num_tokens", num_tokens)


class MediaArrays(NamedTuple):
    """The media of a request, in their order, as arrays for compiled loops.

    Args:
        starts, ends: int64 ``[media]``, the positions ``[start, end)`` of each medium.
        bounds: int64 ``[media + 1]``; the digest of medium i is ``digests[bounds[i] : bounds[i + 1]]``.
        digests: uint8, all digests concatenated.
        begin, end: the first position of any medium, and the one after the last.
    """

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint8]
    begin: int
    end: int


NO_MEDIA: Final = MediaArrays(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.uint8), 0, 0
)


def _as_spans(media: Iterable[MediaSpan]) -> tuple[MediaSpan, ...]:
    message = f"media must be a tuple of MediaSpan values, () for none, got {media!r}"
    try:
        spans = tuple(media)
    except TypeError as problem:
        raise ConfigurationError(message) from problem
    if not all(isinstance(span, MediaSpan) for span in spans):
        raise ConfigurationError(message)
    return spans


def _as_arrays(media: tuple[MediaSpan, ...]) -> MediaArrays:
    count = len(media)
    starts = np.fromiter((span.start for span in media), np.int64, count)
    ends = np.fromiter((span.start + span.num_tokens for span in media), np.int64, count)
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum([len(span.digest) for span in media], out=bounds[1:])
    digests = np.frombuffer(b"".join(span.digest for span in media), np.uint8)
    return MediaArrays(starts, ends, bounds, digests, int(starts.min()), int(ends.max()))


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """Extra keys of one request.

    Args:
        lora_name: name of the LoRA adapter, or None for the base model.
        lora_version: version of the adapter (its path or content digest), so that after a name is assigned to another
            adapter, the old adapter's blocks do not hit.
        salt: a tenant's secret; other tenants' requests never hit this one's blocks.
        media: images, sounds and videos in the prompt.

    Attributes:
        media_arrays: the media as arrays, built once, since every match and every growth reads them.
    """

    lora_name: str | None = None
    lora_version: str = ""
    salt: bytes = b""
    media: tuple[MediaSpan, ...] = ()
    media_arrays: MediaArrays = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.salt, bytes) or not isinstance(self.lora_version, str):
            raise ConfigurationError(
                f"salt must be bytes and lora_version text, got {self.salt!r} and {self.lora_version!r}"
            )
        if self.lora_name is not None and not isinstance(self.lora_name, str):
            raise ConfigurationError(f"lora_name must be text or None, got {self.lora_name!r}")
        if self.lora_name is None and self.lora_version:
            raise ConfigurationError(f"lora_version {self.lora_version!r} needs the lora_name whose version it is")
        object.__setattr__(self, "media", _as_spans(self.media))
        object.__setattr__(self, "media_arrays", _as_arrays(self.media) if self.media else NO_MEDIA)

    def first_block_key(self, weights_epoch: str) -> bytes:
        """Encode the keys of the first block, except media."""
        encoded = b""
        if weights_epoch:
            encoded += _encode(EPOCH, _utf8(weights_epoch))
        if self.lora_name is not None:
            encoded += _encode(LORA, _utf8(self.lora_name), _utf8(self.lora_version))
        if self.salt:
            encoded += _encode(SALT, self.salt)
        return encoded

    @property
    def media_reach(self) -> int:
        """Position after the last placeholder token; 0 without media."""
        return self.media_arrays.end

    def media_key(self, start: int, end: int) -> bytes:
        """Encode the media that overlap positions ``[start, end)``, with their offset from ``start``."""
        touching = (span for span in self.media if span.start < end and start < span.start + span.num_tokens)
        return b"".join(
            _encode(MEDIA, struct.pack("<qq", span.start - start, span.num_tokens), span.digest) for span in touching
        )


NO_KEYS: Final = RequestKeys()

EPOCH: Final = 1
LORA: Final = 2
SALT: Final = 3
MEDIA: Final = 4


def differing_tags(left: bytes, right: bytes) -> set[int]:
    """Return the kinds of extra keys that differ between two encodings: ``EPOCH``, ``LORA``, ``SALT``, ``MEDIA``."""
    mine, others = _by_tag(left), _by_tag(right)
    return {tag for tag in mine.keys() | others.keys() if mine.get(tag) != others.get(tag)}


def fields_of(encoding: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Split the encoding of a block's extra keys into the tag and the fields of each key."""
    at = 0
    while at < len(encoding):
        tag, num_fields = struct.unpack_from("<BB", encoding, at)
        at += 2
        fields = []
        for _ in range(num_fields):
            begin = at + 4
            at = begin + int.from_bytes(encoding[at:begin], "little")
            fields.append(encoding[begin:at])
        yield tag, fields


def _by_tag(encoding: bytes) -> dict[int, list[list[bytes]]]:
    """Split an encoding into the fields of single keys, by tag."""
    keys: dict[int, list[list[bytes]]] = {}
    for tag, fields in fields_of(encoding):
        keys.setdefault(tag, []).append(fields)
    return keys


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _encode(tag: int, *fields: bytes) -> bytes:
    """Encode a tag, the number of fields, and each field after its length: distinct inputs give distinct bytes."""
    lengths_and_fields = b"".join(struct.pack("<I", len(value)) + value for value in fields)
    return struct.pack("<BB", tag, len(fields)) + lengths_and_fields
