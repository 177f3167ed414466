"""Withdrawing content that turned out bad, such as a corrupt load, or the results of a faulty device.

Bad content is what the caller declares bad, and all that continues it, in every group, since that was computed from it.
Equal content counts as the same content, so a row is also found by the digests of its blocks. A row that may have
copied the bad block while that was partly filled is found by the first tokens of its block::

    row a   [A0][A1 bad][A2][A3]      lost from A1 on
    row b   [A0][A1 bad][B2]          lost from A1 on: it shares the block
    cached  [A0][A1 bad][A2][C3]      A0 stays, the rest leaves the prefix index
    windows of the same prompts       stay where the full group shows that they belong to sound content

Content that cannot be proved sound leaves the prefix index: all blocks of a group, if no full-attention group of equal
block size shows what they continue; and all blocks on the host. If no full-attention group has prefix caching, or none
has the bad content, it is not recorded which rows have read it: all rows are lost.

Two passes find what is bad, and change nothing. Then the blocks are unnamed, and the rows are lost::

    blocks --> beginnings -----------> Taint -----> spreading --------------> Extent --> names, rows, tickets, loads
               rows with the blocks,   digests,     until nothing is added:   all that   (withdraw)
               or with blocks that     rows         rows -> their digests     is bad
               begin alike                          -> what continues those
                                                    -> rows that hold that

Cost: O(blocks + rows x blocks of a row) a round.
"""

from pagedkv.space.withdrawing.withdraw import withdraw

__all__ = ["withdraw"]
