"""Observations of a replay's block space: the history of blocks, and why each admitted prompt missed."""

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.miss_causes import Miss
from pagedkv.memory.space import InFlightStep, ObservedSpace, PrefixHit, SpaceObserver
from pagedkv.planner.simulation.meters.block_history import BlockHistory

__all__ = ["SpaceWatch"]


class SpaceWatch(SpaceObserver):
    """Follows a space that records events, and notes when its blocks are released, hit and evicted.

    Attributes:
        history: when each block was last released.
        now_s: the virtual time.
    """

    def __init__(self) -> None:
        """Begin with nothing: :meth:`begin` follows."""
        self.now_s = 0.0
        self._misses: list[tuple[Miss, ...]] = []
        self._leaving: dict[str, list[Int32Array]] = {}

    def begin(self, space: ObservedSpace) -> None:
        """Begin to follow a space."""
        self._space = space
        self.history = BlockHistory(space, space.config.groups)

    def take_misses(self) -> list[tuple[Miss, ...]]:
        """Give the misses of each prompt allocated since the last call, with their causes, in order."""
        misses, self._misses = self._misses, []
        return misses

    # Moments

    def admitting(self, row: int, hit: PrefixHit) -> None:  # noqa: ARG002 - a moment's
        """Note why no more of a prompt hits, before anything is evicted for it."""
        self._misses.append(self._space.misses(hit))

    def admitted(self, row: int, hit: PrefixHit, num_reached: int) -> None:  # noqa: ARG002 - a moment's
        """Note the hits of a prompt, and what its new blocks evicted."""
        self.history.admitted(row, hit.num_tokens, hit.tails, self.now_s)

    def grown(self, batch: Int32Array) -> None:  # noqa: ARG002 - a moment's
        """Note the evictions for new blocks."""
        self.history.note_events(self.now_s)

    def returned(self, batch: Int32Array) -> None:  # noqa: ARG002 - a moment's
        """Note the evictions for new blocks."""
        self.history.note_events(self.now_s)

    def leaving(self, batch: Int32Array) -> None:
        """Remember the blocks of some rows."""
        self._leaving = self.history.blocks_of(batch.tolist())

    def freed(self, batch: Int32Array) -> None:  # noqa: ARG002 - a moment's
        """Note which of their blocks are unused now."""
        self.history.released(self._leaving, self.now_s)

    def swapped_out(self, batch: Int32Array) -> None:  # noqa: ARG002 - a moment's
        """Note which of their blocks on the device are unused now."""
        self.history.released(self._leaving, self.now_s)

    def acknowledging(self, step: InFlightStep) -> None:
        """Remember the blocks that windows may leave behind."""
        self.history.before_acknowledge(step.plan)

    def acknowledged(self, step: InFlightStep) -> None:  # noqa: ARG002 - a moment's
        """Note which of them are unused now."""
        self.history.after_acknowledge(self.now_s)

    def advanced(self, now_s: float) -> None:
        """Set the time for all further notes."""
        self.now_s = now_s
