"""FlatBatch: the tokens of a batch in one row, and the places of those whose logits are wanted.

The scheduler lists the decoding sequences, then the chunks of prompts, each in the order of their keys; a plan's ranges
are in the order of rows. Here one order is turned into the other::

    batch       | decoding: one token each, then drafts | chunk | chunk with 2 samples |
    flat row    | row 0 | row 1: a chunk   | row 2 | row 3 ... |            as the plan's ranges
    wanted      the last token of every sequence to be sampled, and its drafts, ascending
    decoding    the places of decoding sequences, for which recurrent layers may round differently than within a prompt
    source      for each row of logits to be sampled, in the batch's order: its index among the wanted tokens
"""

from dataclasses import dataclass

import numpy as np

from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.scheduling import UNKNOWN_TOKEN, Batch, Drafts

__all__ = ["FlatBatch", "flatten"]


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """A batch as the model computes it; drawn above.

    Args:
        token_ids: int32 ``[tokens]``.
        decoding: int64 ``[sequences]``, places among the plan's ranges.
        num_prompt_tokens: int64 ``[places]``, of each sequence; its later tokens were first computed by decoding.
        wanted: int64 ``[n]``, ascending.
        source: int64 ``[batch.num_samples + batch.num_drafted]``; a sequence's drafts follow it.
        chunk_starts: where each chunk begins in the flat row.
        sources: int64 ``[tokens]``: the row whose last token a token is, which a step in flight samples, or -1; None:
            all tokens are known.
    """

    token_ids: Int32Array
    decoding: Int64Array
    num_prompt_tokens: Int64Array
    wanted: Int64Array
    source: Int64Array
    chunk_starts: tuple[int, ...] = ()
    sources: Int64Array | None = None


def flatten(batch: Batch) -> FlatBatch:
    """Lay a batch out in one row. O(tokens), with a Python loop over the chunks alone."""
    compute = batch.plan.compute
    if batch.decoding is not None and batch.drafts is None and not batch.prefilling:
        return _decoding_alone(batch.decoding.rows, compute.rows, batch.decoded_token_ids)
    offsets = compute.offsets()
    token_ids = np.zeros(int(offsets[-1]), np.int32)
    last: list[Int64Array] = []
    places = np.zeros(0, np.int64)
    num_prompt_tokens = np.zeros(len(compute.rows), np.int64)
    chunk_starts: list[int] = []
    if batch.decoding is not None:
        places = np.searchsorted(compute.rows, batch.decoding.rows).astype(np.int64)
        token_ids[offsets[places]] = batch.decoded_token_ids
        last.append(offsets[places].astype(np.int64))
        if batch.drafts is not None:
            last = [_with_drafts(last[0], batch.drafts, token_ids)]
    for chunk in batch.prefilling:
        place = int(np.searchsorted(compute.rows, chunk.row))
        start, stop = int(offsets[place]), int(offsets[place + 1])
        assert stop - start == len(chunk.token_ids), (
            f"row {chunk.row} is to compute {stop - start} tokens, but {len(chunk.token_ids)} were scheduled"
        )
        token_ids[start:stop] = chunk.token_ids
        chunk_starts.append(start)
        num_prompt_tokens[place] = chunk.request.num_prompt_tokens
        last.append(np.full(chunk.num_samples, stop - 1, np.int64))
    sampled = np.concatenate(last) if last else np.zeros(0, np.int64)
    wanted, source = np.unique(sampled, return_inverse=True)
    return FlatBatch(
        token_ids,
        places,
        num_prompt_tokens,
        wanted,
        source.astype(np.int64),
        tuple(chunk_starts),
        _sources(token_ids, np.repeat(compute.rows, np.diff(offsets))),
    )


def _decoding_alone(decoding_rows: Int32Array, plan_rows: Int32Array, token_ids: Int32Array) -> FlatBatch:
    """Lay out a batch that is one token of every row, most steps' kind: places are the rows' order. O(n log n)."""
    places = np.searchsorted(plan_rows, decoding_rows).astype(np.int64)
    flat = np.empty(len(places), np.int32)
    flat[places] = token_ids
    everyone = np.arange(len(places))
    return FlatBatch(flat, places, np.zeros(len(places), np.int64), everyone, places, sources=_sources(flat, plan_rows))


def _sources(token_ids: Int32Array, rows: Int32Array) -> Int64Array | None:
    """Give the row of every unknown token, and -1 for the others; None if all are known. O(tokens)."""
    is_unknown = token_ids == UNKNOWN_TOKEN
    return np.where(is_unknown, rows, -1).astype(np.int64) if is_unknown.any() else None


def _with_drafts(first: Int64Array, drafts: Drafts, token_ids: Int32Array) -> Int64Array:
    """Put drafts behind the tokens that they follow, and list the places of both, a sequence's behind one another."""
    sizes = drafts.counts + 1
    step = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    where: Int64Array = np.repeat(first, sizes) + step
    token_ids[where[step > 0]] = drafts.token_ids
    return where
