"""Explaining a miss: where a prompt's hit ends, which group ends it, and what became of the block that it lacks.

A question throughout. What is still cached is looked at itself; of what is gone the ghosts of the pool tell
(:mod:`pagedkv.pool.ghosts`), and where they have lost some, "never stored" becomes "unknown". It takes three passes,
each of which makes a value of what the one before has found::

    hit ------------------------> Lack -------------------------> Verdict -------------------> misses
         the first group that           what became of                  the tokens that do
         could serve no more,           the block                       not hit, in runs of
         and the block that it          (verdicts)                      one cause each
         lacks (lacks)                                                  (misses)

    full     [ 0][ 1][ 2]  x                 hit: 8 tokens, blocks of 4
    window        ^    x                     a hit of 12 would need block 2 of the window: it lacks that one
             |--- hit ---|                   lacks: window, block 2      verdict: window gone
                      ^ the next boundary is what is asked about

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

from pagedkv.space.explaining.explain import explain, note_admission, tell_misses

__all__ = ["explain", "note_admission", "tell_misses"]
