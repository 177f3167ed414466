"""Explaining a miss: where a prompt's hit ends, which group ends it, and what became of the block that it lacks.

A question throughout. What is still cached is looked at itself; of what is gone the ghosts of the pool tell
(:mod:`pagedkv.memory.pool.ghosts`), and where they have lost some, "never stored" becomes "unknown". It takes three
passes, each of which makes a value of what the one before has found::

    PrefixHit -> lacks ------------> Lack -> verdicts --------> Verdict -> misses --------> runs
                 the first group             what became                   all tokens that
                 that could serve            of that block                 do not hit, and
                 no more, and the                                          why
                 block that it lacks

Here with blocks of 4 tokens and a window of 4; ``x`` marks what is gone::

    position    0   4   8   12  16
    full        [##][##][##][##]         hit        8 tokens; the next boundary is 12
    window      [##][##]  x [##]         lack       block 2 of the window, which a hit of 12 would need
                                         verdict    window gone, since full attention still has that content

Nothing is lacking where the prompt has no further boundary (block not full), where the caller allows none (bounded),
where a load brings it, or where the open step computes it and it cannot be taken over. Else, for the block that a
group lacks, the first of these that holds is the verdict::

    it has a name after all           being computed, or orphaned
    a ghost of it                     why that went, and how long ago
    a ghost under an earlier epoch    another weights epoch
    cached under other extra keys     another adapter, salt, or medium
    what it continues goes on else    changed tokens
    a window or a state, and whole prefixes of the same content are cached     window gone, state gone
    no ghost, and none lost           never stored; else unknown

Tokens are compared with content under the same keys alone: nobody is told what another tenant has asked.
"""

from pagedkv.memory.space.miss_analysis.explain import explain, is_bare, tell_misses

__all__ = ["explain", "is_bare", "tell_misses"]
