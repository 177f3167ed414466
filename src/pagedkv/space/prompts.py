"""Prompts in the form that the space uses: checked tokens, extra keys by block, and digests. Changes nothing."""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_keys import keys_of_blocks
from pagedkv.blocks.digests import DIGEST_NBYTES, digest_prompt, words_of_digests
from pagedkv.contract.arguments import as_array, as_token_array
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.hits import Prompt
from pagedkv.space.state import SpaceState

__all__ = [
    "NO_DIGESTS",
    "NO_IDS",
    "UNKNOWN_KEY",
    "digests_of_prefix",
    "extra_ids_of",
    "prepare_prompt",
    "require_beginning",
]

NO_IDS: Final = np.zeros(0, np.int32)
NO_DIGESTS: Final = np.zeros((0, 8), np.uint32)
UNKNOWN_KEY: Final = -1


def prepare_prompt(
    state: SpaceState, token_ids: TokenIds, keys: RequestKeys, digests: npt.ArrayLike | None, num_lookahead: int
) -> Prompt:
    """Check a prompt.

    Raises:
        TokenError: empty, outside int32, or longer than the tables (``max_tokens``).
        ConfigurationError: digests that do not fit the prompt, or that this space must compute itself;
            a negative number of lookahead slots.
    """
    tokens = as_token_array(token_ids)
    num_tokens = len(tokens)
    if num_tokens == 0:
        raise TokenError("an empty prompt cannot be allocated: give at least one token")
    if not isinstance(keys, RequestKeys):
        raise ConfigurationError(f"keys must be RequestKeys, got {keys!r}")
    if num_tokens + num_lookahead > state.config.max_tokens:
        raise TokenError(
            f"{num_tokens} tokens and {num_lookahead} lookahead slots exceed max_tokens = {state.config.max_tokens}"
        )
    return Prompt(tokens, keys, NO_DIGESTS if digests is None else _checked_digests(state, tokens, digests))


def _checked_digests(state: SpaceState, tokens: Int32Array, digests: npt.ArrayLike) -> Uint32Array:
    if len(state.lanes) > 1 or not all(group.keeps_whole_prefix for group in state.cached_groups):
        raise ConfigurationError(
            "digests can be brought only where all groups are full attention of one block size: elsewhere a hit "
            "may rest on the digest alone, so pagedkv computes it"
        )
    num_blocks = len(tokens) // state.cached_groups[0].block_size
    brought = as_array(digests, "digests")
    if brought.dtype != np.uint8 or brought.shape != (num_blocks, DIGEST_NBYTES):
        raise ConfigurationError(
            f"digests must be uint8 [{num_blocks}, 32], one for each full block, got {brought.dtype} "
            f"{list(brought.shape)}: np.frombuffer(b''.join(digests), np.uint8).reshape(-1, 32) makes it of bytes"
        )
    if state.config.events:  # who reads them relies on digests and parents, so all are of one chain: the space's own
        return NO_DIGESTS
    return words_of_digests(brought, num_blocks)


def require_beginning(whole: Int32Array, tokens: Int32Array) -> None:
    """Raise TokenError unless the whole prompt begins with these tokens. O(tokens)."""
    if len(tokens) > len(whole):
        raise TokenError(f"prompt has {len(whole)} tokens, fewer than the {len(tokens)} that are to begin it")
    differs = whole[: len(tokens)] != tokens
    if differs.any():
        place = int(differs.argmax())
        raise TokenError(f"prompt does not begin so: its token {place} is {whole[place]}, not {tokens[place]}")


def extra_ids_of(state: SpaceState, prompt: Prompt, block_size: int, num_blocks: int) -> Int32Array:
    """Ids of the extra keys of the first blocks, without trailing zeros; -1 for a key that no block has."""
    epoch = state.identity_epoch
    if not prompt.has_extra_keys(epoch):
        return NO_IDS
    encodings = keys_of_blocks(prompt.keys, epoch, block_size, 0, num_blocks)
    ids = np.zeros(max(encodings, default=-1) + 1, np.int32)
    known = [state.extra_keys.id_of(encoding) for encoding in encodings.values()]
    ids[list(encodings)] = [UNKNOWN_KEY if key_id is None else key_id for key_id in known]
    return ids


def digests_of_prefix(state: SpaceState, prompt: Prompt, block_size: int, num_blocks: int) -> Uint32Array:
    """Digest the first blocks of a prompt, in words: uint32 ``[n, 8]``; only up to the first unknown extra key."""
    extra_ids = extra_ids_of(state, prompt, block_size, num_blocks)
    num_known = min([num_blocks, *np.flatnonzero(extra_ids == UNKNOWN_KEY)[:1].tolist()])
    digests = np.empty((num_known, 8), np.uint32)
    digest_prompt(prompt.tokens, block_size, num_known, extra_ids, state.extra_keys.arrays, digests)
    return digests
