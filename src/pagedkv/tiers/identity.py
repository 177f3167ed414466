"""Identity of stored content outside the process: its layout, its model, and the run of blocks.

A frame is loaded only if layout, model and run all equal the expected ones. Layout and model are canonical JSON (sorted
keys, no spaces, ASCII), so that other programs can read and write them. Their digest is the name of a store's subtree.
A run is the blocks of one frame, of all groups. Its key is the chain digest of its last block, which covers all tokens
up to there, the adapter, the media and the salt.

A chain of runs has the entries of a store for a prompt, or for a growing sequence. It has two kinds of entries::

    tokens     0 ...... 32 ...... 64 ...... 96 .. 108
    runs       | run 0   | run 1   | run 2   |          blocks of the groups that keep whole prefixes
    an end                                   |   108 |  the rest of these blocks, and the windows and states at 108

Runs suffice for models in which all groups keep whole prefixes. Other models can continue only at an end, where their
windows and states are stored as well. A hit at an end needs all runs before it.
"""

import hashlib
import json
import struct
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.digests import ROOT_DIGEST, hash_block_tokens, hash_request_tokens
from pagedkv.contract.arguments import TokenIds, as_count, as_token_array, require_instance
from pagedkv.contract.arrays import DIGEST_NBYTES, Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.words import KEY_NBYTES

