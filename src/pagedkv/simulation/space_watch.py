"""SpaceWatch: records the history of a replay's blocks, and the causes of each admitted prompt's misses."""

from pagedkv.contract.answers import Load
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.miss_causes import Miss
from pagedkv.simulation.meters.block_history import BlockHistory
from pagedkv.space import InFlightStep, ObservedSpace, PrefixHit, SpaceObserver

__all__ = ["SpaceWatch"]


class SpaceWatch(SpaceObserver):
    """Observes a space that records events, and records releases, hits and evictions of its blocks.

    Attributes:
        history: the last release of each block.
        now_s: the virtual time.
    """

    def __init__(self) -> None:
        """Start empty; :meth:`begin` follows."""
        self.now_s = 0.0
        self._misses: list[tuple[Miss, ...]] = []
        self._leaving: dict[str, list[Int32Array]] = {}
        self._loads: dict[Load, dict[str, list[Int32Array]]] = {}

    def begin(self, space: ObservedSpace) -> None:
        """Start to observe a space."""
        self._space = space
        self.history = BlockHistory(space, space.config.groups)

    def take_misses(self) -> list[tuple[Miss, ...]]:
        """Return the misses of each prompt allocated since the last call, with their causes, in order."""
        misses, self._misses = self._misses, []
        return misses

    # Events of the space

    def admitting(self, row: int, hit: PrefixHit) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the end of a prompt's hit and its cause, before blocks are evicted for the prompt."""
        self._misses.append(self._space.misses(hit))

    def admitted(self, row: int, hit: PrefixHit, num_reached: int) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the hits of a prompt, and the evictions for its new blocks."""
        self.history.admitted(row, hit.num_tokens, hit.tails, self.now_s)

    def grown(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the evictions for new blocks."""
        self.history.note_events(self.now_s)

    def returned(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record the evictions for new blocks."""
        self.history.note_events(self.now_s)

    def leaving(self, batch: Int32Array) -> None:
        """Remember the blocks of some rows."""
        self._leaving = self.history.blocks_of(batch.tolist())

    def freed(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record which of their blocks are no longer referenced."""
        self.history.released(self._leaving, self.now_s)

    def swapped_out(self, batch: Int32Array) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record which of their blocks on the device are no longer referenced."""
        self.history.released(self._leaving, self.now_s)

    def load_begun(self, load: Load, hit: PrefixHit) -> None:
        """Remember the blocks of a load, and record the evictions for its new ones."""
        self._loads[load] = self.history.blocks_of_load(hit.block_ids, load.block_ids)
        self.history.note_events(self.now_s)

    def load_ended(self, load: Load) -> None:
        """Record which of a load's blocks are no longer referenced."""
        self.history.released(self._loads.pop(load), self.now_s)

    def acknowledging(self, step: InFlightStep) -> None:
        """Remember the blocks that windows may release."""
        self.history.before_acknowledge(step.plan)

    def acknowledged(self, step: InFlightStep) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record which of them are no longer referenced."""
        self.history.after_acknowledge(self.now_s)

    def advanced(self, now_s: float) -> None:
        """Set the time of all further records."""
        self.now_s = now_s
