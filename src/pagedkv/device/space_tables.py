"""SpaceTables: the tables of a space: one for each group, then a second one for each group with draft states.

Tables are numbered as in the plans' table writes. No tensors are used here: sizes are computed from a configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import keeps_state, num_draft_states
from pagedkv.device.large_plans import buffer_words
from pagedkv.device.table_arrays import TableGeometry
from pagedkv.plan_buffer import PlanLayout

__all__ = ["SpaceTables"]


@dataclass(frozen=True, slots=True)
class SpaceTables:
    """The tables of one space.

    Args:
        num_groups: number of groups, each with a table of its own.
        block_sizes: tokens of an entry, for each group.
        widths: entries of a row, for each group.
        slots_of: for each group with draft states, the table of its slots and their number.
        num_blocks: for each table, blocks of the pool that its entries refer to.
        names: name of each table in errors.
        layout: layout of the space's plans.
    """

    num_groups: int
    block_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    slots_of: Mapping[int, tuple[int, int]]
    num_blocks: tuple[int, ...]
    names: tuple[str, ...]
    layout: PlanLayout

    @classmethod
    def of(cls, config: SpaceConfig) -> "SpaceTables":
        """Return the tables that plans of a configuration write."""
        groups, by_pool = config.groups, config.blocks_by_pool()
        drafting = config.drafting
        owners = [*range(len(groups)), *drafting]
        sizes = tuple(_entry_tokens(config, index) for index in range(len(groups)))
        slots_of = {
            index: (table, num_draft_states(groups[index])) for table, index in enumerate(drafting, len(groups))
        }
        return cls(
            num_groups=len(groups),
            block_sizes=sizes,
            widths=tuple(-(-config.max_tokens // size) for size in sizes),
            slots_of=MappingProxyType(slots_of),
            num_blocks=tuple(by_pool[groups[owner].pool] for owner in owners),
            names=(
                *(f"group {index}" for index in range(len(groups))),
                *(f"the draft states of group {index}" for index in drafting),
            ),
            layout=PlanLayout(config),
        )

    def geometry(
        self, config: SpaceConfig, *, max_tokens: int, num_buffers: int, depth: int, packet_entries: int
    ) -> TableGeometry:
        """Return the sizes of all tables, and of packets with ``packet_entries`` entries."""
        has_slots = [not keeps_state(group) for group in config.groups]
        seconds = self.slots_of.values()
        sizes = TableGeometry(
            widths=(*self.widths, *(num_slots for _, num_slots in seconds)),
            block_sizes=(*self.block_sizes, *(1 for _ in seconds)),
            has_slots=(*has_slots, *(False for _ in seconds)),
            max_rows=config.max_sequences,
            max_tokens=max_tokens,
            num_buffers=num_buffers,
            buffer_words=0,
            depth=depth,
            layout=self.layout,
        )
        return replace(sizes, buffer_words=buffer_words(self.layout, sizes, packet_entries))


def _entry_tokens(config: SpaceConfig, index: int) -> int:
    """Tokens of a table's entry; a state without checkpoints has one entry for the whole sequence."""
    group = config.groups[index]
    if keeps_state(group) and not (config.prefix_caching and group.prefix_caching):
        return config.max_tokens
    return group.block_size
