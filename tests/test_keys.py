"""Extra keys: encodings that can be read back never collide."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import MediaSpan, RequestKeys
from pagedkv.contract.keys import EPOCH, LORA, MEDIA, NO_KEYS, SALT, differing_tags
from pagedkv.errors import ConfigurationError

# Few letters, so that names, versions, salts, digests and epochs are often equal.
texts = st.text("ab\x00", max_size=3)
binaries = texts.map(str.encode)
spans = st.builds(MediaSpan, start=st.integers(0, 6), num_tokens=st.integers(1, 4), digest=binaries)
salts_and_media = {"salt": binaries, "media": st.lists(spans, max_size=2).map(tuple)}
request_keys = st.builds(RequestKeys, **salts_and_media) | st.builds(
    RequestKeys, lora_name=texts, lora_version=texts, **salts_and_media
)


def decode(encoding: bytes) -> list[tuple[int, list[bytes]]]:
    """Read an encoding back, to its last byte: tags with their fields. What can be read back cannot collide."""
    keys = []
    at = 0
    while at < len(encoding):
        tag, num_fields = encoding[at], encoding[at + 1]
        at += 2
        fields = []
        for _ in range(num_fields):
            (length,) = struct.unpack_from("<I", encoding, at)
            fields.append(encoding[at + 4 : at + 4 + length])
            at += 4 + length
        keys.append((tag, fields))
    assert at == len(encoding)
    return keys


@settings(deadline=None)
@given(keys=request_keys, epoch=texts)
def test_a_first_blocks_key_can_be_read_back(keys: RequestKeys, epoch: str) -> None:
    """Promise 8: each kind of key under its own tag, each field behind its length."""
    expected: list[tuple[int, list[bytes]]] = []
    if epoch:
        expected.append((EPOCH, [epoch.encode()]))
    if keys.lora_name is not None:
        expected.append((LORA, [keys.lora_name.encode(), keys.lora_version.encode()]))
    if keys.salt:
        expected.append((SALT, [keys.salt]))
    assert decode(keys.first_block_key(epoch)) == expected


@settings(deadline=None)
@given(keys=request_keys, start=st.integers(0, 8), num_tokens=st.integers(1, 4))
def test_a_media_key_can_be_read_back(keys: RequestKeys, start: int, num_tokens: int) -> None:
    """Promise 8: the digest of every medium that touches the block, with its offset and its length."""
    touching = [
        span
        for span in keys.media
        if set(range(span.start, span.start + span.num_tokens)) & set(range(start, start + num_tokens))
    ]
    decoded = decode(keys.media_key(start, start + num_tokens))
    assert [tag for tag, _ in decoded] == [MEDIA] * len(touching)
    offsets_and_lengths = [struct.unpack("<qq", fields[0]) for _, fields in decoded]
    assert offsets_and_lengths == [(span.start - start, span.num_tokens) for span in touching]
    assert [fields[1] for _, fields in decoded] == [span.digest for span in touching]


@settings(deadline=None, max_examples=300)
@given(left=request_keys, right=request_keys, epochs=st.tuples(texts, texts))
def test_different_keys_have_different_encodings(
    left: RequestKeys, right: RequestKeys, epochs: tuple[str, str]
) -> None:
    """Promise 8: different tags never collide."""

    def meaning(keys: RequestKeys, epoch: str) -> tuple[object, ...]:
        return (epoch, keys.lora_name, keys.lora_version, keys.salt)

    equal = meaning(left, epochs[0]) == meaning(right, epochs[1])
    assert (left.first_block_key(epochs[0]) == right.first_block_key(epochs[1])) == equal


TEXT = "tenant-a"
TAGGED = {
    "epoch": NO_KEYS.first_block_key(TEXT),
    "LoRA": RequestKeys(lora_name=TEXT).first_block_key(""),
    "LoRA of another version": RequestKeys(lora_name=TEXT, lora_version="2").first_block_key(""),
    "salt": RequestKeys(salt=TEXT.encode()).first_block_key(""),
    "media": RequestKeys(media=(MediaSpan(0, 4, TEXT.encode()),)).media_key(0, 4),
    "media elsewhere": RequestKeys(media=(MediaSpan(1, 3, TEXT.encode()),)).media_key(0, 4),
    "shorter media": RequestKeys(media=(MediaSpan(0, 3, TEXT.encode()),)).media_key(0, 4),
    "none": NO_KEYS.first_block_key(""),
}


def test_the_same_text_under_different_tags_differs() -> None:
    assert len(set(TAGGED.values())) == len(TAGGED)


def test_a_request_without_keys_has_an_empty_encoding() -> None:
    assert NO_KEYS.first_block_key("") == NO_KEYS.media_key(0, 16) == b""


def test_media_touch_only_the_blocks_of_their_placeholders() -> None:
    keys = RequestKeys(media=(MediaSpan(4, 4, b"image"),))
    assert keys.media_key(0, 4) == b""
    assert keys.media_key(8, 12) == b""
    assert keys.media_key(4, 8) != b""


def test_media_at_another_offset_from_the_block_differ() -> None:
    keys = RequestKeys(media=(MediaSpan(2, 8, b"image"),))
    assert len({keys.media_key(start, start + 4) for start in (0, 4, 8)}) == 3


def test_keys_do_not_change() -> None:
    with pytest.raises(AttributeError):
        NO_KEYS.salt = b"other"  # type: ignore[misc]
    assert replace(NO_KEYS, salt=b"other") != NO_KEYS


@pytest.mark.parametrize(("start", "num_tokens"), [(-1, 4), (0, 0), (3, -2)])
def test_an_impossible_media_span_is_refused(start: int, num_tokens: int) -> None:
    with pytest.raises(ConfigurationError, match=f"media span must be .* got {start if start < 0 else num_tokens}"):
        MediaSpan(start, num_tokens, b"image")


def test_the_version_of_no_adapter_is_refused() -> None:
    """It would be left out of the identity, and two versions would share their blocks."""
    with pytest.raises(ConfigurationError, match="lora_version 'v2' needs the lora_name whose version it is"):
        RequestKeys(lora_version="v2")


@pytest.mark.parametrize("media", [None, 5, MediaSpan(0, 1, b"image"), (b"image",), "image"], ids=repr)
def test_media_that_are_no_spans_are_refused(media: object) -> None:
    with pytest.raises(ConfigurationError, match="media must be a tuple of MediaSpan values"):
        RequestKeys(media=media)  # type: ignore[arg-type]


def test_media_may_come_in_any_sequence() -> None:
    span = MediaSpan(0, 1, b"image")
    assert RequestKeys(media=[span]) == RequestKeys(media=(span,))  # type: ignore[arg-type]


@settings(deadline=None)
@given(left=request_keys, right=request_keys, epochs=st.tuples(texts, texts))
def test_keys_of_two_blocks_differ_where_their_parts_do(
    left: RequestKeys, right: RequestKeys, epochs: tuple[str, str]
) -> None:
    mine, others = left.first_block_key(epochs[0]), right.first_block_key(epochs[1])
    expected = {
        EPOCH: epochs[0] != epochs[1],
        LORA: (left.lora_name, left.lora_version) != (right.lora_name, right.lora_version),
        SALT: left.salt != right.salt,
    }
    assert differing_tags(mine, others) == {tag for tag, is_other in expected.items() if is_other}
    media = left.media_key(0, 4), right.media_key(0, 4)
    assert differing_tags(mine + media[0], mine + media[1]) == ({MEDIA} if media[0] != media[1] else set())
