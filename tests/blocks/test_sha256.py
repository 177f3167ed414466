"""SHA-256 in compiled loops: both compressions against hashlib and the published vectors, and what they touch."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import pytest
from numba.core.errors import TypingError
from numba.extending import is_jitted

from pagedkv.blocks.sha256 import (
    SHA,
    STATE_WORDS,
    Known,
    compress,
    compress_hardware,
    compress_portable,
    initial_state,
    pad_message,
    padded_nbytes,
    sha256_message,
)

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Compress = Callable[[Words, Bytes, int], None]

POISON = 0xA5
COMPILED = is_jitted(compress_portable)

# FIPS 180-4's examples (csrc.nist.gov, "Examples with Intermediate Values"); the empty one is of NIST's CAVP.
PUBLISHED = {
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    ),
}
MILLION_A = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"


@pytest.fixture(params=["portable", "hardware"])
def variant(request: pytest.FixtureRequest) -> Compress:
    if request.param == "portable":
        return compress_portable
    if compress_hardware is None:
        pytest.skip("no SHA instructions, or interpreted")
    return compress_hardware


def random_bytes(seed: int, length: int) -> bytes:
    return np.random.default_rng(seed).bytes(length)


def with_room(message: bytes) -> Bytes:
    """Put a message into a poisoned buffer that has just enough room for its padding."""
    buffer = np.full(padded_nbytes(len(message)), POISON, np.uint8)
    buffer[: len(message)] = np.frombuffer(message, np.uint8)
    return buffer


def fresh_state() -> Words:
    state = np.full(STATE_WORDS, POISON, np.uint32)
    initial_state(state)
    return state


def as_bytes(words: Words) -> bytes:
    return words.astype(">u4").tobytes()


def digest_of_padded(compression: Compress, padded: Bytes) -> bytes:
    state = fresh_state()
    for offset in range(0, len(padded), 64):
        compression(state, padded, offset)
    return as_bytes(state)


def digest_by(compression: Compress, message: bytes) -> bytes:
    buffer = with_room(message)
    assert pad_message(buffer, len(message)) == len(buffer)
    return digest_of_padded(compression, buffer)


def digest(message: bytes) -> bytes:
    out = np.full(STATE_WORDS, POISON, np.uint32)
    sha256_message(with_room(message), len(message), out)
    return as_bytes(out)


def messages() -> Iterator[bytes]:
    """Every length around the first four multiples of 64, then random ones."""
    for length in range(201):
        yield random_bytes(length, length)
    rng = np.random.default_rng(1)
    for length in rng.integers(201, 2001, 60):
        yield rng.bytes(int(length))


@pytest.mark.interpreted
def test_digests_equal_hashlib_at_every_length() -> None:
    for message in messages():
        assert digest(message) == hashlib.sha256(message).digest(), len(message)


@pytest.mark.interpreted
def test_each_compression_equals_hashlib_at_every_length(variant: Compress) -> None:
    for message in messages():
        assert digest_by(variant, message) == hashlib.sha256(message).digest(), len(message)


@pytest.mark.interpreted
@pytest.mark.parametrize("message", PUBLISHED)
def test_published_vectors(message: bytes, variant: Compress) -> None:
    assert digest(message).hex() == PUBLISHED[message]
    assert digest_by(variant, message).hex() == PUBLISHED[message]


@pytest.mark.interpreted
def test_published_vector_of_a_million_bytes() -> None:
    assert digest(b"a" * 1_000_000).hex() == MILLION_A


def test_published_vector_of_a_million_bytes_by_each_compression(variant: Compress) -> None:
    assert digest_by(variant, b"a" * 1_000_000).hex() == MILLION_A


@pytest.mark.interpreted
def test_the_better_compression_is_chosen() -> None:
    if SHA is not Known.QUERIED:
        assert (compress_hardware is not None) == (SHA is Known.PRESENT)
        assert compress is (compress_hardware or compress_portable)
    assert COMPILED or SHA is Known.ABSENT


@pytest.mark.interpreted
def test_compression_reads_64_bytes_at_any_offset_and_changes_the_state_alone(variant: Compress) -> None:
    message = np.frombuffer(random_bytes(2, 200), np.uint8).copy()
    before = message.copy()
    for offset in range(len(message) - 64 + 1):
        state, expected = fresh_state(), fresh_state()
        variant(state, message, offset)
        variant(expected, message[offset : offset + 64].copy(), 0)
        assert state.tolist() == expected.tolist(), offset
    assert (message == before).all()


@pytest.mark.interpreted
def test_compression_goes_on_from_the_state_it_is_given(variant: Compress) -> None:
    # A message of two chunks, the state of the first kept in a table's row: neighbours stay as they are.
    message = random_bytes(3, 100)
    buffer = with_room(message)
    pad_message(buffer, len(message))
    table = np.full((3, STATE_WORDS), POISON, np.uint32)
    initial_state(table[1])
    variant(table[1], buffer, 0)
    assert table[1].tolist() != fresh_state().tolist()
    variant(table[1], buffer, 64)
    assert as_bytes(table[1]) == hashlib.sha256(message).digest()
    assert (table[[0, 2]] == POISON).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_message_and_digest_may_lie_at_odd_addresses(shift: int) -> None:
    message = random_bytes(4, 150)
    buffer = np.full(shift + padded_nbytes(len(message)), POISON, np.uint8)[shift:]
    buffer[: len(message)] = np.frombuffer(message, np.uint8)
    out = np.zeros(STATE_WORDS + shift, np.uint32)[shift:]
    sha256_message(buffer, len(message), out)
    assert as_bytes(out) == hashlib.sha256(message).digest()


@pytest.mark.interpreted
def test_padding_takes_the_fewest_chunks() -> None:
    for length in range(300):
        nbytes = padded_nbytes(length)
        assert nbytes % 64 == 0
        assert length + 9 <= nbytes < length + 9 + 64


@pytest.mark.interpreted
@pytest.mark.parametrize("length", [0, 1, 31, 32, 55, 56, 63, 64, 100, 8191, 8192])
def test_padding_is_written_behind_the_message_and_nowhere_else(length: int) -> None:
    nbytes = padded_nbytes(length)
    buffer = np.full(nbytes + 64, POISON, np.uint8)
    assert pad_message(buffer, length) == nbytes
    zeros = bytes(nbytes - length - 9)
    assert buffer[length:nbytes].tobytes() == b"\x80" + zeros + (8 * length).to_bytes(8, "big")
    assert (buffer[:length] == POISON).all()
    assert (buffer[nbytes:] == POISON).all()


@pytest.mark.interpreted
def test_one_buffer_serves_messages_of_falling_lengths() -> None:
    # The padding of the longer message is still there when the shorter one is padded.
    buffer = np.full(256, 0xFF, np.uint8)
    out = np.zeros(STATE_WORDS, np.uint32)
    for length in range(200, -1, -1):
        sha256_message(buffer, length, out)
        assert as_bytes(out) == hashlib.sha256(buffer[:length].tobytes()).digest(), length


@pytest.mark.interpreted
def test_a_compiled_loop_chains_digests() -> None:
    @numba.njit(cache=False)
    def chain(message: Bytes, length: int, digests: Words) -> None:
        for index in range(len(digests)):
            sha256_message(message, length, digests[index])
            for word in range(STATE_WORDS):
                for place in range(4):
                    message[4 * word + place] = (digests[index, word] >> (8 * (3 - place))) & 0xFF

    message = random_bytes(5, 100)
    digests = np.zeros((50, STATE_WORDS), np.uint32)
    chain(with_room(message), len(message), digests)
    for words in digests:
        parent = hashlib.sha256(message).digest()
        assert as_bytes(words) == parent
        message = parent + message[32:]


# Negative controls: what the comparisons above would notice.


@pytest.mark.interpreted
def test_every_bit_of_a_message_counts(variant: Compress) -> None:
    chunk = np.frombuffer(random_bytes(6, 64), np.uint8).copy()
    seen = set()
    for bit in range(512 + 1):  # the last one flips nothing
        flipped = chunk.copy()
        flipped[bit // 8 : bit // 8 + 1] ^= 1 << bit % 8
        seen.add(digest_of_padded(variant, flipped))
    assert len(seen) == 512 + 1


@pytest.mark.interpreted
def test_a_flipped_bit_changes_the_digest() -> None:
    message = random_bytes(7, 100)
    for index in range(len(message)):
        flipped = bytearray(message)
        flipped[index] ^= 0x10
        assert digest(bytes(flipped)) != digest(message)


@pytest.mark.interpreted
@pytest.mark.parametrize("length", [0, 55, 56, 100])
def test_a_broken_byte_of_padding_is_noticed(length: int, variant: Compress) -> None:
    message = random_bytes(8, length)
    buffer = with_room(message)
    nbytes = pad_message(buffer, length)
    assert digest_of_padded(variant, buffer) == hashlib.sha256(message).digest()
    for index in (length, nbytes - 9, nbytes - 1):
        broken = buffer.copy()
        broken[index] ^= 1
        assert digest_of_padded(variant, broken) != hashlib.sha256(message).digest(), index


@pytest.mark.interpreted
def test_another_initial_state_is_noticed(variant: Compress) -> None:
    buffer = with_room(b"abc")
    pad_message(buffer, 3)
    state = fresh_state()
    state[7] ^= 1
    variant(state, buffer, 0)
    assert as_bytes(state).hex() != PUBLISHED[b"abc"]


# What the hardware compression refuses: it reads memory by address, whatever the array says.


@pytest.mark.skipif(compress_hardware is None, reason="no SHA instructions, or interpreted")
@pytest.mark.parametrize(
    ("state", "message", "blamed"),
    [
        (np.zeros(8, np.int64), np.zeros(64, np.uint8), "state"),
        (np.zeros(16, np.uint32)[::2], np.zeros(64, np.uint8), "state"),
        (np.zeros((1, 8), np.uint32), np.zeros(64, np.uint8), "state"),
        (np.frombuffer(bytes(32), np.uint32), np.zeros(64, np.uint8), "state"),
        (np.zeros(8, np.uint32), np.zeros(64, np.int8), "message"),
        (np.zeros(8, np.uint32), np.zeros(128, np.uint8)[::2], "message"),
    ],
    ids=["int64", "strided", "two dimensions", "read-only", "int8", "strided message"],
)
def test_hardware_refuses_arrays_it_would_misread(state: Words, message: Bytes, blamed: str) -> None:
    assert compress_hardware is not None
    with pytest.raises(TypingError, match=f"{blamed} must be a contiguous"):
        compress_hardware(state, message, 0)


def test_hardware_reads_a_read_only_message(variant: Compress) -> None:
    message = random_bytes(9, 64)
    assert digest_of_padded(variant, np.frombuffer(message, np.uint8)) == digest_of_padded(
        variant, np.frombuffer(message, np.uint8).copy()
    )


# Promises about the process as a whole, each in a process of its own.

DIGEST_ABC = """
import numpy as np
from pagedkv.blocks import sha256
from pagedkv.blocks.sha256 import SHA
message, out = np.zeros(64, np.uint8), np.zeros(8, np.uint32)
message[:3] = list(b"abc")
sha256.sha256_message(message, 3, out)
sha256.compress(out.copy(), message, 0)
print(out.astype(">u4").tobytes().hex(), SHA.name)
for loop in (sha256.sha256_message, sha256.compress):
    if hasattr(loop, "stats"):
        print("found" if loop.stats.cache_hits else "compiled")
"""


def run_digest_of_abc(cache: Path, **environment: str) -> str:
    """Digest "abc" in a new process; answer what it printed."""
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", DIGEST_ABC],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert PUBLISHED[b"abc"] in completed.stdout
    return completed.stdout


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = run_digest_of_abc(tmp_path), run_digest_of_abc(tmp_path)
    assert first.split()[2:] == ["compiled", "compiled"]
    assert second.split()[2:] == ["found", "found"]


@pytest.mark.long
@pytest.mark.skipif(SHA is not Known.PRESENT, reason="no SHA instructions to do without")
def test_code_for_another_processor_counts_on_no_sha_instructions_and_shares_no_cache(tmp_path: Path) -> None:
    run_digest_of_abc(tmp_path)
    generic = [run_digest_of_abc(tmp_path, NUMBA_CPU_NAME="generic").split()[1:] for _ in range(2)]
    assert generic == [["QUERIED", "compiled", "compiled"], ["QUERIED", "found", "found"]]


def test_interpreted_digests_are_the_same_and_warn_of_nothing(tmp_path: Path) -> None:
    assert "ABSENT" in run_digest_of_abc(tmp_path, NUMBA_DISABLE_JIT="1")
    assert not any(tmp_path.iterdir())
