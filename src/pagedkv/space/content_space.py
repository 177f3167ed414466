"""Operations on content: find, hold, forget, load and withdraw it; reset the cache; set the clock.

This is the part of :class:`~pagedkv.BlockSpace` that takes blocks and prefixes, not sequences.
"""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

import numpy.typing as npt

from pagedkv.contract.answers import InvalidatedMemory, Load, Shortage, Ticket, Withdrawal
from pagedkv.contract.arguments import as_count
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space import clock, holding, invalidating, loading, releasing, withdrawing
from pagedkv.space.forgetting import forget
from pagedkv.space.hits import PrefixHit
from pagedkv.space.matching import match_prompt
from pagedkv.space.observed_space import ObservedSpace
from pagedkv.space.observer import SpaceObserver
from pagedkv.space.prompts import prepare_prompt
from pagedkv.space.space_view import SpaceView

__all__ = ["ContentSpace"]


class ContentSpace(SpaceView):
    """Operations on the content of blocks."""

    # Finding

    def observe(self, observer: SpaceObserver) -> None:
        """Let an observer follow every operation from now on; it is called after the observers given before. O(1).

        It is called in the middle of operations. It gets a view of this space that can be queried then too
        (:class:`~pagedkv.space.SpaceObserver`). Changes nothing else.

        Raises:
            ConfigurationError: ``observer`` is no SpaceObserver.
        """
        if not isinstance(observer, SpaceObserver):
            raise ConfigurationError(f"an observer is a SpaceObserver, got {observer!r}")
        observer.begin(ObservedSpace(self))
        self._state.observers.add(observer)

    def match(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        max_hit_tokens: int | None = None,
        max_replay_tokens: int = 0,
    ) -> PrefixHit:
        """Return how many leading tokens are cached, and in which blocks. Changes nothing. O(blocks of the prompt).

        :meth:`can_allocate` and :meth:`allocate` take the answer as ``match=``, so that a prompt is matched once. The
        answer refers to ``token_ids``: do not change them until then.

        Args:
            token_ids, keys, digests: as in :meth:`allocate`.
            max_hit_tokens: most tokens that may hit; 0 declines any hit, for a prompt whose logits are all needed. The
                bound also holds in ``can_allocate`` and ``allocate``, even if they have to match again. None: no bound.
            max_replay_tokens: most tokens that the open step may compute again in window groups alone, so that the hit
                can reach further: to where full attention still has the prompt but the windows do not
                (:class:`~pagedkv.Replay`). Used where it saves more than it costs. All of them are computed in the open
                step, together with the first token behind the hit. 0: none. No effect if no group is configured for
                replay.

        Raises:
            ConfigurationError: ``max_hit_tokens`` or ``max_replay_tokens`` is negative or no integer; see also
                :meth:`allocate`.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, digests, 0)
        if type(max_replay_tokens) is not int or max_replay_tokens:  # a plain 0 needs no check
            prompt = prompt._replace(max_replay_tokens=as_count(max_replay_tokens, "max_replay_tokens"))
        if max_hit_tokens is not None:
            prompt = prompt._replace(max_hit_tokens=as_count(max_hit_tokens, "max_hit_tokens"))
        hit = match_prompt(self._state, prompt)
        if self._state.loads:
            hit.loading = loading.load_that_continues(self._state, prompt, hit)
        return hit

    # Time

    def advance(self, now_s: float) -> None:
        """Set the clock by which leases end and eviction policies measure ages, in the caller's seconds.

        The clock stands still between calls, and may run at any rate. If it is never set, policies count blocks
        instead. O(log leased blocks) for each block whose lease has ended.

        Args:
            now_s: seconds, at least 0, since a moment that is the same for all calls.

        Raises:
            ConfigurationError: the time goes back, or is no number of seconds; nothing is changed.
        """
        time = clock.as_time(self._state, now_s)
        self._state.version += 1
        clock.advance(self._state, time)

    # External readers

    def hold(self, block_ids: npt.ArrayLike, pool: str | None = None) -> Ticket:
        """Keep blocks for an external reader, such as a tier or a sender, until :meth:`release`.

        The blocks stay cached and keep their content. A ticket counts like one more sequence that shares the blocks:
        they are neither free nor evicted, the next write into one copies it, and :meth:`truncate` into one raises
        SharedPrefixError. Their rows may be freed or swapped out meanwhile. What steps in flight compute, copy or swap
        into a block is there once they have run; if one is aborted, :class:`~pagedkv.AbortedSteps` lists the ticket.
        Resetting the cache takes the blocks out of the prefix index and leaves their content.

        Args:
            block_ids: blocks with content, repeats allowed: blocks of a row that a plan computes, blocks of a
                :class:`~pagedkv.PrefixHit`, and freed blocks that are cached or deferred. Reserved slots have no
                content.
            pool: name of their device pool; the first group's when None.

        Raises:
            BlockError: the null block, a foreign id, a free block without content, or a block that the open step
                computes, copies or swaps something into; nothing is changed.

        Cost: O(blocks).
        """
        owner = self._pool(pool)
        self._state.version += 1
        return holding.hold(self._state, self._ledger, owner, block_ids)

    def release(self, ticket: Ticket) -> None:
        """Release what a ticket holds; tickets may be released in any order. O(blocks).

        Raises:
            BlockError: the ticket was released before, or is not of this space; nothing is changed.
        """
        self._state.version += 1
        holding.release(self._state, ticket)

    # Keeping and dropping content

    def supersede(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS) -> None:
        """Evict the cached blocks of a prompt that nothing else refers to before all other cached blocks.

        For a sequence that was freed before the one that replaces it was admitted; else pass ``superseded_by`` to
        ``free``. Blocks that a row or a ticket holds, and leased blocks, stay as they are. Until they are evicted, the
        others can be hit as before.

        Args:
            token_ids: a prompt; its last token does not count, as for a hit.
            keys: its extra keys.

        Cost: O(blocks of the prompt).
        """
        hit = match_prompt(self._state, prepare_prompt(self._state, token_ids, keys, None, 0))
        self._state.version += 1
        releasing.supersede(self._state, hit)

    def forget(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS, start: int = 0) -> int:
        """Drop a prompt, and all that continues it, from the prefix cache, on the device and on the host.

        Rows that hold any of it run on, but publish nothing from now on. Rows that hold it as drafts, or as tokens
        filled in for a step in flight, still publish it once it is accepted. Content is found by its digest: content
        that was allocated with ``digests`` other than the prompt's own stays cached under those.

        Args:
            token_ids, keys: the prompt; ``start``: first position to be forgotten. The block that contains it is
                forgotten whole; the blocks before it, which other branches may share, stay.

        Returns how many blocks were removed from the prefix index.

        Cost: O(blocks + blocks of all rows), milliseconds for thousands of blocks.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        first = as_count(start, "start")
        self._state.version += 1
        return forget(self._state, prompt, first)

    # Content from elsewhere

    def load(
        self,
        token_ids: TokenIds,
        num_tokens: int,
        *,
        keys: RequestKeys = NO_KEYS,
        epochs: tuple[int, int] | None = None,
        tenant: str | None = None,
    ) -> Load | Shortage | None:
        """Reserve blocks for a prefix whose KV is brought from elsewhere: another tier, another machine.

        A load takes no row and is no part of a step. Its blocks cannot be hit until :meth:`finish_load`; a match of a
        prompt that would continue into them has :attr:`PrefixHit.loading` set. What is cached already is held for the
        load, and is not brought again.

        Args:
            token_ids: a prompt.
            num_tokens: how many of its tokens can be brought; rounded down to where hits can end.
            keys: its extra keys.
            epochs: the oldest and the newest weights epoch that contributed to what is brought, if epochs are counted;
                None: the current one.
            tenant: the tenant that is charged for its blocks (:meth:`allocate`).

        Returns the load; a shortage, with nothing changed; or None if there is nothing to bring.

        Raises:
            ConfigurationError: the space has no prefix caching; ``epochs`` that have not begun, or are too old to be
                hit; no such tenant.
            TokenError: the prompt has fewer tokens; see also :meth:`allocate`.

        Cost: O(blocks), 0.1 us each and 0.08 us for its digest.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        most = as_count(num_tokens, "num_tokens")
        if epochs is not None and not self._state.config.counts_epochs:
            raise ConfigurationError(f"epochs = {epochs!r}, but they are not counted: SpaceConfig(weights_epoch=0)")
        for feature in self._state.features:
            feature.require_epochs(epochs)
        charged = self._state.room.number_of(tenant)
        self._state.version += 1
        return loading.load(self._state, self._ledger, prompt, most, epochs, charged)

    def finish_load(self, load: Load, num_tokens: int | None = None) -> None:
        """End a load; loads may end in any order. What it brought can be hit, and is cached.

        Args:
            load: what :meth:`load` returned.
            num_tokens: leading tokens of the prompt that have arrived; blocks behind them are freed without content.
                None: all tokens of the load; 0: it failed.

        Raises:
            BlockError: it was finished before, or is no load of this space.
            TokenError: more tokens than the load was for. Nothing is changed.
        """
        most = None if num_tokens is None else as_count(num_tokens, "num_tokens", error=TokenError)
        self._state.version += 1
        loading.finish_load(self._state, load, most)

    def withdraw(self, block_ids: npt.ArrayLike, *, pool: str | None = None) -> Withdrawal:
        """Declare that computed or loaded content is bad: it, and what continues it, is not hit from now on.

        Rows that rely on it are lost, from the first bad position on. Steps in flight go on, and what they compute for
        these rows is bad as well; the caller must discard tokens that were sampled from it. Content that cannot be
        proved sound leaves the cache too: all blocks of a group with another block size, or of a group without a
        full-attention group beside it. In the latter case all rows are lost as well, since it is not recorded which
        rows have read a block that left the window.

        Args:
            block_ids: the blocks whose content is bad now.
            pool: name of their device pool; the first group's when None.

        Raises:
            BlockError: the null block or a foreign id; nothing is changed.

        Cost: O(blocks + blocks of all rows), milliseconds for thousands of blocks.
        """
        owner = self._pool(pool)
        bad = holding.as_block_ids(owner, block_ids)
        self._state.version += 1
        return withdrawing.withdraw(self._state, owner, bad)

    # The prefix cache as a whole

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Sequences keep their own blocks, but publish nothing from now on."""
        self._state.version += 1
        releasing.reset_prefix_cache(self._state, self._ledger)

    def invalidate_memory(self) -> InvalidatedMemory:
        """Note that the engine has released its device memory: running rows are lost, the device cache is emptied.

        Swapped-out sequences, and cached blocks on the host, stay as they are.

        Raises:
            StepError: steps are in flight, or the open plan copies or swaps blocks; nothing is changed.

        Cost: O(blocks + rows).
        """
        self._state.version += 1
        return invalidating.invalidate_memory(self._state, self._ledger)
