"""The optional parts of operations: a feature has named moments, which the operations call.

A space calls each moment of each of its features, in their order; without features nothing is called. Unlike observers
(:mod:`~pagedkv.space.observer`), features change state: what they do is part of the operation. Some moments only
ask: ``require_*`` may refuse an operation, and the ``count_*`` add to what it needs. These change nothing.
:mod:`~pagedkv.space.features` chooses the features of a space.
"""

from typing import TYPE_CHECKING

from pagedkv.contract.arrays import Int32Array

if TYPE_CHECKING:
    from pagedkv.blocks.block_pool import BlockPool
    from pagedkv.contract.answers import Load
    from pagedkv.space.growing import Growth
    from pagedkv.space.matching import Chain, Ending, Known, PrefixHit, Prompt
    from pagedkv.space.releasing import Leaving
    from pagedkv.space.state import Group
    from pagedkv.space.steps import InFlightStep, StepLedger

__all__ = ["SpaceFeature"]


class SpaceFeature:
    """A feature that does nothing; subclasses override the moments they need. Batches are int32 ``[rows]``.

    Attributes:
        most_blocks_a_row: the most blocks that a growing row takes for the feature, beside those of the groups' tables.
    """

    most_blocks_a_row = 0

    # Matching

    def followed(self, prompt: "Prompt", chain: "Chain", most: int) -> "Chain":
        """Return the chain of a prompt, at most ``most`` tokens long, with what the feature finds behind it."""
        del prompt, most
        return chain

    def matched(self, hit: "PrefixHit", group: "Group") -> None:
        """A prompt was matched in the only group with prefix caching; no step still computes what it hits."""

    def lengthened(self, known: "Known", ending: "Ending") -> "Ending":
        """Return a longer end of a prompt's hit, if there is one, else the given one."""
        del known
        return ending

    def num_named_tokens(self, pool: "BlockPool", block: int) -> int | None:
        """Return how many tokens a cached block is named for, if these are not all of its size; else None."""
        del pool, block
        return None

    def epochs_of(self, pool: "BlockPool", block: int) -> tuple[int, int] | None:
        """Return the oldest and the newest epoch that contributed to a block; None if they are not recorded."""
        del pool, block
        return None

    # Admission

    def checkpoint(self, num_tokens: int, num_hit_tokens: int) -> int:
        """Return where a chunk of a prompt with this hit should end, since something is kept there; 0: nowhere."""
        del num_tokens, num_hit_tokens
        return 0

    def fits(self, hit: "PrefixHit", needed: dict[str, int], tenant: int) -> None:
        """A prompt fits, and nothing is changed yet. ``needed``: the free blocks that it takes by pool."""

    def row_taken(self, batch: Int32Array, tenant: int) -> None:
        """A row was taken for a tenant: int32 ``[1]``."""

    def taking(self, tenant: int) -> None:
        """Blocks are about to be taken for a tenant."""

    def reviving(self, pool: "BlockPool", blocks: Int32Array) -> None:
        """Blocks with content, some of them free, are about to be taken from a device pool."""

    def hit_taken(self, ledger: "StepLedger", batch: Int32Array, hit: "PrefixHit") -> None:
        """A new row, int32 ``[1]``, references the whole blocks of its hit, and no other block yet."""

    def allocating(self, group: "Group") -> None:
        """The new row is about to take its blocks in a group."""

    def allocated(self, ledger: "StepLedger", row: int, hit: "PrefixHit") -> None:
        """The new row has its blocks in all groups."""

    def taken(self, tenant: int) -> None:
        """Blocks with content, and new blocks behind them, were taken for a tenant."""

    def chains_begun(self, row: int, prompt: "Prompt", hit: "PrefixHit") -> None:
        """The digest chains of a new row begin behind its hit; nothing is published yet."""

    def prompt_known(self, row: int, num_tokens: int, hit: "PrefixHit") -> None:
        """A new row, which publishes, serves a prompt of this many tokens."""

    def require_epochs(self, epochs: tuple[int, int] | None) -> None:
        """Raise ConfigurationError if content of these epochs cannot be loaded."""

    def load_begun(self, answer: "Load", hit: "PrefixHit", epochs: tuple[int, int] | None) -> None:
        """Blocks behind a hit were taken for a load. ``epochs`` contributed to its content; None: the current one."""

    # Growing, and rolling back

    def require_drafts(self, num_draft: int) -> None:
        """Raise TokenError if rows cannot have so many drafts."""

    def require_unknown(self, growth: "Growth") -> None:
        """Raise TokenError if rows cannot take these unknown tokens."""

    def count_growth(self, growth: "Growth", needed: dict[str, int]) -> None:
        """Add to the free blocks, by pool, what rows with equally many drafts take beside those of the groups."""

    def giving_way(self, batch: Int32Array) -> None:
        """There is no block for copies that keep what these growing rows overwrite."""

    def growing(self, growth: "Growth") -> None:
        """Rows with equally many drafts are about to grow; there are enough blocks."""

    def accepted(self, batch: Int32Array, before: Int32Array, accepted: Int32Array) -> None:
        """Of tokens, ``before`` were accepted, and ``accepted`` are now: int32 ``[rows]``. Called with draft tables."""

    def truncated(self, batch: Int32Array) -> None:
        """Rows were rolled back, and their remaining tokens are accepted."""

    # Rows

    def require_forkable(self, parent: int) -> None:
        """Raise SequenceError if another row cannot share all blocks of a row."""

    def forked(self, parent: int, children: Int32Array) -> None:
        """New rows continue another row."""

    def what_keeps(self, batch: Int32Array) -> str | None:
        """Return the sentence that refuses to swap these rows out until a step is acknowledged; None if they can be."""
        del batch
        return None

    def leaving(self, batch: Int32Array) -> None:
        """Rows are about to release their blocks on the device."""

    def freeing(self, batch: Int32Array, leaving: "Leaving") -> None:
        """Rows are about to be vacated; those on the device have left it as in ``leaving``."""

    def dropped(self, pool: "BlockPool", blocks: Int32Array) -> None:
        """References to blocks of a device pool were dropped in another way than by releasing rows there."""

    def cleared(self, batch: Int32Array) -> None:
        """Rows were reset, either to vacant or for new, empty sequences."""

    # Steps

    def publishing(self, group: "Group", batch: Int32Array) -> None:
        """Blocks that rows complete in a group are about to be published."""

    def planned(self, step: "InFlightStep") -> None:
        """A step is being planned, and its ranges are known."""

    def state_kept(self, row: int, position: int) -> None:
        """The states of a planned row are kept up to a position, the end of its prompt."""

    def computed(self, step: "InFlightStep") -> None:
        """A step has run: blocks that waited for it are free, and its tokens accepted."""

    def rewound(self, rows: list[int]) -> None:
        """Steps failed, and these rows are to compute the steps' tokens again."""

    def require_declarable(self, batch: Int32Array) -> None:
        """Raise StepError if rows cannot be declared computed."""

    def declared(self, batch: Int32Array) -> None:
        """Rows are declared computed, but not yet recorded as planned."""

    def moved_on(self, batch: Int32Array) -> None:
        """All tokens of rows count as computed."""

    def moved(self, step: "InFlightStep", refused: Int32Array) -> None:
        """Tokens were refused, int32 ``[max_sequences]``; the later tokens of a step in flight have moved down."""

    # Time

    def advanced(self, now_s: float) -> None:
        """The clock was set."""

    # Queries

    def without_inexact(self, group: "Group", row: int, entries: Int32Array) -> Int32Array:
        """Replace blocks whose content is not exact by the null block, among the leading entries of a row's table."""
        del group, row
        return entries

    # Auditing

    def check(self) -> None:
        """Check what the feature keeps, as part of ``check()``. Raises AssertionError."""