SALT_DOMAIN: Final = b"pagedkv salt of a frame 1"


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The bytes of one block of one group.

    Args:
        name: name of the group.
        block_size: tokens of a block.
        dtype: the numbers' type, as in NumPy and torch: "bfloat16", "float8_e4m3fn".
        letters: one letter for each dimension, outermost first: "LKNHC", and "LNC" for latents.
        shape: size of each dimension.
        strides: distance of neighbours along each dimension, in elements.
        scales: factors of fp8 numbers, one for each tensor, or for each head of each tensor; empty for other types.
    """

    name: str
    block_size: int
    dtype: str
    letters: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        as_count(self.block_size, "the block_size of a layout", least=1)
        if not len(self.letters) == len(self.shape) == len(self.strides):
            raise ConfigurationError(
                f"letters, shape and strides of group {self.name!r} must be as many: "
                f"{self.letters!r}, {self.shape}, {self.strides}"
            )


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that computed the content.

    Args:
        name: name of the model, for people who read frames.
        weights: digest of its weights, at least 16 bytes.
        adapters: name and content digest of each adapter in use; empty for the base model.
        versions: name and version of all else that changes keys and values (the engine's numerics, a RoPE scaling).
    """

    name: str
    weights: bytes
    adapters: tuple[tuple[str, bytes], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        require_instance(self.weights, bytes, "the digest of the weights")
        if len(self.weights) < DIGEST_NBYTES // 2:
            raise ConfigurationError(
                f"the digest of the weights must be at least {DIGEST_NBYTES // 2} bytes, got {len(self.weights)}"
            )


@dataclass(frozen=True, slots=True)
class Identity:
    """Layout and model of a store's content.

    Args:
        groups: the layout of each group, in the order of a frame's parts.
        model: the model.

    Attributes:
        layout_text, model_text: both as canonical JSON, as in a frame.
        fingerprint: SHA-256 of both, from which the subtree of a store gets its name.
    """

    groups: tuple[GroupLayout, ...]
    model: ModelIdentity
    layout_text: bytes = field(init=False, repr=False)
    model_text: bytes = field(init=False, repr=False)
    fingerprint: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigurationError("an identity needs the layout of at least one group, got none")
        layout = [
            {
                "name": group.name,
                "block_size": group.block_size,
                "dtype": group.dtype,
                "letters": group.letters,
                "shape": list(group.shape),
                "strides": list(group.strides),
                "scales": [float(scale).hex() for scale in group.scales],
            }
            for group in self.groups
        ]
        model = {
            "name": self.model.name,
            "weights": self.model.weights.hex(),
            "adapters": sorted([name, digest.hex()] for name, digest in self.model.adapters),
            "versions": sorted([name, version] for name, version in self.model.versions),
        }
        object.__setattr__(self, "layout_text", _canonical(layout))
        object.__setattr__(self, "model_text", _canonical(model))
        covered = struct.pack("<I", len(self.layout_text)) + self.layout_text + self.model_text
        object.__setattr__(self, "fingerprint", hashlib.sha256(covered).digest())


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Identifies the blocks of one frame: their tokens and position, salt, extra keys and chain digests.

    Args:
        key: chain digest of its last block, 32 bytes.
        parent: chain digest of the block before its first one; ``ROOT_DIGEST`` at the beginning.
        first_token: position of its first token.
        token_ids: int32 ``[tokens]``, the tokens of its blocks.
        salt: the secret of the tenant. A frame contains only its digest.
        extra_keys: the encoded adapter and media of its blocks.

    Raises:
        ConfigurationError: digests that are not 32 bytes, a salt or extra keys that are not bytes.
        TokenError: token ids that are not int32.
    """

    key: bytes
    parent: bytes
    first_token: int
    token_ids: npt.NDArray[np.int32]
    salt: bytes = b""
    extra_keys: bytes = b""

    def __post_init__(self) -> None:
        for name, digest in (("key", self.key), ("parent", self.parent)):
            if not isinstance(digest, bytes) or len(digest) != DIGEST_NBYTES:
                raise ConfigurationError(f"the {name} of a run must be {DIGEST_NBYTES} bytes, got {digest!r}")
        require_instance(self.salt, bytes, "the salt of a run")
        require_instance(self.extra_keys, bytes, "the extra_keys of a run")
        object.__setattr__(self, "token_ids", as_token_array(self.token_ids))

    @classmethod
    def named(cls, name: bytes) -> "Run":
        """Identify content of which only another engine's name is known; the frame has it in the place of tokens.

        Its key is the SHA-256 of the name, and it has no parent.
        """
        return cls(hashlib.sha256(name).digest(), bytes(DIGEST_NBYTES), 0, np.zeros(0, np.int32), extra_keys=name)

    @property
    def salt_digest(self) -> bytes:
        """Digest of the salt, as in a frame; empty without a salt."""
        return hashlib.sha256(SALT_DOMAIN + self.salt).digest() if self.salt else b""

    @property
    def token_bytes(self) -> bytes:
        """The tokens as little-endian int32."""
        return self.token_ids.astype("<i4", copy=False).tobytes()


def runs_of(token_ids: TokenIds, block_size: int, blocks_per_run: int, keys: RequestKeys = NO_KEYS) -> list[Run]:
    """Cut a prompt into runs of ``blocks_per_run`` blocks, in order. A shorter rest is left out. O(tokens).

    Raises:
        ConfigurationError: sizes below 1.
        TokenError: token ids that are not int32.
    """
    blocks_per_run = as_count(blocks_per_run, "blocks_per_run", least=1)
    digests = hash_request_tokens(token_ids, block_size, keys)
    tokens = as_token_array(token_ids)
    unsalted = RequestKeys(keys.lora_name, keys.lora_version, b"", keys.media)
    runs = []
    for last in range(blocks_per_run, len(digests) + 1, blocks_per_run):
        first = last - blocks_per_run
        begin, end = first * block_size, last * block_size
        extra = unsalted.first_block_key("") + unsalted.media_key(begin, end)
        parent = digests[first - 1] if first else ROOT_DIGEST
        runs.append(Run(digests[last - 1], parent, begin, tokens[begin:end].copy(), keys.salt, extra))
    return runs


END_MASK: Final = int.from_bytes(b"pagedkv end of a chain, version1", "big")
"""The key of an end is the digest XOR this mask, so that an end and a run at one boundary have different keys."""


def end_key_of(digest: bytes) -> bytes:
    """Return the key of the end after the block with this digest."""
    return (int.from_bytes(digest, "big") ^ END_MASK).to_bytes(KEY_NBYTES, "big")


@final
class RunChain:
    """The runs of one sequence. While the sequence grows, each block is digested once.

    Args:
        block_size: tokens of a block.
        blocks_per_run: blocks of a run.
        keys: adapter, salt and media of the sequence.

    Attributes:
        runs: the complete runs of the tokens so far.
    """

    def __init__(self, block_size: int, blocks_per_run: int, keys: RequestKeys = NO_KEYS) -> None:
        self.runs: list[Run] = []
        self._block_size = block_size
        self._blocks_per_run = blocks_per_run
        self._keys = keys
        self._unsalted = RequestKeys(keys.lora_name, keys.lora_version, b"", keys.media)
        self._digests = [ROOT_DIGEST]
        self._tokens: Int32Array = np.zeros(0, np.int32)

    @property
    def num_blocks(self) -> int:
        """Whole blocks so far."""
        return len(self._digests) - 1

    def extend(self, token_ids: Int32Array) -> None:
        """Set the tokens. From the first block that differs on, blocks and runs are replaced; a prefix changes nothing.

        O(tokens) to compare, and about 3 us for each new block.
        """
        size = self._block_size
        common = min(len(token_ids), len(self._tokens))
        differs = np.flatnonzero(token_ids[:common] != self._tokens[:common])
        if len(differs):
            kept = int(differs[0]) // size
            del self._digests[kept + 1 :]
            del self.runs[kept // self._blocks_per_run :]
        elif len(token_ids) <= len(self._tokens):
            return
        self._tokens = token_ids
        for index in range(self.num_blocks, len(token_ids) // size):
            begin, end = index * size, (index + 1) * size
            extra = self._keys.media_key(begin, end)
            if index == 0:
                extra = self._keys.first_block_key("") + extra
            self._digests.append(hash_block_tokens(self._digests[-1], token_ids[begin:end], extra))
        for number in range(len(self.runs), self.num_blocks // self._blocks_per_run):
            first, last = number * self._blocks_per_run, (number + 1) * self._blocks_per_run
            self.runs.append(self._run(self._digests[last], first, last))

    def num_blocks_without(self, digests: AbstractSet[bytes]) -> int:
        """Count the blocks before the first one whose digest is in ``digests``. O(blocks)."""
        if not digests:
            return self.num_blocks
        return next((place for place, digest in enumerate(self._digests[1:]) if digest in digests), self.num_blocks)

    def end(self, num_blocks: int) -> Run:
        """Return the run of the end after the first ``num_blocks`` blocks, at most :attr:`num_blocks`."""
        first = num_blocks // self._blocks_per_run * self._blocks_per_run
        return self._run(self.end_key(num_blocks), first, num_blocks)

    def end_key(self, num_blocks: int) -> bytes:
        """Return the key of the end after the first ``num_blocks`` blocks."""
        return end_key_of(self._digests[num_blocks])

    def _run(self, key: bytes, first: int, last: int) -> Run:
        begin, end = first * self._block_size, last * self._block_size
        extra = self._unsalted.first_block_key("") + self._unsalted.media_key(begin, end)
        return Run(key, self._digests[first], begin, self._tokens[begin:end].copy(), self._keys.salt, extra)
