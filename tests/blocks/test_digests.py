"""Digests: golden vectors, computed by hand with hashlib, and the compiled loops against the plain reference."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import ROOT_DIGEST, MediaSpan, RequestKeys, hash_block_tokens, hash_request_tokens
from pagedkv.blocks.digests import ExtraKeyTable, digest_prompt, words_of_digests
from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import PagedKVError


@dataclass(frozen=True)
class Golden:
    """A prompt, and the digests of its blocks.

    Args:
        extras: the extra keys of its blocks, written down by hand from the encoding's definition.
        digests: beginnings of the expected digests, in hexadecimal.
    """

    tokens: list[int]
    block_size: int
    digests: list[str]
    keys: RequestKeys = NO_KEYS
    epoch: str = ""
    extras: tuple[bytes, ...] = ()


def field(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


EPOCH = b"\x01\x01" + field(b"step-1000")
LORA = b"\x02\x02" + field(b"sql") + field(b"v2")
SALT = b"\x03\x01" + field(b"tenant-a")
IMAGE = b"\x04\x02" + field(struct.pack("<qq", 2, 4)) + field(b"image")  # 4 tokens from the block's slot 2 on
IMAGE_REST = b"\x04\x02" + field(struct.pack("<qq", -2, 4)) + field(b"image")  # begun 2 slots before the block

GOLDEN = {
    "one block": Golden([1, 2, 3, 4], 4, ["a4e76dd5e10ec71c16627c2a"]),
    "a chain of three": Golden(
        list(range(12)), 4, ["46d10a572ffff337b36fdade", "532030464ded04a60a4ff0fd", "c8a3330a6548ecc674ed8f4a"]
    ),
    "a partial block has none": Golden(list(range(7)), 4, ["46d10a572ffff337b36fdade"]),
    "blocks of one token": Golden([7, 7], 1, ["2e79b05abbfd294b1200750a", "486669183c5e990e2ad1918f"]),
    "blocks of 16 tokens": Golden(list(range(32)), 16, ["89815c2b3e3fd143f955275e", "053ee5560c4b13a94a0a802c"]),
    "the ends of int32": Golden([-(2**31), 2**31 - 1, -1, 0], 4, ["afa355cf901efd1627d29a66"]),
    "a salt": Golden(
        list(range(8)),
        4,
        ["1f8cf83128b2b2e91450f3f4", "c778820b365f26c82c48431d"],
        RequestKeys(salt=b"tenant-a"),
        extras=(SALT,),
    ),
    "a LoRA": Golden(
        list(range(8)),
        4,
        ["8817452ab2d67634cff3d418", "4815d7ab50ca742a34f8cc35"],
        RequestKeys("sql", "v2"),
        extras=(LORA,),
    ),
    "an epoch": Golden(
        list(range(8)), 4, ["6640b28adfd3f90e8c5478b1", "67a994541531aaff45a82834"], epoch="step-1000", extras=(EPOCH,)
    ),
    "an image": Golden(
        list(range(12)),
        4,
        ["37872e8dcf5e4986b448b99d", "5473c9943e42bc2c5d103621", "f38e74e8699d84d908086298"],
        RequestKeys(media=(MediaSpan(2, 4, b"image"),)),
        extras=(IMAGE, IMAGE_REST),
    ),
    "all of them": Golden(
        list(range(12)),
        4,
        ["0ea10bb436fdcabb831a5719", "b1126c22fb09ed7b46725602", "e8972918cc24a120bdcbf232"],
        RequestKeys("sql", "v2", b"tenant-a", (MediaSpan(2, 4, b"image"),)),
        "step-1000",
        (EPOCH + LORA + SALT + IMAGE, IMAGE_REST),
    ),
}

golden_vectors = pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN.keys())


def beginnings(digests: list[bytes]) -> list[str]:
    return [digest.hex()[:24] for digest in digests]


def by_hand(golden: Golden) -> list[bytes]:
    """The definition, written down a second time: what computed the golden vectors."""
    parent = hashlib.sha256(b"pagedkv block chain 1").digest()
    digests = []
    for start in range(0, len(golden.tokens) // golden.block_size * golden.block_size, golden.block_size):
        block = golden.tokens[start : start + golden.block_size]
        extra = dict(enumerate(golden.extras)).get(start // golden.block_size, b"")
        parent = hashlib.sha256(parent + struct.pack(f"<I{len(block)}i", len(block), *block) + extra).digest()
        digests.append(parent)
    return digests


def compiled_digests(
    tokens: npt.NDArray[np.int32], block_size: int, keys: RequestKeys = NO_KEYS, epoch: str = ""
) -> list[bytes]:
    """Digest a prompt with the compiled loop."""
    table = ExtraKeyTable(block_size)
    num_blocks = len(tokens) // block_size
    extras = [keys.media_key(index * block_size, (index + 1) * block_size) for index in range(num_blocks)]
    if extras:
        extras[0] = keys.first_block_key(epoch) + extras[0]
    extra_ids = np.array(table.intern_all(extras), np.int32)
    out = np.zeros((num_blocks, 8), np.uint32)
    digest_prompt(tokens, block_size, num_blocks, extra_ids, table.arrays, out)
    return [words.astype(">u4").tobytes() for words in out]


@pytest.mark.interpreted
@golden_vectors
def test_golden_vectors(golden: Golden) -> None:
    """Promise 8: the constants, the reference and the compiled loop agree."""
    assert beginnings(by_hand(golden)) == golden.digests
    assert (
        beginnings(hash_request_tokens(golden.tokens, golden.block_size, golden.keys, golden.epoch)) == golden.digests
    )
    tokens = np.array(golden.tokens, np.int32)
    assert beginnings(compiled_digests(tokens, golden.block_size, golden.keys, golden.epoch)) == golden.digests


def test_golden_vectors_are_all_different() -> None:
    """Equal tokens under different keys share nothing, not even behind the block that carries the key."""
    lasts = [golden.digests[-1] for name, golden in GOLDEN.items() if name != "a partial block has none"]
    assert len(set(lasts)) == len(lasts)


PRINT_DIGESTS = """
import json
from pagedkv import RequestKeys, hash_request_tokens
digests = hash_request_tokens(list(range(8)), 4, RequestKeys("sql", "v2"))
print(json.dumps([digest.hex()[:24] for digest in digests]))
"""


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_golden_vectors_do_not_depend_on_the_process(hash_seed: str) -> None:
    """Peers' fault 4: Python salts ``hash()`` anew in each process; digests owe it nothing."""
    program = subprocess.run(
        [sys.executable, "-c", PRINT_DIGESTS],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert json.loads(program.stdout) == GOLDEN["a LoRA"].digests


def test_a_request_is_the_chain_of_its_blocks() -> None:
    first = hash_block_tokens(ROOT_DIGEST, [0, 1, 2, 3])
    assert hash_request_tokens(range(9), 4) == [first, hash_block_tokens(first, [4, 5, 6, 7])]


@pytest.mark.parametrize("integers", [np.int64, np.int32, np.uint16, ">i4"])
def test_the_type_of_the_tokens_does_not_matter(integers: npt.DTypeLike) -> None:
    tokens = np.arange(8).astype(integers)
    assert hash_request_tokens(tokens, 4) == hash_request_tokens(list(range(8)), 4)


@pytest.mark.parametrize(
    "token_ids",
    [[2**31], np.array([2**32 + 1]), [1.5], np.array([1.0]), np.zeros((1, 2), np.int32)],
    ids=["beyond int32", "beyond int32 in an array", "fraction", "float array", "two dimensions"],
)
def test_what_is_no_token_has_no_digest(token_ids: TokenIds) -> None:
    """Wrapping or rounding would give two contents one name."""
    with pytest.raises(PagedKVError):
        hash_request_tokens(token_ids, 1)
    with pytest.raises(PagedKVError):
        hash_block_tokens(ROOT_DIGEST, token_ids)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_an_error(block_size: int) -> None:
    with pytest.raises(PagedKVError, match=str(block_size)):
        hash_request_tokens([1, 2], block_size)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70),
    block_size=st.sampled_from([1, 2, 3, 13, 16, 32]),
    keys=st.sampled_from([golden.keys for golden in GOLDEN.values()]),
    epoch=st.sampled_from(["", "step-1000"]),
)
def test_compiled_digests_equal_the_reference(
    tokens: list[int], block_size: int, keys: RequestKeys, epoch: str
) -> None:
    compiled = compiled_digests(np.array(tokens, np.int32), block_size, keys, epoch)
    assert compiled == hash_request_tokens(tokens, block_size, keys, epoch)


def test_digests_brought_as_bytes_become_the_same_words() -> None:
    digests = hash_request_tokens(range(12), 4)
    brought = np.frombuffer(b"".join(digests), np.uint8).reshape(3, 32)
    assert [words.astype(">u4").tobytes() for words in words_of_digests(brought, 3)] == digests
