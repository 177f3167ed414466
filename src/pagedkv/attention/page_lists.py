"""Lists the blocks that a step's rows read, as compressed sparse rows of "pages", from lengths on the host."""

from typing import NamedTuple

import numpy as np

from pagedkv.attention.backend import AttentionLayer, KnownRanges
from pagedkv.contract.arrays import Int32Array, Int64Array

__all__ = ["PageList", "list_pages"]


class PageList(NamedTuple):
    """Pages of the places of a step that have tokens.

    Args:
        query_indptr: int32 ``[rows + 1]``, tokens before each of them.
        page_indptr: int32 ``[rows + 1]``, pages before each of them.
        last_page_len: int32 ``[rows]``, tokens in the last page of each.
        places, columns: int64 ``[pages]``, row and column of each page's block in the block tables.
    """

    query_indptr: Int32Array
    page_indptr: Int32Array
    last_page_len: Int32Array
    places: Int64Array
    columns: Int64Array


def list_pages(known: KnownRanges, layer: AttentionLayer, block_size: int) -> PageList:
    """List the pages of each place from the first one that its first query sees. O(places + pages)."""
    places = np.flatnonzero(known.starts < known.ends)
    starts, ends = known.starts[places].astype(np.int64), known.ends[places].astype(np.int64)
    first_seen = np.maximum(starts - layer.window + 1, 0) if layer.window else np.zeros_like(starts)
    first = first_seen // block_size
    counts = -(-ends // block_size) - first
    page_indptr = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(page_indptr[-1]) - np.repeat(page_indptr[:-1], counts)
    return PageList(
        np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
        page_indptr.astype(np.int32),
        ((ends - 1) % block_size + 1).astype(np.int32),
        np.repeat(places, counts),
        np.repeat(first, counts) + within,
    )
