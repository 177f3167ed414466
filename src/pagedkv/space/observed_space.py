"""The view of a space that observers get."""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from pagedkv.contract.miss_causes import Miss
from pagedkv.space.hits import PrefixHit
from pagedkv.space.miss_analysis import explain_misses
from pagedkv.space.space_view import SpaceView
from pagedkv.space.state import SpaceState

__all__ = ["ObservedSpace"]


class ObservedSpace(SpaceView):
    """The read access to a space, also allowed in the middle of its operations."""

    def __init__(self, space: SpaceView) -> None:
        """View the same space."""
        self._own_state, self._ledger = space._own_state, space._ledger  # noqa: SLF001
        self._receipts, self._explanations = space._receipts, space._explanations  # noqa: SLF001

    @property
    def _state(self) -> SpaceState:
        return self._own_state

    def misses(self, hit: PrefixHit) -> tuple[Miss, ...]:
        """Return why the tokens of a prompt do not hit, in runs of equal cause. O(tokens).

        Only the latest continuation of the hit is compared (:meth:`BlockSpace.explanation
        <pagedkv.BlockSpace.explanation>`).

        Args:
            hit: what the prompt hits now.
        """
        return explain_misses(self._state, hit)
