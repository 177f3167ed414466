"""How far a prompt is cached, in all groups at once. A question: matching changes nothing.

A hit ends as late as every group with prefix caching can serve it, and before the prompt's last token. One pass after
the other takes what is known and says more of it; each is a module, and one whose feature is off is not run::

    prompt -> chains -------> Known ----> boundaries ------> inside ----------> replays ----------> PrefixHit
              groups that     limit,      the longest        a longer one,      a longer one,
              keep whole      digests     that ends where    inside a state's   with windows that
              prefixes, by                blocks of all      interval, inside   are computed again
              their links                 groups end         blocks

Here with blocks of 4 tokens, a window of 8, and states that are kept every 8 tokens. All of the prompt was cached once,
and ``x`` marks what is gone by now::

    position    0   4   8   12  16  20  24  28  32
    full        [##][##][##][##][##][##][##] x             chains       28 tokens: no hit is longer
    window        x   x [##][##][##]  x   x   x            boundaries   24 is the last end of blocks in all groups, and
    state       [######][######][######][######]                        would need the window's two blocks before it; so
    hit         |--------------|                                        16, which has them, and a state that ends there

So a hit has the length that it has because of the group that lacks a block for the next boundary:
:meth:`BlockSpace.explain <pagedkv.BlockSpace.explain>` names both. Where one group is all that has prefix caching, and
keeps whole prefixes, the first pass is all.
"""

from pagedkv.memory.space.matching.match import match_again, match_prompt

__all__ = ["match_again", "match_prompt"]
