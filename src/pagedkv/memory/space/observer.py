"""What may follow the operations of a space: observers, which are called at named moments and change nothing of it.

The space knows none of them: it calls each moment of each observer that it was given, in their order
(:meth:`BlockSpace.observe <pagedkv.BlockSpace.observe>`); where there are none, it costs nothing. A moment is called in
the middle of an operation, after everything that can be refused: an observer that raises leaves the space interrupted.

::

    allocate   admitting, admitted          plan_step     planned
    fork       forked                       acknowledge   acknowledging, acknowledged
    append     grown                        abort         aborted (each step, the oldest first)
    fill       refused                      mark_computed declaring
    truncate   truncating                   advance       advanced
    free       leaving, freed               swap_out      leaving, swapped_out
                                            swap_in       returned
"""

from typing import TYPE_CHECKING

from pagedkv.memory.contract.arrays import Int32Array, Int64Array

if TYPE_CHECKING:
    from pagedkv.memory.space.hits import PrefixHit
    from pagedkv.memory.space.observed_space import ObservedSpace
    from pagedkv.memory.space.steps import InFlightStep

__all__ = ["SpaceObserver"]


class SpaceObserver:
    """An observer that does nothing: each moment is there to be overridden. Batches are int32 ``[rows]``."""

    def begin(self, space: "ObservedSpace") -> None:
        """The observer was given to a space. The view answers at every moment, also in the middle of an operation."""

    def admitting(self, row: int, hit: "PrefixHit") -> None:
        """A row is about to be given to a prompt that hits: nothing is referred to, taken or evicted for it yet."""

    def admitted(self, row: int, hit: "PrefixHit", num_reached: int) -> None:
        """A row serves a prompt. ``num_reached``: leading tokens that an earlier life of the request had."""

    def forked(self, parent: int, children: Int32Array, num_tokens: int) -> None:
        """Rows begin with so many tokens of another one."""

    def grown(self, batch: Int32Array) -> None:
        """Rows have got tokens, or reserved slots."""

    def refused(self, refused: Int32Array, limits: Int32Array) -> None:
        """Tokens were refused, int32 ``[max_sequences]``; everything behind the limits moves down."""

    def truncating(self, batch: Int32Array, lengths: Int64Array) -> None:
        """Rows are about to be rolled back to some lengths, int64 ``[rows]``."""

    def declaring(self, batch: Int32Array) -> None:
        """Rows are about to be declared computed; no step in flight concerns them any more."""

    def planned(self, step: "InFlightStep") -> None:
        """A step was planned."""

    def acknowledging(self, step: "InFlightStep") -> None:
        """A step has run; the windows of its rows have not slid yet."""

    def acknowledged(self, step: "InFlightStep") -> None:
        """A step has run, and what it settles is settled."""

    def aborted(self, step: "InFlightStep") -> None:
        """A step has failed; nothing is taken back yet."""

    def leaving(self, batch: Int32Array) -> None:
        """Rows are about to give back all their blocks, or those on the device."""

    def freed(self, batch: Int32Array) -> None:
        """Rows serve no sequence any more."""

    def swapped_out(self, batch: Int32Array) -> None:
        """Rows have left for the host pools."""

    def returned(self, batch: Int32Array) -> None:
        """Rows have come back from the host pools, in the open step."""

    def advanced(self, now_s: float) -> None:
        """The clock was set."""

    def check(self) -> None:
        """Prove what the observer keeps. For ``check()``. Raises AssertionError."""
