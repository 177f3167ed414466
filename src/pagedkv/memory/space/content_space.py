"""What is done with content, whoever's it is: found, held, brought from elsewhere, withdrawn, forgotten; and the time.

The part of :class:`~pagedkv.BlockSpace` that names blocks and prefixes, and no sequences.
"""

import numpy.typing as npt

from pagedkv.memory.contract.answers import InvalidatedMemory, Load, Shortage, Ticket, Withdrawal
from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.contract.errors import ConfigurationError, TokenError
from pagedkv.memory.contract.keys import NO_KEYS, RequestKeys
from pagedkv.memory.contract.miss_causes import Explanation
from pagedkv.memory.contract.spec import TokenIds
from pagedkv.memory.space import clock, holding, invalidating, loading, miss_analysis, releasing, withdrawing
from pagedkv.memory.space.epochs import as_epochs, as_next_epoch, begin_epoch
from pagedkv.memory.space.forgetting import forget
from pagedkv.memory.space.hits import PrefixHit
from pagedkv.memory.space.leasing import as_end, lease_hit
from pagedkv.memory.space.matching import match_prompt
from pagedkv.memory.space.observed_space import ObservedSpace
from pagedkv.memory.space.observer import SpaceObserver
from pagedkv.memory.space.prompts import prepare_prompt
from pagedkv.memory.space.space_view import SpaceView
from pagedkv.memory.space.tenants import as_tenant

__all__ = ["ContentSpace"]


