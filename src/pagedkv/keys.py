"""Extra keys: what, besides the tokens, makes a block's content what it is.

Each kind of key has its own tag in the encoding, so that a tenant salt can never equal a LoRA name
(a fault seen in vLLM, see docs/faults.md). Keys that hold for a whole sequence go into its first block, and the digest
chain carries them on; a media key goes into every block that its placeholder tokens touch.
"""

import struct
from dataclasses import dataclass
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.numbers import LARGEST_SIZE, as_count

__all__ = ["NO_KEYS", "MediaSpan", "RequestKeys"]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image, a sound or a video in the prompt, in place of ``num_tokens`` placeholder tokens.

    Args:
        start: position of its first placeholder token.
        num_tokens: number of placeholder tokens, at least 1.
        digest: what identifies the content, for example its SHA-256.
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


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """Extra keys of one request.

    Args:
        lora_name: name of the LoRA adapter, or None for the base model.
        lora_version: version of the adapter (its path or content digest), so that a re-pointed name
            never finds the old adapter's blocks.
        salt: a tenant's secret; other tenants' requests never hit this one's blocks.
        media: images and sounds in the prompt.
    """

    lora_name: str | None = None
    lora_version: str = ""
    salt: bytes = b""
    media: tuple[MediaSpan, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.salt, bytes) or not isinstance(self.lora_version, str):
            raise ConfigurationError(
                f"salt must be bytes and lora_version text, got {self.salt!r} and {self.lora_version!r}"
            )
        if self.lora_name is not None and not isinstance(self.lora_name, str):
            raise ConfigurationError(f"lora_name must be text or None, got {self.lora_name!r}")
        object.__setattr__(self, "media", tuple(self.media))
        if not all(isinstance(span, MediaSpan) for span in self.media):
            raise ConfigurationError(f"media must be MediaSpan values, got {self.media!r}")

    def first_block_key(self, weights_epoch: str) -> bytes:
        """Encode what goes into the first block only."""
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
        """Position behind the last placeholder token, 0 without media."""
        return max((span.start + span.num_tokens for span in self.media), default=0)

    def media_key(self, start: int, end: int) -> bytes:
        """Encode the media that touch positions ``[start, end)``, with their offset from ``start``."""
        touching = (span for span in self.media if span.start < end and start < span.start + span.num_tokens)
        return b"".join(
            _encode(MEDIA, struct.pack("<qq", span.start - start, span.num_tokens), span.digest) for span in touching
        )


NO_KEYS: Final = RequestKeys()

EPOCH: Final = 1
LORA: Final = 2
SALT: Final = 3
MEDIA: Final = 4


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _encode(tag: int, *fields: bytes) -> bytes:
    """Tag, number of fields, then each field behind its length: no two inputs give the same bytes."""
    lengths_and_fields = b"".join(struct.pack("<I", len(value)) + value for value in fields)
    return struct.pack("<BB", tag, len(fields)) + lengths_and_fields
