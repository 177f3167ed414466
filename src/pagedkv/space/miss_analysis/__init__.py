"""Explaining a miss: where a prompt's hit ends, which group ends it, and what happened to the block that it lacks.

It changes nothing. Cached blocks are compared themselves; for evicted ones the pool's ghosts record the cause
(:mod:`pagedkv.blocks.ghosts`), and if ghosts were forgotten, "never stored" becomes "unknown". There are three
passes, each of which makes a value from the result of the one before::

    PrefixHit -> lacks ------------> Lack -> verdicts --------> Verdict -> misses --------> runs
                 the first group             what happened                 all tokens that
                 that could serve            to that block                 do not hit, and
                 no more, and the                                          why
                 block that it lacks

An example with blocks of 4 tokens and a window of 4; ``x`` marks what is gone::

    position    0   4   8   12  16
    full        [##][##][##][##]         hit        8 tokens; the next boundary is 12
    window      [##][##]  x [##]         lack       block 2 of the window, which a hit of 12 would need
                                         verdict    window gone, since full attention still has that content

Nothing is lacking if the prompt has no further boundary (block not full), if the caller allows no longer hit (bounded),
if a load brings the next block, or if the open step computes it and it cannot be taken over. Else the verdict on the
block that a group lacks is the first of these that applies::

    the block is in the prefix index  being computed, or orphaned
    there is a ghost of it            why it was evicted or dropped, and how long ago
    a ghost under an earlier epoch    another weights epoch
    cached under other extra keys     another adapter, salt, or medium
    its parent has other children     changed tokens
    a window or a state, and whole prefixes of the same content are cached     window gone, state gone
    no ghost, and none lost           never stored; else unknown

Tokens are compared only with content under the same keys, so that no answer reveals the prompts of another tenant.
"""

from pagedkv.space.miss_analysis.explain import explain, explain_misses, is_bare

__all__ = ["explain", "explain_misses", "is_bare"]
