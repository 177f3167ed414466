"""What a peer took where it was measured beside an older commit of this package, and the bars that follow.

The radix tree in Rust of SGLang 0.5.23 loads only beside PyTorch's libraries, so it is not measured here. It was
measured once, in one run with commit b7c260a (``measure.BAR_COMMIT``), on a 2-core machine; microseconds a match,
everything cached:

    ==================  =====  =====  ======  ==========================
    prompt              1k     32k    128k    128k, built in 64 turns
    ==================  =====  =====  ======  ==========================
    SGLang, Rust tree   4.9    21     122     149
    commit b7c260a      9.5    50     187     98
    ==================  =====  =====  ======  ==========================

Beside the same commit on another machine its time is estimated as the commit's times the quotient. As a multiple of a
bare memory pass (a compiled sum over as many bytes as a match of 128k reads, 1.46 MB, not touched since nine others
of that size), on a 2-core AMD EPYC: commit b7c260a 2.5 to 3.1 passes, SGLang by the quotient 1.7 to 2.0.
"""

from typing import Final

__all__ = ["BUILT_IN_64_TURNS_BAR", "FIRST_TOUCH_BARS"]

FIRST_TOUCH_BARS: Final = {
    "1k": 0.53,  # 5 / 9.5: 5 us, most of which is the call
    "32k": 0.55,  # 1.3 * 21 / 50: 1.3 of SGLang's
    "128k": 0.65,  # 122 / 187: SGLang's
}
"""Ratios to b7c260a that the first match of a cached prompt shall meet, on a fresh pool."""

BUILT_IN_64_TURNS_BAR: Final = 1.5  # 149 / 98: SGLang's
"""Ratio to b7c260a that the match of a conversation shall meet."""
