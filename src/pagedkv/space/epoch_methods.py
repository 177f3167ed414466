"""The public methods on epochs of the model's weights."""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from pagedkv.contract.answers import EpochSpan
from pagedkv.errors import ConfigurationError
from pagedkv.space.epochs import EpochFeature, as_next_epoch
from pagedkv.space.releasing import reset_prefix_cache
from pagedkv.space.space_view import SpaceView

__all__ = ["EpochMethods"]


class EpochMethods(SpaceView):
    """The part of a block space that begins epochs, and returns those of a row."""

    @property
    def _epochs(self) -> EpochFeature:
        """The feature; there is one where epochs are counted."""
        return next(feature for feature in self._state.features if isinstance(feature, EpochFeature))

    def epochs(self, row: int) -> tuple[EpochSpan, ...]:
        """Return which weights computed what a row holds, from its first position to the last planned one.

        Each span gives the range of epochs that contributed to the content of any group there. Where all windows have
        moved on, it is the range of what is left. Steps planned before an epoch began compute with the weights before.
        Groups outside prefix caching are left out: a row computes all of their content itself.

        Raises:
            ConfigurationError: epochs are not counted (:attr:`SpaceConfig.weights_epoch <pagedkv.SpaceConfig>`).

        Cost: O(tokens x groups).
        """
        known = self._occupied(row)
        if not self.config.counts_epochs:
            raise ConfigurationError("epochs are not counted: begin with a number, SpaceConfig(weights_epoch=0)")
        return self._epochs.spans_of(known)

    def set_weights_epoch(self, weights_epoch: str | int) -> None:
        """Start a new epoch of the model's weights: plans made from now on compute with them. Rows run on.

        With text epochs the cache is reset, and new blocks carry the epoch in their identity. With numbers, each block
        records the oldest and the newest epoch that computed any of it or of the tokens before it. Blocks older
        than ``max_epoch_lag`` allows leave the cache, and rows that hold any of them publish nothing from now on. All
        else can be hit as before, and :meth:`epochs` returns the epochs of what a row holds.

        Args:
            weights_epoch: text or a number, of the same type as in the configuration; a number not below the current.

        Raises:
            ConfigurationError: an epoch that goes back, or text for a number or a number for text; nothing is changed.

        Cost: O(blocks + rows).
        """
        state = self._state
        if state.config.counts_epochs:
            epoch = as_next_epoch(state, weights_epoch)
            state.version += 1
            self._epochs.begin(epoch)
            return
        if not isinstance(weights_epoch, str):
            raise ConfigurationError(
                f"weights_epoch must be text, got {weights_epoch!r}; where SpaceConfig(weights_epoch=0) begins with a "
                "number, epochs are counted"
            )
        state.version += 1
        reset_prefix_cache(state, self._ledger, weights_epoch)
