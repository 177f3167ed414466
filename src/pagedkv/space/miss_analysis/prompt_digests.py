"""Digests of a prompt's blocks, for any extra keys: keys that no block carries have no id."""

import numpy as np

from pagedkv.blocks.block_keys import keys_of_blocks
from pagedkv.blocks.digests import ROOT_DIGEST, hash_block_tokens
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.space.hits import Prompt
from pagedkv.space.miss_analysis.case import Case
from pagedkv.space.prompts import NO_DIGESTS, UNKNOWN_KEY, extra_ids_of
from pagedkv.space.state import Group
from pagedkv.tables.block_fates import digest_behind

__all__ = ["digest_of_first", "digests_up_to", "encoding_of"]


def digests_up_to(case: Case, group: Group, num_blocks: int, known: Uint32Array = NO_DIGESTS) -> Uint32Array:
    """Return digests of a prompt's first blocks, uint32 ``[num_blocks, 8]``.

    Args:
        case: the case; group: the group of the blocks; num_blocks: how many.
        known: the first of these digests, as far as they are known.
    """
    if not len(known):
        known = _digests_of_hit(case, group)
    if len(known) < num_blocks:
        extra_ids = np.zeros(num_blocks, np.int32)
        known_ids = extra_ids_of(case.state, case.prompt, group.block_size, num_blocks)
        extra_ids[: len(known_ids)] = known_ids
        while len(known) < num_blocks:
            is_unknown = extra_ids[len(known)] == UNKNOWN_KEY
            known = _with_unknown_key(case, group, known) if is_unknown else _continued(case, group, known, extra_ids)
    return known[:num_blocks]


def _digests_of_hit(case: Case, group: Group) -> Uint32Array:
    """Return the hit blocks' digests if a group of this block size keeps whole prefixes; else none."""
    lane = case.state.lanes[group.lane]
    whole = next((other for other in lane if other.keeps_whole_prefix), None)
    if whole is None:
        return NO_DIGESTS
    digests: Uint32Array = whole.pool.arrays.digests[case.hit.block_ids[whole.index]]
    return digests


def _continued(case: Case, group: Group, known: Uint32Array, extra_ids: Int32Array) -> Uint32Array:
    """Continue a chain of digests, up to the first block with extra keys that no block carries."""
    first = len(known)
    stop = first + int(np.argmin(np.append(extra_ids[first:] >= 0, False)))
    digests = np.empty((stop, 8), np.uint32)
    digests[:first] = known
    digest_behind(case.prompt.tokens, group.block_size, first, extra_ids, case.state.extra_keys.arrays, digests)
    return digests


def _with_unknown_key(case: Case, group: Group, known: Uint32Array) -> Uint32Array:
    """Continue a chain of digests by a block with extra keys that have no id."""
    index, size = len(known), group.block_size
    parent = known[-1].astype(">u4").tobytes() if index else ROOT_DIGEST
    tokens = case.prompt.tokens[index * size : (index + 1) * size]
    digest = _in_words(hash_block_tokens(parent, tokens, encoding_of(case, group, index)))
    return np.concatenate([known, digest[np.newaxis]])


def digest_of_first(prompt: Prompt, weights_epoch: str, block_size: int) -> Uint32Array:
    """Digest of a prompt's first block under a given weights epoch, in words."""
    encoding = keys_of_blocks(prompt.keys, weights_epoch, block_size, 0, 1).get(0, b"")
    return _in_words(hash_block_tokens(ROOT_DIGEST, prompt.tokens[:block_size], encoding))


def _in_words(digest: bytes) -> Uint32Array:
    return np.frombuffer(digest, ">u4").astype(np.uint32)


def encoding_of(case: Case, group: Group, index: int) -> bytes:
    """Return the encoded extra keys of a logical block of the prompt."""
    keys, epoch = case.prompt.keys, case.state.identity_epoch
    if not case.prompt.has_extra_keys(epoch):
        return b""
    return keys_of_blocks(keys, epoch, group.block_size, index, index + 1).get(index, b"")
