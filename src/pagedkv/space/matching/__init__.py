"""Matching: how far a prompt is cached, in all groups at once. It changes nothing.

A hit is the longest prefix that every group with prefix caching can serve, without the prompt's last token. The passes
below run in this order, each on the result of the one before. Each is a module, and is skipped if its feature is off::

    prompt -> chains -------> Known ----> boundaries ------> inside ----------> replays ----------> PrefixHit
              groups that     limit,      the longest        a longer one,      a longer one,
              keep whole      digests     that ends where    inside a state's   with windows that
              prefixes, by                blocks of all      interval, inside   are computed again
              their links                 groups end         blocks

An example with blocks of 4 tokens, a window of 8, and states that are kept every 8 tokens. All of the prompt was cached
once, and ``x`` marks what is gone since::

    position    0   4   8   12  16  20  24  28  32
    full        [##][##][##][##][##][##][##] x             chains       28 tokens: no hit is longer
    window        x   x [##][##][##]  x   x   x            boundaries   24 is the last end of blocks in all groups, and
    state       [######][######][######][######]                        would need the window's two blocks before it; so
    hit         |--------------|                                        16, which has them, and a state that ends there

The length of a hit is determined by a group that lacks a block for the next boundary:
:meth:`BlockSpace.explain <pagedkv.BlockSpace.explain>` names both. If only one group has prefix caching, and it keeps
whole prefixes, only the first pass is needed.
"""

from pagedkv.space.matching.match import match_prompt

__all__ = ["match_prompt"]
