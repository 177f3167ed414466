"""What is done with content, whoever's it is: held, brought from elsewhere, withdrawn, forgotten; and the time.

The part of :class:`~pagedkv.BlockSpace` that names blocks and prefixes, and no sequences.
"""

from numbers import Real
from typing import Final

import numpy.typing as npt

from pagedkv.answers import InvalidatedMemory, Load, Shortage, Ticket, Withdrawal
from pagedkv.arguments import as_count
from pagedkv.errors import ConfigurationError, StepError, TokenError
from pagedkv.keys import NO_KEYS, RequestKeys
from pagedkv.space import holding, invalidating, loading, releasing, withdrawing
from pagedkv.space.matching import prepare_prompt
from pagedkv.space.space_view import SpaceView
from pagedkv.spec import TokenIds

__all__ = ["ContentSpace"]

LATEST_S: Final = 2.0**40  # so that microseconds fit in 64 bits


class ContentSpace(SpaceView):
    """Operations on the content of blocks."""

    # Time

    def advance(self, now_s: float) -> None:
        """Tell the time, for eviction policies that look at ages. O(pools). Without it they count blocks instead.

        Args:
            now_s: seconds since any moment, the same for all calls; they need not pass as on any clock.

        Raises:
            StepError: it goes back, or is no number of seconds; nothing is changed.
        """
        state = self._state
        if not isinstance(now_s, Real) or not abs(now_s) <= LATEST_S:
            raise StepError(f"the time is a number of seconds, at most {LATEST_S:.0f} either way, got {now_s!r}")
        if now_s < state.now_s:
            raise StepError(f"the clock cannot go back from {state.now_s} s to {now_s} s")
        state.is_changing = True
        state.now_s = float(now_s)
        for pool in state.pools.values():
            pool.advance(state.now_s)
        state.is_changing = False

    # Readers outside

    def hold(self, block_ids: npt.ArrayLike, pool: str | None = None) -> Ticket:
        """Keep blocks for a reader outside, a tier or a sender, until :meth:`release`: name and content stay.

        Whoever holds a block counts as one more sequence that shares it: it is neither evicted nor free, the next write
        into it copies it, and :meth:`truncate` into it raises SharedPrefixError. Rows may be freed and swapped out
        meanwhile. What steps in flight compute, copy or swap into a block is there once they have run; if one is
        aborted, :class:`~pagedkv.AbortedSteps` names the ticket. Resetting the cache takes the names, not the content.

        Args:
            block_ids: blocks with content, each as often as one likes: those of a row that a plan computes, those of a
                :class:`~pagedkv.PrefixHit`, freed ones that are cached or deferred. Slots only reserved have none.
            pool: name of their device pool; the first group's when None.

        Raises:
            BlockError: the null block, a foreign id, a free block without content, or one that the open step is to
                compute, or to copy or swap something into; nothing is changed.

        Cost: O(blocks).
        """
        owner = self._pool(pool)
        self._state.version += 1
        return holding.hold(self._state, self._ledger, owner, block_ids)

    def release(self, ticket: Ticket) -> None:
        """Give back what a ticket holds; tickets come back in any order. O(blocks).

        Raises:
            BlockError: it was released before, or is no ticket of this space; nothing is changed.
        """
        self._state.version += 1
        holding.release(self._state, ticket)

    # Content from elsewhere

    def load(
        self,
        token_ids: TokenIds,
        num_tokens: int,
        *,
        keys: RequestKeys = NO_KEYS,
    ) -> Load | Shortage | None:
        """Reserve blocks for a prefix that is brought from elsewhere: another tier, another machine.

        A load takes no row and is no part of a step. Until :meth:`finish_load` nobody hits what it brings;
        :attr:`PrefixHit.loading` tells who would wait for it. What is cached already is held for it, and not brought.

        Args:
            token_ids: a prompt.
            num_tokens: how much of it can be brought; cut down to where hits can end.
            keys: its extra keys.

        Returns the load; a shortage, with nothing changed; or None where nothing is to be brought.

        Raises:
            ConfigurationError: the space has no prefix caching.
            TokenError: the prompt has fewer tokens; see also :meth:`allocate`.

        Cost: O(blocks), 0.1 us each and 0.08 us for its digest.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        most = as_count(num_tokens, "num_tokens")
        self._state.version += 1
        return loading.load(self._state, self._ledger, prompt, most)

    def finish_load(self, load: Load, num_tokens: int | None = None) -> None:
        """End a load, in any order: what it brought can be hit, and is cached until somebody does.

        Args:
            load: what :meth:`load` returned.
            num_tokens: leading tokens of the prompt that are there; what is behind is given back empty. None: all that
                it was to bring; 0: it failed.

        Raises:
            BlockError: it was finished before, or is no load of this space.
            TokenError: more tokens than it was to bring. Nothing is changed.
        """
        most = None if num_tokens is None else as_count(num_tokens, "num_tokens", error=TokenError)
        self._state.version += 1
        loading.finish_load(self._state, load, most)

    def withdraw(self, block_ids: npt.ArrayLike, *, pool: str | None = None) -> Withdrawal:
        """Declare content bad that was computed or brought: nobody hits it, or what continues it, from now on.

        Rows that rely on it are lost, from the first position that is bad. Steps in flight go on, and what they compute
        for these rows is bad as well; tokens that were sampled from it are the caller's to discard. Of what cannot be
        shown to be sound, the names are dropped too: all of a group of another block size, or without a full-attention
        group beside it (then all rows are lost as well: who has read a block that left the window is not known).

        Args:
            block_ids: the blocks whose content is bad, now.
            pool: name of their device pool; the first group's when None.

        Raises:
            BlockError: the null block or a foreign id; nothing is changed.

        Cost: O(blocks + blocks of all rows), milliseconds where there are thousands.
        """
        owner = self._pool(pool)
        bad = holding.as_block_ids(owner, block_ids)
        self._state.version += 1
        return withdrawing.withdraw(self._state, owner, bad)

    # The prefix cache as a whole

    def reset_prefix_cache(self) -> None:
        """Make everything cached unfindable; sequences keep their own blocks, and publish nothing any more."""
        self._state.version += 1
        releasing.reset_prefix_cache(self._state, self._ledger)

    def invalidate_memory(self) -> InvalidatedMemory:
        """The engine gives its device memory back: nothing on the device can be found, and rows that run are lost.

        Sequences that are swapped out, and what can be found on the host, stay as they are.

        Raises:
            StepError: steps are in flight, or the open plan copies or swaps blocks; nothing is changed.

        Cost: O(blocks + rows).
        """
        self._state.version += 1
        return invalidating.invalidate_memory(self._state, self._ledger)

    def set_weights_epoch(self, weights_epoch: str) -> None:
        """Start a new epoch of the model's weights: reset the cache; new blocks carry the epoch in their identity."""
        if not isinstance(weights_epoch, str):
            raise ConfigurationError(f"weights_epoch must be text, got {weights_epoch!r}")
        self._state.version += 1
        releasing.reset_prefix_cache(self._state, self._ledger, weights_epoch)
