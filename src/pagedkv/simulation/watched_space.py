"""A block space that is watched: the block history learns of every operation that stores, evicts, hits or gives up."""

from typing import Literal

import numpy.typing as npt

from pagedkv.answers import Allocation, Shortage
from pagedkv.arguments import Rows, as_batch
from pagedkv.explanation import Miss
from pagedkv.keys import NO_KEYS, RequestKeys
from pagedkv.plan import BlockMoves, StepPlan
from pagedkv.simulation.meters.block_history import BlockHistory
from pagedkv.space import BlockSpace, PrefixHit, Receipt
from pagedkv.space.explaining import tell_misses
from pagedkv.spec import SpaceConfig, StepId, TokenIds

__all__ = ["WatchedSpace"]


class WatchedSpace(BlockSpace):
    """Does what a block space does, and tells a history.

    Args:
        config: of the space, with events on.

    Attributes:
        history: when each block was last given up.
        now_s: the virtual time.
    """

    def __init__(self, config: SpaceConfig) -> None:
        super().__init__(config)
        self.history = BlockHistory(self, config.groups)
        self.now_s = 0.0
        self._plans: dict[StepId, StepPlan] = {}
        self._misses: list[tuple[Miss, ...]] = []

    def take_misses(self) -> list[tuple[Miss, ...]]:
        """Tell of each prompt that was allocated since the last call what did not hit, and why; in their order."""
        misses, self._misses = self._misses, []
        return misses

    def allocate(  # noqa: PLR0913 - what the inherited one takes
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        num_lookahead: int = 0,
        num_draft: int = 0,
        num_sequences: int = 1,
        num_external_tokens: int = 0,
        match: PrefixHit | None = None,
        prompt: TokenIds | None = None,
        continues: Receipt | None = None,
        publish: bool | Literal["prompt"] = True,
        tenant: str | None = None,
    ) -> Allocation | Shortage:
        """Allocate, and note the hits, why no more hit, and what the new blocks evicted."""
        answer = self.match(token_ids, keys=keys, digests=digests) if match is None else match
        misses = tell_misses(self._state, answer)
        allocation = super().allocate(
            token_ids,
            keys=keys,
            digests=digests,
            num_lookahead=num_lookahead,
            num_draft=num_draft,
            num_sequences=num_sequences,
            num_external_tokens=num_external_tokens,
            match=match,
            prompt=prompt,
            continues=continues,
            publish=publish,
            tenant=tenant,
        )
        if isinstance(allocation, Allocation):
            self._misses.append(misses)
            tails = match.tails if match is not None and match.num_tokens == allocation.num_hit_tokens else ()
            self.history.admitted(allocation.row, allocation.num_hit_tokens, tails, self.now_s)
        return allocation

    def append(
        self,
        rows: Rows,
        token_ids: TokenIds | None,
        counts: npt.ArrayLike | None = None,
        *,
        num_lookahead: int = 0,
        num_draft: int | npt.ArrayLike = 0,
    ) -> Shortage | None:
        """Append, and note what the new blocks evicted."""
        shortage = super().append(rows, token_ids, counts, num_lookahead=num_lookahead, num_draft=num_draft)
        self.history.note_events(self.now_s)
        return shortage

    def advance(self, now_s: float) -> None:
        """Tell the time, which whatever happens from now on is noted with."""
        super().advance(now_s)
        self.now_s = now_s

    def free(
        self,
        rows: Rows,
        *,
        num_generated: npt.ArrayLike | None = None,
        superseded_by: int | None = None,
        keep_until_s: float | None = None,
        priority: int = 0,
    ) -> tuple[Receipt, ...]:
        """Free, and note which blocks nobody uses any more."""
        with self.history.releasing(as_batch(rows).tolist(), self.now_s):
            return super().free(
                rows,
                num_generated=num_generated,
                superseded_by=superseded_by,
                keep_until_s=keep_until_s,
                priority=priority,
            )

    def swap_out(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Swap out, and note which blocks nobody uses any more."""
        with self.history.releasing(as_batch(rows).tolist(), self.now_s):
            return super().swap_out(rows)

    def swap_in(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Swap in, and note what the new blocks evicted."""
        moves = super().swap_in(rows)
        self.history.note_events(self.now_s)
        return moves

    def plan_step(self) -> StepPlan:
        """Plan the step, and remember it until it is acknowledged."""
        plan = super().plan_step()
        self._plans[plan.step_id] = plan
        return plan

    def acknowledge(self, step_id: StepId) -> None:
        """Acknowledge, and note which blocks the windows left behind."""
        self.history.before_acknowledge(self._plans.pop(step_id))
        super().acknowledge(step_id)
        self.history.after_acknowledge(self.now_s)
