"""Withdrawing content that turned out bad: a load that was corrupt, a device that computed nonsense.

Bad is what the caller names, and all that continues it, in every group: whoever computed on top of a bad block computed
nonsense. Equal content counts as the same content, so a row is found by the digests of its blocks too, and by how its
block begins where it may have copied the bad one while that was partly filled::

    row a   [A0][A1 bad][A2][A3]      lost from A1 on
    row b   [A0][A1 bad][B2]          lost from A1 on: it shares the block
    cached  [A0][A1 bad][A2][C3]      A0 stays, the rest loses its names
    windows of the same prompts       keep their names where the full group shows that they belong to sound content

What cannot be shown to be sound loses its name: where no full-attention group of equal block size tells what a block
continues, all names of the group, and on the host all names. Where no full-attention group has prefix caching, or none
has the bad content, nobody knows who has read it: all rows are lost.

What is bad is found by two passes, which change nothing; then the names go, and the rows are lost::

    blocks --> beginnings -----------> Taint -----> spreading --------------> Extent --> names, rows, tickets, loads
               who has the blocks,     digests,     until nothing is added:   all that   (withdraw)
               or began a block alike  rows         rows -> their digests     is bad
                                                    -> what continues those
                                                    -> rows that hold that

It costs O(blocks + rows x blocks of a row) a round.
"""

from pagedkv.memory.space.withdrawing.withdraw import withdraw

__all__ = ["withdraw"]
