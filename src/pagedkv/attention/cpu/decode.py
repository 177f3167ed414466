"""Decode attention that reads blocks in place: one query per sequence, no copied keys (Kwon et al., vLLM, SOSP 2023).

For each sequence, the scores of all query heads are computed block by block into scratch rows and turned into weights;
a second pass over the blocks adds up the weighted values::

    scores   | block 0: dot products | block 1 | ... |      one row for each query head
    weights  exp(score - largest), their sum with the sink's
    out      += weight * value, block by block

There are two passes over the scores instead of one with a running maximum: the scores of a sequence fit the processor's
cache, and the sums of the second pass are vectorised.
"""

import math
from typing import Final, TypeAlias

import numpy as np

from pagedkv.compilation.compiled import compiled_sums, inlined_sums, unsigned
from pagedkv.contract.arrays import Float32Array, Int32Array, Int64Array, Uint16Array

Pool: TypeAlias = tuple[Float32Array, Uint16Array]
"""One memory, seen as floats and as the bits of bfloat16."""
ONE: Final = np.uintp(1)
TWO: Final = np.uintp(2)
THREE: Final = np.uintp(3)
FOUR: Final = np.uintp(4)
"""Positions whose keys, or values, are processed together."""
DIM_32: Final = 32
DIM_64: Final = 64
DIM_128: Final = 128
"""Dimensions that are constants of the code: a product of 32 elements takes 1.2 ns instead of 8."""
LOG2_E: Final = np.float32(1.4426950408889634)
LEAST_EXPONENT: Final = np.float32(-126.0)
EXPONENT_BIAS: Final = np.int32(127)
FRACTION_BITS: Final = np.int32(23)
WIDENING: Final = np.int32(16)
"""Bits by which a float is longer than a bfloat16."""
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
    flat: Float32Array | Uint16Array,
    strides: Int64Array,
    block_size: int,
    slots: Int64Array,
    tokens: Float32Array | Uint16Array,
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
    keys: Pool,
    key_strides: Int64Array,
    values: Pool,
    value_strides: Int64Array,
    shape: Int64Array,
    scale: float,
    soft_cap: float,
    sinks: Float32Array,
    scores: Float32Array,
    exponents: Int32Array,
    powers: Float32Array,
    bits: Int32Array,
    wide: Float32Array,
) -> None:
    """Compute attention of one query for each of some sequences.

    Args:
        out: float32 ``[tokens, heads, value_dim]``; only the rows of ``tokens`` are written.
        query: float32 ``[tokens, heads, key_dim]``, C-contiguous.
        places: int64 ``[n]``, places of the sequences.
        tokens: int64 ``[n]``, index of each sequence's query in the flat row.
        tables: int32 ``[places, width]``.
        seq_lens: int32 ``[places]``.
        keys, values: flat pools, see :mod:`pagedkv.attention.cpu.backend`: as float32 and as uint16.
        key_strides, value_strides: their strides.
        shape: int64 ``[5]``: block size, key heads, window, chunk (0: none), whether elements are bfloat16.
        scale, soft_cap: the layer's.
        sinks: float32 ``[heads]``, or empty.
        scores: float32 ``[heads, longest sequence]``, scratch.
        exponents: int32 ``[longest sequence]``, scratch.
        powers: float32, the same memory.
        bits: int32 ``[block size * larger dim]``, scratch.
        wide: float32, the same memory.

    Cost: O(sum of seen positions x heads x dim), each key read once.
    """
    window, chunk, width = shape[2], shape[3], scores.shape[1]
    num_heads, key_dim, value_dim = query.shape[1], query.shape[2], out.shape[2]
    queries, answers, flat_scores = query.reshape(-1), out.reshape(-1), scores.reshape(-1)
    for index in range(len(places)):
        place, token = places[index], tokens[index]
        stop = seq_lens[place]
        first = 0
        if window > 0:
            first = max(0, stop - window)
        if chunk > 0:
            first = (stop - 1) // chunk * chunk
        query_of = queries[token * num_heads * key_dim :][: num_heads * key_dim]
        answer = answers[token * num_heads * value_dim :][: num_heads * value_dim]
        table = tables[place]
        _score(query_of, key_dim, keys, key_strides, table, shape, first, stop, scale, flat_scores, width, bits, wide)
        for head in range(num_heads):
            sink = sinks[head : head + 1] if len(sinks) > 0 else sinks
            _weigh(scores[head, : stop - first], soft_cap, sink, exponents, powers)
        _add_values(answer, value_dim, values, value_strides, table, shape, first, stop, flat_scores, width, bits, wide)


