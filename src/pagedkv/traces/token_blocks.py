"""Block ids from tokens: prompts cut into blocks, and each block named together with everything before it.

Distinct content gets consecutive ids, from 0, in order of first appearance. Two prompts have the same id at a position
exactly if they are equal up to the end of that block. Only full blocks get ids, as an engine caches only these.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.traces.request import Request

__all__ = ["TokenBlocks", "chain_digests", "with_block_ids"]


class TokenBlocks:
    """Numbers the distinct blocks of prompts.

    Remembers 32 bytes and an id for each distinct block, whatever its size: a SHA-256 digest of its tokens and the
    digest before it.

    Args:
        block_size: tokens of a block.

    Raises:
        ConfigurationError: ``block_size`` is not positive.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ConfigurationError(f"blocks must have at least 1 token, got {block_size}")
        self._block_size = block_size
        self._ids_by_digest: dict[bytes, int] = {}

    def block_ids(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Name the full blocks of a prompt; new ones are numbered.

        Args:
            token_ids: int32 ``[n]``.

        Returns:
            int64 ``[n // block_size]``. O(n).

        >>> blocks = TokenBlocks(2)
        >>> blocks.block_ids(np.array([5, 6, 7, 8, 9], np.int32)).tolist()
        [0, 1]
        >>> blocks.block_ids(np.array([5, 6, 7, 7, 7, 8], np.int32)).tolist()
        [0, 2, 3]
        """
        ids = np.empty(len(token_ids) // self._block_size, np.int64)
        for position, digest in enumerate(chain_digests(token_ids, self._block_size)):
            ids[position] = self._ids_by_digest.setdefault(digest, len(self._ids_by_digest))
        return ids


def chain_digests(token_ids: npt.NDArray[np.int32], block_size: int, parent: bytes = b"") -> Iterator[bytes]:
    """Name full blocks by SHA-256 digests, each over the one before it and the block's tokens.

    Args:
        token_ids: int32 ``[n]``.
        block_size: tokens of a block, at least 1.
        parent: digest of the block before the first; empty where there is none.

    Returns:
        ``n // block_size`` digests of 32 bytes. O(n).
    """
    data = token_ids.astype("<i4").tobytes()
    nbytes = 4 * block_size
    digest = parent
    for position in range(len(token_ids) // block_size):
        digest = sha256(digest + data[position * nbytes : (position + 1) * nbytes]).digest()
        yield digest


def with_block_ids(path: str, requests: Iterable[Request], block_size: int) -> Iterator[Request]:
    """Put block ids in the place of tokens. Tokens of the output are left out too: their number remains.

    Args:
        path: the trace, for messages.
        requests: each with the tokens of its prompt.
        block_size: tokens of a block.

    Raises:
        ConfigurationError: ``block_size`` is not positive.
        TraceError: a request has no tokens.
    """
    blocks = TokenBlocks(block_size)
    for number, request in enumerate(requests, 1):
        if request.prompt_token_ids is None:
            reason = f"request {number} has no tokens to make block ids of"
            raise TraceError(path, None, reason, "Give --block-size only for a trace with token_ids")
        yield replace(
            request,
            block_ids=blocks.block_ids(request.prompt_token_ids),
            block_size=block_size,
            prompt_token_ids=None,
            output_token_ids=None,
        )
