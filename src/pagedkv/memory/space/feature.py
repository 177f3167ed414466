"""The optional parts of operations: a feature has named moments, which the operations call.

A space calls each moment of each of its features, in their order; without features nothing is called. Unlike observers
(:mod:`~pagedkv.memory.space.observer`), features change state: what they do is part of the operation.
:mod:`~pagedkv.memory.space.features` chooses the features of a space.
"""

from typing import TYPE_CHECKING

from pagedkv.memory.contract.arrays import Int32Array

if TYPE_CHECKING:
    from pagedkv.memory.contract.answers import Load
    from pagedkv.memory.pool.block_pool import BlockPool
    from pagedkv.memory.space.hits import PrefixHit
    from pagedkv.memory.space.state import Group
    from pagedkv.memory.space.steps import InFlightStep

__all__ = ["SpaceFeature"]


class SpaceFeature:
    """A feature that does nothing; subclasses override the moments they need. Batches are int32 ``[rows]``."""

    # Taking blocks

    def row_taken(self, batch: Int32Array, tenant: int) -> None:
        """A row was taken for a tenant: int32 ``[1]``."""

    def taking(self, tenant: int) -> None:
        """Blocks are about to be taken for a tenant."""

    def reviving(self, pool: "BlockPool", blocks: Int32Array) -> None:
        """Blocks with content, some of them free, are about to be taken from a device pool."""

    def hit_taken(self, row: int, hit: "PrefixHit") -> None:
        """A new row references its hit."""

    def taken(self, tenant: int) -> None:
        """Blocks with content, and new blocks behind them, were taken for a tenant."""

    # Rows

    def prompt_known(self, row: int, num_tokens: int, hit: "PrefixHit") -> None:
        """A new row, which publishes, serves a prompt of this many tokens."""

    def forked(self, parent: int, children: Int32Array) -> None:
        """New rows continue another row."""

    def leaving(self, batch: Int32Array) -> None:
        """Rows are about to release their blocks on the device."""

    def cleared(self, batch: Int32Array) -> None:
        """Rows were reset, either to vacant or for new, empty sequences."""

    # Steps

    def publishing(self, group: "Group", batch: Int32Array) -> None:
        """Blocks that rows complete in a group are about to be published."""

    def planned(self, step: "InFlightStep") -> None:
        """A step is being planned, and its ranges are known."""

    def rewound(self, rows: list[int]) -> None:
        """Steps failed, and these rows are to compute the steps' tokens again."""

    def declared(self, batch: Int32Array) -> None:
        """Rows are declared computed, but not yet recorded as planned."""

    def moved(self, step: "InFlightStep", refused: Int32Array) -> None:
        """Tokens were refused, int32 ``[max_sequences]``; the later tokens of a step in flight have moved down."""

    def load_begun(self, answer: "Load", hit: "PrefixHit", epochs: tuple[int, int]) -> None:
        """Blocks behind a hit were taken for a load; ``epochs`` contributed to its content."""
