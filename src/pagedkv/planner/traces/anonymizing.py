"""Requests without their texts: salted digests still show which prompts begin alike.

From tokens, the tokenizer or a list of words restores the text. So each full block is named by a digest over the salt,
the previous block and its tokens; all tokens, those of the output too, are removed. Names of sessions become digests as
well. Without the salt, a known text cannot be searched for in the trace. Two traces with the same salt can be merged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from hmac import digest
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request

__all__ = ["anonymized"]

DEFAULT_BLOCK_SIZE: Final = 16
ID_NBYTES: Final = 8
LARGEST_ID: Final = 2**63 - 1
SESSION_CHARACTERS: Final = 16


def anonymized(requests: Iterable[Request], salt: bytes, block_size: int | None = None) -> Iterator[Request]:
    """Remove texts and names from requests.

    Args:
        requests: requests with tokens. Requests without tokens have no text: only their names of sessions and tenants
            are replaced.
        salt: any bytes, kept secret.
        block_size: tokens of a block, 16 by default.

    Returns:
        the requests, with ids of full blocks below 2**63. O(tokens), and no memory for finished requests.

    Raises:
        ConfigurationError: the block size is not positive.
    """
    size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
    if size < 1:
        raise ConfigurationError(f"`block_size` must be at least 1 token, got {size}")
    for request in requests:
        session = None if request.session is None else _name(salt, request.session)
        tenant = None if request.tenant is None else _name(salt, request.tenant)
        if request.prompt_token_ids is None:
            known = request.block_size or (size if request.block_ids is None else 0)  # else for the header
            yield replace(request, session=session, tenant=tenant, block_size=known, output_token_ids=None)
        else:
            ids = _block_ids(salt, request.prompt_token_ids, size)
            yield replace(
                request,
                session=session,
                tenant=tenant,
                block_ids=ids,
                block_size=size,
                prompt_token_ids=None,
                output_token_ids=None,
            )


def _block_ids(salt: bytes, token_ids: Int32Array, block_size: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    data = token_ids.astype("<i4").tobytes()
    nbytes = 4 * block_size
    ids = np.empty(len(token_ids) // block_size, np.int64)
    chain = digest(salt, block_size.to_bytes(8, "little"), "sha256")
    for position in range(len(ids)):
        chain = sha256(chain + data[position * nbytes : (position + 1) * nbytes]).digest()
        ids[position] = int.from_bytes(chain[:ID_NBYTES], "little") & LARGEST_ID
    return ids


def _name(salt: bytes, session: str) -> str:
    return digest(salt, session.encode(), "sha256").hex()[:SESSION_CHARACTERS]
