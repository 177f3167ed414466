"""Frames: golden ones by two writers, and every damage and every other identity is refused, for its reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.blocks.digests import ROOT_DIGEST, hash_request_tokens
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.frame import (
    OpenFrame,
    Refusal,
    RefusalReason,
    frame_nbytes,
    frame_pieces,
    open_frame,
    write_frame,
)
from pagedkv.tiers.identity import Identity, ModelIdentity, Run, runs_of
from tests.tiers.examples import IDENTITY, MODEL, SALTED, SECRET, other_identities, parts_of, some_runs
from tests.tiers.second_writer import second_writer

GOLDEN: Final = json.loads((Path(__file__).parent / "golden_frames.json").read_text())
FIRST, SECOND, _THIRD = some_runs()


def written_second(run: Run, secret: bytes | None) -> bytes:
    groups: list[dict[str, object]] = [
        {
            "name": group.name,
            "block_size": group.block_size,
            "dtype": group.dtype,
            "letters": group.letters,
            "shape": list(group.shape),
            "strides": list(group.strides),
            "scales": [scale.hex() for scale in group.scales],
        }
        for group in IDENTITY.groups
    ]
    model: dict[str, object] = {
        "name": "toy",
        "weights": bytes(range(32)).hex(),
        "adapters": [["tuned", bytes(range(16)).hex()]],
        "versions": [["rope", "1"]],
    }
    tokens = run.token_ids.tolist()
    parts = list(parts_of(run))
    return second_writer(
        groups, model, run.key, run.parent, run.first_token, tokens, run.salt, run.extra_keys, parts, secret
    )


def reason_of(buffer: bytes, identity: Identity = IDENTITY, run: Run = FIRST, secret: bytes | None = None) -> str:
    """Read a frame; return the reason of its refusal, "" if it is served."""
    opened = open_frame(buffer, secret)
    refusal = opened.compare(identity, run) if isinstance(opened, OpenFrame) else opened
    return "" if refusal is None else str(refusal.reason)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "keyed"])
@pytest.mark.parametrize("place", [0, 1])
def test_golden_frames_are_written_alike_by_both_writers(place: int, secret: bytes | None) -> None:
    run = some_runs()[place]
    golden = bytes.fromhex(GOLDEN[f"{place} {'keyed' if secret else 'plain'}"])
    assert write_frame(IDENTITY, run, parts_of(run), secret) == golden
    assert written_second(run, secret) == golden
    opened = open_frame(golden, secret)
    assert isinstance(opened, OpenFrame)
    assert opened.compare(IDENTITY, run) is None
    assert tuple(map(bytes, opened.parts)) == parts_of(run)


def test_the_size_of_a_frame_is_known_before_it_is_written() -> None:
    for run in some_runs():
        sizes = [len(part) for part in parts_of(run)]
        assert frame_nbytes(IDENTITY, run, sizes) == len(write_frame(IDENTITY, run, parts_of(run)))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "keyed"])
def test_every_flipped_bit_is_found(secret: bytes | None) -> None:
    frame = bytearray(write_frame(IDENTITY, FIRST, parts_of(FIRST), secret))
    for place in range(len(frame)):
        for bit in range(8):
            frame[place] ^= 1 << bit
            assert reason_of(bytes(frame), secret=secret), f"bit {bit} of byte {place}"
            frame[place] ^= 1 << bit
    assert not reason_of(bytes(frame), secret=secret)


def test_every_truncation_and_every_addition_is_found() -> None:
    frame = write_frame(IDENTITY, FIRST, parts_of(FIRST))
    assert {reason_of(frame[:length]) for length in range(len(frame))} == {"truncated"}
    assert reason_of(frame + b"\0") == "damaged"


@given(st.data())
def test_any_change_of_some_bytes_is_found(data: st.DataObject) -> None:
    frame = bytearray(write_frame(IDENTITY, FIRST, parts_of(FIRST)))
    begin = data.draw(st.integers(0, len(frame) - 1))
    new = data.draw(st.binary(min_size=1, max_size=len(frame) - begin))
    is_changed = frame[begin : begin + len(new)] != new
    frame[begin : begin + len(new)] = new
    assert bool(reason_of(bytes(frame))) == is_changed


@given(st.binary(max_size=400))
def test_random_bytes_behind_the_magic_are_refused_and_never_crash(content: bytes) -> None:
    assert reason_of(b"pkvframe\x01\0\0\0" + content)


def test_two_files_swapped_are_found_by_their_keys() -> None:
    first, second = (write_frame(IDENTITY, run, parts_of(run)) for run in (FIRST, SECOND))
    assert (reason_of(second, run=FIRST), reason_of(first, run=SECOND)) == ("key", "key")


@pytest.mark.parametrize("name", sorted(other_identities()))
def test_another_identity_is_refused_and_has_another_subtree(name: str) -> None:
    other = other_identities()[name]
    assert other.fingerprint != IDENTITY.fingerprint
    run = FIRST
    assert reason_of(write_frame(other, run, (parts_of(run) * 2)[: len(other.groups)])) == name.partition(" ")[0]


def test_each_thing_that_differs_has_its_own_reason() -> None:
    plain = write_frame(IDENTITY, FIRST, parts_of(FIRST))
    other_salt = some_runs(keys=replace(SALTED, salt=b"another tenant"))[0]
    no_salt = some_runs(keys=RequestKeys("tuned", "2", b"", SALTED.media))[0]
    changed = FIRST.token_ids.copy()
    changed[3] += 1
    frames = {
        RefusalReason.VERSION: plain[:8] + b"\x02\0" + plain[10:],
        RefusalReason.FOREIGN: b"PK" + plain[2:],
        RefusalReason.KEYED: write_frame(IDENTITY, FIRST, parts_of(FIRST), SECRET),
        RefusalReason.SALT: write_frame(IDENTITY, other_salt, parts_of(FIRST)),
        RefusalReason.CHAIN: write_frame(IDENTITY, replace(FIRST, parent=bytes(32)), parts_of(FIRST)),
        RefusalReason.TOKENS: write_frame(IDENTITY, replace(FIRST, token_ids=changed), parts_of(FIRST)),
        RefusalReason.EXTRA_KEYS: write_frame(IDENTITY, replace(FIRST, extra_keys=b""), parts_of(FIRST)),
    }
    assert {reason: reason_of(frame) for reason, frame in frames.items()} == {reason: str(reason) for reason in frames}
    assert reason_of(write_frame(IDENTITY, no_salt, parts_of(FIRST))) == "salt"
    moved = write_frame(IDENTITY, replace(FIRST, first_token=8), parts_of(FIRST))
    assert reason_of(moved) == "chain"


def test_with_a_secret_only_frames_of_this_secret_are_served() -> None:
    parts = parts_of(FIRST)
    assert not reason_of(write_frame(IDENTITY, FIRST, parts, SECRET), secret=SECRET)
    assert reason_of(write_frame(IDENTITY, FIRST, parts), secret=SECRET) == "unkeyed"
    assert reason_of(write_frame(IDENTITY, FIRST, parts, bytes(32)), secret=SECRET) == "damaged"


def test_a_frame_without_a_check_is_served_from_memory_only() -> None:
    pieces = frame_pieces(IDENTITY, FIRST, parts_of(FIRST), checked=False)
    frame = b"".join(pieces)
    assert isinstance(open_frame(frame, trusted=True), OpenFrame)
    assert isinstance(open_frame(frame), Refusal)
    assert isinstance(open_frame(write_frame(IDENTITY, FIRST, parts_of(FIRST)), trusted=True), Refusal)


def test_a_salt_is_not_written_into_the_frame() -> None:
    assert FIRST.salt == b"secret of a tenant"
    assert all(FIRST.salt not in write_frame(IDENTITY, run, parts_of(run)) for run in some_runs())


def test_runs_are_keyed_by_the_chain_of_their_blocks() -> None:
    tokens = list(range(30))
    digests = hash_request_tokens(tokens, 4)
    runs = runs_of(tokens, 4, 3)
    assert [run.key for run in runs] == [digests[2], digests[5]]
    assert [run.parent for run in runs] == [ROOT_DIGEST, digests[2]]
    assert [run.first_token for run in runs] == [0, 12]
    assert np.concatenate([run.token_ids for run in runs]).tolist() == tokens[:24]
    assert runs_of(tokens[:11], 4, 3, NO_KEYS) == []


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a frame of 2 groups needs as many parts, got 1"):
        write_frame(IDENTITY, FIRST, parts_of(FIRST)[:1])
    with pytest.raises(ConfigurationError, match="the secret of frames must be 32 bytes or None, got 3 bytes"):
        write_frame(IDENTITY, FIRST, parts_of(FIRST), b"abc")
    with pytest.raises(ConfigurationError, match="digest of the weights must be at least 16 bytes, got 2"):
        ModelIdentity("toy", b"ab")
    with pytest.raises(ConfigurationError, match="an identity needs the layout of at least one group, got none"):
        Identity((), MODEL)
    with pytest.raises(ConfigurationError, match="letters, shape and strides of group 'full'"):
        replace(IDENTITY.groups[0], letters="N")
    with pytest.raises(ConfigurationError, match="the key of a run must be 32 bytes"):
        replace(FIRST, key=b"")
