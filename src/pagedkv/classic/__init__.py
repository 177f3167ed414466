"""The classic interface: one sequence or sequence group at a time, by sequence id, for schedulers written that way.

It is for porting a scheduler written for the block manager of vLLM's V0 engine (Kwon et al., SOSP 2023) or of
Aphrodite. Names and signatures are theirs; the state is that of a
:class:`~pagedkv.space.block_space.BlockSpace`. A new engine should use that class instead, which does whole
batches in one call. docs/coming-from-vllm.md lists what is different here, and why.

The modules, in the order in which a call uses them::

    manager      BlockSpaceManager: can_allocate, allocate, append_slots, fork, swap_out, free, end_round, ...;
                 RowMap: which row serves which sequence
    block_table  BlockTable: one sequence's blocks as an object
"""

from pagedkv.classic.block_table import BlockTable
from pagedkv.classic.manager import BlockSpaceManager

__all__ = ["BlockSpaceManager", "BlockTable"]
