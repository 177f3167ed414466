"""Decode attention that reads blocks in place: one query per sequence, no copied keys (Kwon et al., vLLM, SOSP 2023).

For each sequence and key head, the scores of the query heads that share it are computed block by block into a scratch
row and turned into weights; a second pass over the blocks adds up the weighted values::

    scores   | block 0: dot products | block 1 | ... |      one row for each query head of the group
    weights  exp(score - largest), their sum with the sink's
    out      += weight * value, block by block

There are two passes over the scores instead of one with a running maximum: the scores of a sequence fit the processor's
cache, and the sums of the second pass are vectorised.
"""

import math
from typing import Final

import numpy as np

from pagedkv.compilation.compiled import compiled_sums, inlined_sums
from pagedkv.contract.arrays import Float32Array, Int32Array, Int64Array

__all__ = ["decode_attention", "write_tokens"]

FOUR: Final = 4
"""Positions whose keys, or values, are processed together."""
LOG2_E: Final = np.float32(1.4426950408889634)
LEAST_EXPONENT: Final = np.float32(-126.0)
EXPONENT_BIAS: Final = np.int32(127)
FRACTION_BITS: Final = np.int32(23)
C0: Final = np.float32(1.0)
C1: Final = np.float32(0.6931469440460205)
C2: Final = np.float32(0.24023045599460602)
C3: Final = np.float32(0.055480629205703735)
C4: Final = np.float32(0.009684186428785324)
C5: Final = np.float32(0.0012391331838443875)
C6: Final = np.float32(0.00021865784947294742)
"""Coefficients of 2**f on [0, 1), interpolated at the zeros of a Chebyshev polynomial: error 3e-9, before rounding."""


@compiled_sums
def write_tokens(
    flat: Float32Array, strides: Int64Array, block_size: int, slots: Int64Array, tokens: Float32Array
) -> None:
    """Write tokens ``[n, heads, dim]`` to their slots; tokens of slot -1 are skipped. O(elements)."""
    _, num_heads, dim = tokens.shape
    for token in range(len(slots)):
        if slots[token] < 0:
            continue
        place = strides[0] + slots[token] // block_size * strides[1] + slots[token] % block_size * strides[2]
        for head in range(num_heads):
            start = place + head * strides[3]
            for element in range(dim):
                flat[start + element] = tokens[token, head, element]


@compiled_sums
def decode_attention(
    out: Float32Array,
    query: Float32Array,
    places: Int64Array,
    tokens: Int64Array,
    tables: Int32Array,
    seq_lens: Int32Array,
    keys: Float32Array,
    key_strides: Int64Array,
    values: Float32Array,
    value_strides: Int64Array,
    shape: Int64Array,
    scale: float,
    soft_cap: float,
    sinks: Float32Array,
    scores: Float32Array,
    exponents: Int32Array,
    powers: Float32Array,
) -> None:
    """Compute attention of one query for each of some sequences.

    Args:
        out: float32 ``[tokens, heads, value_dim]``; only the rows of ``tokens`` are written.
        query: float32 ``[tokens, heads, key_dim]``, C-contiguous.
        places: int64 ``[n]``, places of the sequences.
        tokens: int64 ``[n]``, index of each sequence's query in the flat row.
        tables: int32 ``[places, width]``.
        seq_lens: int32 ``[places]``.
        keys, values: flat pools, see :mod:`pagedkv.attention.cpu.backend`.
        key_strides, value_strides: their strides.
        shape: int64 ``[4]``: block size, key heads, window, chunk (0: none).
        scale, soft_cap: the layer's.
        sinks: float32 ``[heads]``, or empty.
        scores: float32 ``[query heads of a key head, longest sequence]``, scratch.
        exponents: int32 ``[longest sequence]``, scratch.
        powers: float32, the same memory.

    Cost: O(sum of seen positions x heads x dim), each key read once.
    """
    block_size, num_key_heads, window, chunk = shape[0], shape[1], shape[2], shape[3]
    shared = query.shape[1] // num_key_heads
    for index in range(len(places)):
        place, token = places[index], tokens[index]
        stop = seq_lens[place]
        first = 0
        if window > 0:
            first = max(0, stop - window)
        if chunk > 0:
            first = (stop - 1) // chunk * chunk
        for key_head in range(num_key_heads):
            queries = query[token, key_head * shared : (key_head + 1) * shared]
            answers = out[token, key_head * shared : (key_head + 1) * shared]
            _score(queries, keys, key_strides, tables[place], block_size, key_head, first, stop, scale, scores)
            for head in range(shared):
                sink = sinks[key_head * shared + head : key_head * shared + head + 1] if len(sinks) > 0 else sinks
                _weigh(scores[head, : stop - first], soft_cap, sink, exponents, powers)
            _add_values(answers, values, value_strides, tables[place], block_size, key_head, first, stop, scores)


