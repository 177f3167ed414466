"""The entries of the fault machine, and the frames that must be refused in their place."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.keys import RequestKeys
from pagedkv.tiers.frame import write_frame
from pagedkv.tiers.identity import GroupLayout, Identity, ModelIdentity, Run, runs_of

BLOCK_SIZE: Final = 4
LONGEST_CHAIN: Final = 6
GROUPS: Final = (
    GroupLayout("full", BLOCK_SIZE, "uint8", "NC", (4, 16), (16, 1)),
    GroupLayout("window", BLOCK_SIZE, "uint8", "NC", (4, 3), (3, 1)),
)
IDENTITY: Final = Identity(GROUPS, ModelIdentity("toy", bytes(range(32))))
OTHER_WEIGHTS: Final = Identity(GROUPS, ModelIdentity("toy", bytes(32)))
OTHER_LAYOUT: Final = Identity((replace(GROUPS[0], letters="CN"), GROUPS[1]), ModelIdentity("toy", bytes(range(32))))
HALF_A_SET: Final = Identity(GROUPS[:1], ModelIdentity("toy", bytes(range(32))))
SECRET: Final = bytes(range(100, 132))
OTHER_SECRET: Final = bytes(range(101, 133))


@dataclass(frozen=True, slots=True)
class Content:
    """One run, its frame, and by their kind the frames that must be refused in its place."""

    run: Run
    parts: tuple[bytes, ...]
    frame: bytes
    others: dict[str, tuple[bytes, ...]]


def _content(run: Run, foreign: Sequence[Run], secret: bytes | None, times: int) -> Content:
    seed = hashlib.sha512(run.key).digest()
    parts = (seed * times, (seed[:12] * (1 + seed[0] % 9)))
    zeros = tuple(bytes(len(part)) for part in parts)
    frame = write_frame(IDENTITY, run, parts, secret)
    others: dict[str, tuple[bytes, ...]] = {
        "another salt": tuple(write_frame(IDENTITY, each, parts, secret) for each in foreign),
        "other weights": (write_frame(OTHER_WEIGHTS, run, parts, secret),),
        "old layout": (write_frame(OTHER_LAYOUT, run, parts, secret), frame[:8] + b"\0\0" + frame[10:]),
        "half a set": (write_frame(HALF_A_SET, run, parts[:1], secret), frame[: -len(parts[1])] + bytes(len(parts[1]))),
        "emptied": (b"",),
    }
    if secret is not None:
        others["forged with a valid check"] = tuple(
            write_frame(IDENTITY, run, zeros, forgers) for forgers in (None, OTHER_SECRET)
        )
    return Content(run, parts, frame, others)


def make_chains(
    num_chains: int, rng: random.Random, secret: bytes | None = None, times: Sequence[int] = ()
) -> list[list[Content]]:
    """Make chains of runs, some of which share their beginnings. The first ones are so many times as large."""
    chains: list[list[Content]] = []
    tokens: list[list[int]] = []
    for number in range(num_chains):
        begin = rng.choice(tokens)[: BLOCK_SIZE * rng.randrange(LONGEST_CHAIN)] if tokens and number % 2 else []
        rest = BLOCK_SIZE * LONGEST_CHAIN - len(begin)
        tokens.append(begin + [rng.randrange(1000) for _ in range(rest)])
        runs, salted, unsalted = (
            runs_of(tokens[-1], BLOCK_SIZE, 1, RequestKeys(salt=salt)) for salt in (b"own", b"another", b"")
        )
        size = times[number] if number < len(times) else 1
        known = {each.run.key: each for chain in chains for each in chain}
        contents = (
            known.get(run.key) or _content(run, foreign, secret, size)
            for run, *foreign in zip(runs, salted, unsalted, strict=True)
        )
        chains.append(list(contents))
    return chains


def keys_of(chain: Sequence[Content]) -> npt.NDArray[np.uint8]:
    """Put the keys of a chain into an array."""
    return keys_of_names([each.run.key for each in chain])


def keys_of_names(names: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Put keys into an array."""
    return np.frombuffer(b"".join(names), np.uint8).reshape(len(names), 32)
