"""A second writer of frames, from docs/tier-format.md alone: it shares no code with the first."""

import hashlib
import json

import blake3
import xxhash


def second_writer(  # noqa: PLR0913, PLR0917 - a frame has as many fields
    groups: list[dict[str, object]],
    model: dict[str, object],
    key: bytes,
    parent: bytes,
    first_token: int,
    token_ids: list[int],
    salt: bytes,
    extra_keys: bytes,
    parts: list[bytes],
    secret: bytes | None,
) -> bytes:
    """Write a frame, byte by byte as the page has it."""

    def text(value: object) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    salt_digest = hashlib.sha256(b"pagedkv salt of a frame 1" + salt).digest() if salt else b""
    contents = [
        text(groups),
        text(model),
        salt_digest,
        first_token.to_bytes(8, "little"),
        b"".join(token.to_bytes(4, "little", signed=True) for token in token_ids),
        extra_keys,
        b"".join(len(part).to_bytes(8, "little") for part in parts),
    ]
    sections = b""
    for number, content in enumerate(contents):
        sections += (number + 1).to_bytes(2, "little") + bytes(2) + len(content).to_bytes(4, "little") + content
    header = 128 + len(sections)
    header += -header % 64
    payload = b"".join(part + bytes(-len(part) % 64) for part in parts)
    frame = bytearray(header + len(payload))
    frame[0:8] = b"pkvframe"
    frame[8:10] = (1).to_bytes(2, "little")
    frame[10:12] = (1 if secret else 0).to_bytes(2, "little")
    frame[12:16] = header.to_bytes(4, "little")
    frame[16:24] = len(frame).to_bytes(8, "little")
    frame[64:96] = key
    frame[96:128] = parent
    frame[128 : 128 + len(sections)] = sections
    frame[header:] = payload
    if secret:
        frame[32:64] = blake3.blake3(bytes(frame), key=secret).digest()
    else:
        frame[32:48] = xxhash.xxh3_128_digest(bytes(frame))
    return bytes(frame)
