"""Digests by code that asks for the SHA instructions when it runs: the same with and without them."""

import os
import re
import subprocess
import sys

import pytest

from pagedkv.blocks.sha256 import NAME_OF_FUNCTION, PRESENCE, SHA, Known
from pagedkv.compilation.targets import TARGETS, own_processor
from tests.choosing import long_but

ASKING = """
import hashlib
import sys
import numpy as np
from pagedkv.compilation.compiled import compiled
from pagedkv.blocks import sha256
from pagedkv.blocks.sha256 import PRESENCE, SHA, has_sha_instructions

@compiled
def asked(number):
    return has_sha_instructions()

sha256.compress._cache.disable()  # what is looked at below is what is compiled here
sha256.sha256_message._cache.disable()
told = []
for presence in map(int, sys.argv[1:]):
    PRESENCE.value = presence
    told.append(int(asked(0)))
    for length in (*range(130), 1000):
        message = np.random.default_rng(length).integers(0, 256, sha256.padded_nbytes(length), np.uint8)
        expected = hashlib.sha256(message[:length].tobytes()).digest()
        out = np.zeros(8, np.uint32)
        sha256.sha256_message(message, length, out)
        assert out.astype(">u4").tobytes() == expected, (presence, length)
sha256.compress(np.zeros(8, np.uint32), np.zeros(64, np.uint8), 0)
[entry] = sha256.compress.overloads.values()
print(SHA.name, "sha256rnds2" in entry.library.get_asm_str(), *told)
"""

ASSEMBLED = """
from pagedkv.blocks import sha256

sha256.compress._cache.disable()  # what is looked at below is what is compiled here
sha256.compress.compile("void(u4[::1], u1[::1], i8)")
[entry] = sha256.compress.overloads.values()
print(entry.library.get_asm_str())
"""

ALL_TARGETS = TARGETS[own_processor()[0].partition("-")[0]]


@pytest.mark.skipif(SHA is not Known.PRESENT, reason="no SHA instructions, or interpreted")
@pytest.mark.parametrize("target", long_but(ALL_TARGETS[-1:], ALL_TARGETS), ids=lambda target: target.name)
def test_digests_are_the_same_whatever_is_found_when_code_runs(target: object) -> None:
    environment = getattr(target, "environment", {})
    done = subprocess.run(
        [sys.executable, "-c", ASKING, "1", "0", "1"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["QUERIED", "True", "1", "0", "1"], done.stderr[-2000:]


@pytest.mark.skipif(SHA is not Known.PRESENT, reason="no SHA instructions, or interpreted")
def test_nothing_is_used_that_a_hypervisor_may_hide_of_the_named_processor() -> None:
    done = subprocess.run([sys.executable, "-c", ASSEMBLED], capture_output=True, text=True, check=False)
    [function] = re.findall(rf"\b{NAME_OF_FUNCTION}:(.*?)\n\.Lfunc_end", done.stdout, re.DOTALL) or [done.stderr]
    assert "sha256rnds2" in function
    assert not re.findall(r"\n\t(v\w+.*)", function)  # AVX, and AVX-512 with it


@pytest.mark.interpreted
def test_the_instructions_are_present_where_code_counts_on_them() -> None:
    assert bool(PRESENCE.value) or SHA is not Known.PRESENT
    assert not (PRESENCE.value and SHA is Known.ABSENT)
