"""Small managers and groups for tests of the classic door."""

from pagedkv import BlockSpaceManager, FullAttention, GroupSpec, Sequence, SequenceGroup, SpaceConfig

__all__ = ["new_group", "new_manager"]


def new_manager(*groups: GroupSpec, num_blocks: int = 21, num_host_blocks: int = 11) -> BlockSpaceManager:
    """Build a manager: full attention with blocks of 4 tokens and 8 rows, unless told."""
    specs = groups or (FullAttention(4),)
    return BlockSpaceManager(SpaceConfig(specs, num_blocks, num_host_blocks, max_sequences=8, max_tokens=200))


def new_group(prompt: list[int], n: int = 1, first_id: int = 0) -> SequenceGroup:
    """Make a request for n samples of a prompt."""
    return SequenceGroup(f"request {first_id}", [Sequence(first_id + index, list(prompt)) for index in range(n)])
