"""Operations of attention kernels on a tile of scores: masks, soft caps, the running softmax."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def is_seen(key, position, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr):
    """Return whether a query sees a key; keys and positions are broadcast against each other."""
    seen = key <= position
    if WINDOW > 0:
        in_window = key > position - WINDOW
        if SINK_TOKENS > 0:
            in_window = in_window | (key < SINK_TOKENS)
        seen = seen & in_window
    if CHUNK > 0:
        seen = seen & (key >= position // CHUNK * CHUNK)
    return seen


@triton.jit
def may_be_seen(key, position, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINK_TOKENS: tl.constexpr):
    """Return whether a query at this position or a later one may see a key; keys must not be after the query."""
    seen = key >= 0
    if WINDOW > 0:
        seen = key > position - WINDOW
        if SINK_TOKENS > 0:
            seen = seen | (key < SINK_TOKENS)
    if CHUNK > 0:
        seen = key >= position // CHUNK * CHUNK
    return seen


@triton.jit
def capped(products, scale, soft_cap):
    """Turn products of queries and keys into capped scores; return the scores and the factor to apply to them."""
    # tanh(x) = 1 - 2 / (1 + exp(2x)): correct at both ends, where the power is infinite or 0
    power = tl.exp2(products * (2.0 * scale / soft_cap))
    return 1.0 - 2.0 / (1.0 + power), soft_cap * LOG2_E


@triton.jit
def weigh(scores, factor, largest, total):
    """Add a tile of scores times a factor to the running softmax of its rows.

    The factor is applied with the subtraction, in one operation per score. A row without a seen key so far has -inf as
    its largest score; nothing is subtracted from it, which avoids NaN.

    Returns:
        Weights, new maxima and sums, and the factor of earlier sums.
    """
    now = tl.maximum(largest, tl.max(scores, 1) * factor)
    base = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(scores * factor - base[:, None])
    before = tl.exp2(largest - base)
    return weights, now, total * before + tl.sum(weights, 1), before


@triton.jit
def share_beside_sink(largest, total, sink):
    """Return the factor of an unscaled answer if each row's sink takes part in the softmax."""
    top = tl.maximum(largest, sink.to(tl.float32) * LOG2_E)
    below = tl.exp2(largest - top)
    return below / (total * below + tl.exp2(sink.to(tl.float32) * LOG2_E - top))


@triton.jit
def divisor(largest, total):
    """Return the logarithm of the divisor of a partial answer; -inf if no key was seen."""
    is_none = total == 0.0
    return tl.where(is_none, float("-inf"), largest + tl.log2(tl.where(is_none, 1.0, total)))