@compiled_sums
def _score(
    queries: Float32Array,
    dim: int,
    keys: Pool,
    strides: Int64Array,
    table: Int32Array,
    shape: Int64Array,
    first: int,
    stop: int,
    scale: float,
    scores: Float32Array,
    width: int,
    bits: Int32Array,
    wide: Float32Array,
) -> None:
    """Multiply queries with the keys of positions ``[first, stop)``; a block's heads lie together, and are read so."""
    block_size, num_key_heads = shape[0], shape[1]
    shared, factor = unsigned(len(queries) // (num_key_heads * dim)), np.float32(scale)
    row = unsigned(width)
    for block in range(first // block_size, (stop + block_size - 1) // block_size):
        begin, end = max(first, block * block_size), min(stop, (block + 1) * block_size)
        for key_head in range(num_key_heads):
            place = strides[0] + table[block] * strides[1] + key_head * strides[3]
            place += (begin - block * block_size) * strides[2]
            there, start, step = _floats(keys, shape[4], place, strides[2], end - begin, dim, bits, wide)
            key, apart, count = unsigned(start), unsigned(step), unsigned(end - begin)
            query = unsigned(key_head) * shared * unsigned(dim)
            score = unsigned(key_head) * shared * row + unsigned(begin - first)
            if dim == DIM_32:
                _products(scores, score, row, queries, query, shared, there, key, apart, count, DIM_32, factor)
            elif dim == DIM_64:
                _products(scores, score, row, queries, query, shared, there, key, apart, count, DIM_64, factor)
            elif dim == DIM_128:
                _products(scores, score, row, queries, query, shared, there, key, apart, count, DIM_128, factor)
            else:
                _products(scores, score, row, queries, query, shared, there, key, apart, count, dim, factor)


@compiled_sums
def _add_values(
    answers: Float32Array,
    dim: int,
    values: Pool,
    strides: Int64Array,
    table: Int32Array,
    shape: Int64Array,
    first: int,
    stop: int,
    weights: Float32Array,
    width: int,
    bits: Int32Array,
    wide: Float32Array,
) -> None:
    """Add up the values of positions ``[first, stop)`` by their weights."""
    answers[:] = np.float32(0.0)
    block_size, num_key_heads = shape[0], shape[1]
    shared, row = unsigned(len(answers) // (num_key_heads * dim)), unsigned(width)
    for block in range(first // block_size, (stop + block_size - 1) // block_size):
        begin, end = max(first, block * block_size), min(stop, (block + 1) * block_size)
        for key_head in range(num_key_heads):
            place = strides[0] + table[block] * strides[1] + key_head * strides[3]
            place += (begin - block * block_size) * strides[2]
            there, start, step = _floats(values, shape[4], place, strides[2], end - begin, dim, bits, wide)
            value, apart, count = unsigned(start), unsigned(step), unsigned(end - begin)
            answer = unsigned(key_head) * shared * unsigned(dim)
            weight = unsigned(key_head) * shared * row + unsigned(begin - first)
            if dim == DIM_32:
                _weighted(answers, answer, weights, weight, row, shared, there, value, apart, count, DIM_32)
            elif dim == DIM_64:
                _weighted(answers, answer, weights, weight, row, shared, there, value, apart, count, DIM_64)
            elif dim == DIM_128:
                _weighted(answers, answer, weights, weight, row, shared, there, value, apart, count, DIM_128)
            else:
                _weighted(answers, answer, weights, weight, row, shared, there, value, apart, count, dim)


@inlined_sums
def _floats(
    pool: Pool, is_half: int, start: int, step: int, count: int, dim: int, bits: Int32Array, wide: Float32Array
) -> tuple[Float32Array, int, int]:
    """Return an array, a start and a step at which ``count`` tokens are floats, ``dim`` each.

    Floats stay where they are; bfloat16, whose bits are the upper half of a float's, is widened into scratch memory.
    """
    floats, halves = pool
    if is_half == 0:
        return floats, start, step
    for token in range(count):
        half = unsigned(start + token * step)
        there = unsigned(token * dim)
        for element in range(unsigned(dim)):
            bits[there + element] = np.int32(halves[half + element]) << WIDENING
    return wide, 0, dim


@inlined_sums
def _products(
    scores: Float32Array,
    score: int,
    row: int,
    queries: Float32Array,
    query: int,
    shared: int,
    keys: Float32Array,
    key: int,
    apart: int,
    count: int,
    dim: int,
    scale: np.float32,
) -> None:
    """Multiply the queries that share a key head with the keys of a block.

    Args:
        scores: flat, ``row`` elements for each head; score: the place of the first key's for the first head.
        queries: flat; query: the place of the first head's.
        shared: number of query heads.
        keys: flat; key: the place of the first one; apart: elements between keys; count: number of keys.
        dim: elements of a key.
        scale: of the products.

    Places and counts are unsigned.
    """
    for head in range(shared):
        here, to = query + head * unsigned(dim), score + head * row
        whole = count // FOUR
        for four in range(whole):
            begin = four * FOUR
            key_0 = key + begin * apart
            key_1 = key_0 + apart
            key_2 = key_1 + apart
            key_3 = key_2 + apart
            product_0, product_1 = np.float32(0.0), np.float32(0.0)
            product_2, product_3 = np.float32(0.0), np.float32(0.0)
            for element in range(unsigned(dim)):
                factor = queries[here + element]
                product_0 += factor * keys[key_0 + element]
                product_1 += factor * keys[key_1 + element]
                product_2 += factor * keys[key_2 + element]
                product_3 += factor * keys[key_3 + element]
            scores[to + begin] = product_0 * scale
            scores[to + begin + ONE] = product_1 * scale
            scores[to + begin + TWO] = product_2 * scale
            scores[to + begin + THREE] = product_3 * scale
        for position in range(whole * FOUR, count):
            last = key + position * apart
            product = np.float32(0.0)
            for element in range(unsigned(dim)):
                product += queries[here + element] * keys[last + element]
            scores[to + position] = product * scale


@inlined_sums
def _weighted(
    answers: Float32Array,
    answer: int,
    weights: Float32Array,
    weight: int,
    row: int,
    shared: int,
    values: Float32Array,
    value: int,
    apart: int,
    count: int,
    dim: int,
) -> None:
    """Add the values of a block to the answers of the heads that share them. Arguments as of :func:`_products`."""
    for head in range(shared):
        here, at = answer + head * unsigned(dim), weight + head * row
        whole = count // FOUR
        for four in range(whole):
            begin = four * FOUR
            value_0 = value + begin * apart
            value_1 = value_0 + apart
            value_2 = value_1 + apart
            value_3 = value_2 + apart
            weight_0, weight_1 = weights[at + begin], weights[at + begin + ONE]
            weight_2, weight_3 = weights[at + begin + TWO], weights[at + begin + THREE]
            for element in range(unsigned(dim)):
                answers[here + element] += (
                    weight_0 * values[value_0 + element] + weight_1 * values[value_1 + element]
                ) + (weight_2 * values[value_2 + element] + weight_3 * values[value_3 + element])
        for position in range(whole * FOUR, count):
            last, last_weight = value + position * apart, weights[at + position]
            for element in range(unsigned(dim)):
                answers[here + element] += last_weight * values[last + element]


@compiled_sums
def _weigh(
    scores: Float32Array, soft_cap: float, sink: Float32Array, exponents: Int32Array, powers: Float32Array
) -> None:
    """Turn the scores of one query into weights."""
    if soft_cap > 0.0:
        for seen in range(len(scores)):
            scores[seen] = math.tanh(scores[seen] / np.float32(soft_cap)) * np.float32(soft_cap)
    largest = _largest(scores)
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


@inlined_sums
def _largest(scores: Float32Array) -> np.float32:
    """Return the largest score, or any if one is NaN: four maxima side by side, which do not wait for each other."""
    first, second, third, fourth = scores[0], scores[0], scores[0], scores[0]
    whole = unsigned(len(scores)) // FOUR
    for four in range(whole):
        at = four * FOUR
        first = max(first, scores[at])
        second = max(second, scores[at + ONE])
        third = max(third, scores[at + TWO])
        fourth = max(fourth, scores[at + THREE])
    for rest in range(whole * FOUR, unsigned(len(scores))):
        first = max(first, scores[rest])
    return max(first, second, third, fourth)


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