@compiled_sums
def _score(
    queries: Float32Array,
    keys: Float32Array,
    strides: Int64Array,
    table: Int32Array,
    block_size: int,
    key_head: int,
    first: int,
    stop: int,
    scale: float,
    scores: Float32Array,
) -> None:
    """Multiply the queries that share a key head with the keys of positions ``[first, stop)``."""
    dim = queries.shape[1]
    step = strides[2]
    for block in range(first // block_size, (stop + block_size - 1) // block_size):
        begin, end = max(first, block * block_size), min(stop, (block + 1) * block_size)
        start = strides[0] + table[block] * strides[1] + key_head * strides[3] + (begin - block * block_size) * step
        whole = begin + (end - begin) // FOUR * FOUR
        for position in range(begin, whole, FOUR):
            four = keys[start : start + 3 * step + dim]
            for head in range(len(queries)):
                seen = position - first
                _four_products(scores[head, seen : seen + FOUR], queries[head], four, step, np.float32(scale))
            start += FOUR * step
        for position in range(whole, end):
            key = keys[start : start + dim]
            for head in range(len(queries)):
                scores[head, position - first] = _product(queries[head], key) * np.float32(scale)
            start += step


@compiled_sums
def _add_values(
    answers: Float32Array,
    values: Float32Array,
    strides: Int64Array,
    table: Int32Array,
    block_size: int,
    key_head: int,
    first: int,
    stop: int,
    weights: Float32Array,
) -> None:
    """Add up the values of positions ``[first, stop)`` by their weights."""
    answers[:] = np.float32(0.0)
    dim = answers.shape[1]
    step = strides[2]
    for block in range(first // block_size, (stop + block_size - 1) // block_size):
        begin, end = max(first, block * block_size), min(stop, (block + 1) * block_size)
        start = strides[0] + table[block] * strides[1] + key_head * strides[3] + (begin - block * block_size) * step
        whole = begin + (end - begin) // FOUR * FOUR
        for position in range(begin, whole, FOUR):
            four = values[start : start + 3 * step + dim]
            for head in range(len(answers)):
                seen = position - first
                _add_four_weighted(answers[head], weights[head, seen : seen + FOUR], four, step)
            start += FOUR * step
        for position in range(whole, end):
            value = values[start : start + dim]
            for head in range(len(answers)):
                _add_weighted(answers[head], weights[head, position - first], value)
            start += step


@inlined_sums
def _product(left: Float32Array, right: Float32Array) -> np.float32:
    total = np.float32(0.0)
    for element in range(len(left)):
        total += left[element] * right[element]
    return total


@inlined_sums
def _four_products(
    products: Float32Array, query: Float32Array, keys: Float32Array, step: int, scale: np.float32
) -> None:
    """Multiply a query with four keys that lie ``step`` elements apart, reading the query once."""
    dim = len(query)
    key_0, key_1, key_2, key_3 = keys[:dim], keys[step:][:dim], keys[2 * step :][:dim], keys[3 * step :][:dim]
    product_0, product_1, product_2, product_3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for element in range(dim):
        product_0 += query[element] * key_0[element]
        product_1 += query[element] * key_1[element]
        product_2 += query[element] * key_2[element]
        product_3 += query[element] * key_3[element]
    products[0] = product_0 * scale
    products[1] = product_1 * scale
    products[2] = product_2 * scale
    products[3] = product_3 * scale


@inlined_sums
def _add_four_weighted(out: Float32Array, weights: Float32Array, values: Float32Array, step: int) -> None:
    """Add four values that lie ``step`` elements apart; the sum is written once."""
    dim = len(out)
    value_0, value_1, value_2, value_3 = (
        values[:dim],
        values[step:][:dim],
        values[2 * step :][:dim],
        values[3 * step :][:dim],
    )
    weight_0, weight_1, weight_2, weight_3 = weights[0], weights[1], weights[2], weights[3]
    for element in range(dim):
        out[element] += (weight_0 * value_0[element] + weight_1 * value_1[element]) + (
            weight_2 * value_2[element] + weight_3 * value_3[element]
        )


@inlined_sums
def _add_weighted(out: Float32Array, weight: np.float32, value: Float32Array) -> None:
    for element in range(len(out)):
        out[element] += weight * value[element]


@compiled_sums
def _weigh(
    scores: Float32Array, soft_cap: float, sink: Float32Array, exponents: Int32Array, powers: Float32Array
) -> None:
    """Turn the scores of one query into weights."""
    if soft_cap > 0.0:
        for seen in range(len(scores)):
            scores[seen] = math.tanh(scores[seen] / np.float32(soft_cap)) * np.float32(soft_cap)
    largest = scores[0]
    for seen in range(len(scores)):
        largest = max(largest, scores[seen])
    if len(sink) > 0:
        largest = max(largest, sink[0])
    _exponentiate(scores, largest, exponents, powers)
    total = np.float32(0.0)
    for seen in range(len(scores)):
        total += scores[seen]
    if len(sink) > 0:
        total += math.exp(sink[0] - largest)
    for seen in range(len(scores)):
        scores[seen] /= total


@compiled_sums
def _exponentiate(scores: Float32Array, largest: np.float32, exponents: Int32Array, powers: Float32Array) -> None:
    """Turn scores x, none above ``largest``, into exp(x - largest).

    The relative error is 4e-6 at x - largest = -87, and 1e-7 near 0, where weights are large.

    exp(x) = 2**n * 2**f with n whole and f in [0, 1). The power of two is written as the bits of a float; 2**f is a
    polynomial (Cody and Waite, 1980). Unlike the library's function, this loop is vectorised: 0.5 ns per score instead
    of 3.8.

    Args:
        scores: float32 ``[n]``.
        exponents: int32 ``[n or more]``, scratch.
        powers: float32, the same memory.
    """
    for seen in range(len(scores)):
        exponent = (scores[seen] - largest) * LOG2_E
        whole = np.floor(exponent)
        rest = exponent - whole  # stays NaN if the score is NaN: the lower bound applies to the power alone
        bounded = whole if whole > LEAST_EXPONENT else LEAST_EXPONENT  # noqa: FURB136 - max() may return NaN
        exponents[seen] = (np.int32(bounded) + EXPONENT_BIAS) << FRACTION_BITS
        scores[seen] = C0 + rest * (C1 + rest * (C2 + rest * (C3 + rest * (C4 + rest * (C5 + rest * C6)))))
    for seen in range(len(scores)):
        scores[seen] *= powers[seen]