class ContentSpace(SpaceView):
    """Operations on the content of blocks."""

    # Finding

    def observe(self, observer: SpaceObserver) -> None:
        """Let an observer follow every operation from now on, after those that were given before it. O(1).

        It is called in the middle of operations, and gets a view of this space that answers then
        (:class:`~pagedkv.memory.space.SpaceObserver`). Changes nothing else.

        Raises:
            ConfigurationError: it is no observer.
        """
        if not isinstance(observer, SpaceObserver):
            raise ConfigurationError(f"an observer is a SpaceObserver, got {observer!r}")
        observer.begin(ObservedSpace(self))
        self._state.observers += (observer,)

    def match(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        max_hit_tokens: int | None = None,
        max_replay_tokens: int = 0,
    ) -> PrefixHit:
        """Tell how many leading tokens are cached, in which blocks. Changes nothing. O(blocks of the prompt).

        :meth:`can_allocate` and :meth:`allocate` take the answer as ``match=``, so that a prompt is walked once. It
        refers to ``token_ids``: leave them as they are until then.

        Args:
            token_ids, keys, digests: as in :meth:`allocate`.
            max_hit_tokens: most tokens that may hit; 0 declines any hit, as for a prompt whose every logit is wanted.
                Whoever is handed the answer hits no more than that, also when it has to ask again. None: no bound.

            max_replay_tokens: most tokens that the step may compute again in windows alone, so that the hit can end
                where full attention has the prompt and they have not (:class:`~pagedkv.Replay`); taken where it saves
                more than it costs. All of them are computed in the step that is open, beside the first token behind the
                hit. 0: none. Without effect where no group asks for replay.

        Raises:
            ConfigurationError: ``max_hit_tokens`` or ``max_replay_tokens`` is negative or no integer; see also
                :meth:`allocate`.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, digests, 0)
        if type(max_replay_tokens) is not int or max_replay_tokens:  # a plain 0 is not asked about
            prompt = prompt._replace(max_replay_tokens=as_count(max_replay_tokens, "max_replay_tokens"))
        if max_hit_tokens is not None:
            prompt = prompt._replace(max_hit_tokens=as_count(max_hit_tokens, "max_hit_tokens"))
        hit = match_prompt(self._state, prompt)
        if self._state.loads:
            hit.loading = loading.load_that_continues(self._state, prompt, hit)
        return hit

    def explain(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        max_hit_tokens: int | None = None,
    ) -> Explanation:
        """Tell how many leading tokens hit, as :meth:`match` does, and why no more do. Changes nothing.

        It is exact for what is cached. Of what is gone, ``SpaceConfig.explain`` has the pool remember the latest;
        without it, or beyond, the answer is ``UNKNOWN``.

        Args:
            token_ids, keys, digests, max_hit_tokens: as in :meth:`match`.

        Raises: as :meth:`match`.

        Cost: O(blocks of the pool + tokens), about 3 ns a block and 0.1 us a block of the prompt that does not hit:
        what a request recorded when it was admitted is cheaper (:meth:`explanation`).
        """
        hit = self.match(token_ids, keys=keys, digests=digests, max_hit_tokens=max_hit_tokens)
        return miss_analysis.explain(self._state, hit.prompt, hit)

    # Time

    def advance(self, now_s: float) -> None:
        """Set the clock, by which leases end and eviction policies measure ages: the caller's seconds.

        It stands still in between, and need not pass as any clock does. Without it policies count blocks instead.
        O(log leased blocks) for each block whose lease has ended.

        Args:
            now_s: seconds since any moment, the same for all calls, at least 0.

        Raises:
            ConfigurationError: it goes back, or is no number of seconds; nothing is changed.
        """
        time = clock.as_time(self._state, now_s)
        self._state.version += 1
        clock.advance(self._state, time)

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

    # Content that is to stay

    def lease(self, token_ids: TokenIds, until_s: float, *, keys: RequestKeys = NO_KEYS) -> int:
        """Keep what is cached of a prompt until a time: it is evicted when nothing else is left.

        A lease is soft. Leased blocks count as free, and are handed out rather than that anybody waits: those first
        whose lease ends last. A later end counts where there are several; :meth:`forget`, a reset or new weights end
        all. What a row leaves when it ends is leased by ``free(rows, keep_until_s=...)``.

        Args:
            token_ids: a prompt; its last token is left out, as of a hit.
            until_s: seconds of the clock that :meth:`advance` sets.
            keys: its extra keys.

        Returns how many leading tokens are kept.

        Raises:
            ConfigurationError: the end is past, or never; the space keeps no leases.

        Cost: O(blocks of the prompt).
        """
        end = as_end(self._state, until_s)
        hit = match_prompt(self._state, prepare_prompt(self._state, token_ids, keys, None, 0))
        self._state.version += 1
        lease_hit(self._state, hit, end)
        return hit.num_tokens

    def forget(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS, start: int = 0) -> int:
        """Make a prompt, and all that continues it, unfindable: it is not to be asked for again, or must not be.

        On the device and on the host. Rows that hold any of it run on, and publish nothing any more; but not rows that
        hold it as drafts, or as tokens filled in for a step in flight: those publish it once it is accepted. Content is
        found by its name: where an engine brought digests that were not the prompt's, it keeps that other name.

        Args:
            token_ids, keys: the prompt; ``start``: first position to be forgotten. A block that reaches beyond it is
                forgotten whole: what several branches share before stays.

        Returns how many blocks lost their names.

        Cost: O(blocks + blocks of all rows), milliseconds where there are thousands.
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
        """Reserve blocks for a prefix that is brought from elsewhere: another tier, another machine.

        A load takes no row and is no part of a step. Until :meth:`finish_load` nobody hits what it brings;
        :attr:`PrefixHit.loading` tells who would wait for it. What is cached already is held for it, and not brought.

        Args:
            token_ids: a prompt.
            num_tokens: how much of it can be brought; cut down to where hits can end.
            keys: its extra keys.
            epochs: the oldest and the newest epoch of the weights that contributed to what is brought, where epochs are
                counted; None: those in force.
            tenant: whom its blocks are charged to (:meth:`allocate`).

        Returns the load; a shortage, with nothing changed; or None where nothing is to be brought.

        Raises:
            ConfigurationError: the space has no prefix caching; ``epochs`` that have not begun, or lie too far back to
                be hit; no such tenant.
            TokenError: the prompt has fewer tokens; see also :meth:`allocate`.

        Cost: O(blocks), 0.1 us each and 0.08 us for its digest.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        most = as_count(num_tokens, "num_tokens")
        brought = as_epochs(self._state, epochs)
        payer = as_tenant(self._state, tenant)
        self._state.version += 1
        return loading.load(self._state, self._ledger, prompt, most, brought, payer)

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

    def set_weights_epoch(self, weights_epoch: str | int) -> None:
        """Start a new epoch of the model's weights: plans made from now on compute with them. Rows run on.

        Where epochs are text, the cache is reset, and new blocks carry the epoch in their identity. Where they are
        numbers, blocks remember the oldest and the newest epoch that contributed to them, the tokens before them
        included. What is older than ``max_epoch_lag`` allows is dropped from the cache, and rows that hold any of it
        publish nothing any more; all else can be hit as before, and :meth:`epochs` tells what a row holds.

        Args:
            weights_epoch: text, or a number not below the one in force, as the configuration began.

        Raises:
            ConfigurationError: an epoch that goes back, or text for a number or a number for text; nothing is changed.

        Cost: O(blocks + rows).
        """
        state = self._state
        if state.config.counts_epochs:
            epoch = as_next_epoch(state, weights_epoch)
            state.version += 1
            begin_epoch(state, epoch)
            return
        if not isinstance(weights_epoch, str):
            raise ConfigurationError(
                f"weights_epoch must be text, got {weights_epoch!r}; where SpaceConfig(weights_epoch=0) begins with a "
                "number, epochs are counted"
            )
        state.version += 1
        releasing.reset_prefix_cache(state, self._ledger, weights_epoch)
