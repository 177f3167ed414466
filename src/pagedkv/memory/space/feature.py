"""What a feature of a space does, beside the operations: at named moments, which the operations call.

A space calls each moment of each of its features, in their order; one that has none calls nothing. Unlike observers
(:mod:`~pagedkv.memory.space.observer`), features take part: what they do is part of the operation. Which features a
space has is said in :mod:`~pagedkv.memory.space.features`.
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
    """A feature that does nothing: each moment is there to be overridden. Batches are int32 ``[rows]``."""

    # Taking blocks

    def row_taken(self, batch: Int32Array, tenant: int) -> None:
        """A row was taken for a tenant: int32 ``[1]``."""

    def taking(self, tenant: int) -> None:
        """Blocks are about to be taken for a tenant."""

    def reviving(self, pool: "BlockPool", blocks: Int32Array) -> None:
        """Blocks with content, free ones among them, are about to be taken from a device pool."""

    def hit_taken(self, row: int, hit: "PrefixHit") -> None:
        """A new row refers to its hit."""

    def taken(self, tenant: int) -> None:
        """Blocks with content were taken for a tenant, and new ones behind them."""

    # Rows

    def prompt_known(self, row: int, num_tokens: int, hit: "PrefixHit") -> None:
        """A new row, which publishes, serves a prompt of so many tokens."""

    def forked(self, parent: int, children: Int32Array) -> None:
        """New rows go on from another one."""

    def leaving(self, batch: Int32Array) -> None:
        """Rows are about to give up their blocks on the device."""

    def cleared(self, batch: Int32Array) -> None:
        """Rows are those of new, empty sequences, or vacant."""

    # Steps

    def publishing(self, group: "Group", batch: Int32Array) -> None:
        """Names are about to be given to what rows complete in a group."""

    def planned(self, step: "InFlightStep") -> None:
        """A step is being planned: what it computes is known."""

    def rewound(self, rows: list[int]) -> None:
        """Steps failed, and rows are to compute again what they computed."""

    def declared(self, batch: Int32Array) -> None:
        """Rows are declared computed, and not noted as planned yet."""

    def moved(self, step: "InFlightStep", refused: Int32Array) -> None:
        """Tokens were refused, int32 ``[max_sequences]``: what a step in flight computes behind them has moved down."""

    def load_begun(self, answer: "Load", hit: "PrefixHit", epochs: tuple[int, int]) -> None:
        """Blocks were taken to be filled from elsewhere, behind a hit; ``epochs`` contributed to what is brought."""
