"""Observers of a space: they are called at named moments of its operations, and change nothing of it.

The space calls each moment of each observer that was registered and overrides it, in the order of registration
(:meth:`BlockSpace.observe <pagedkv.BlockSpace.observe>`); without observers this costs nothing. A moment is called in
the middle of an operation, after all checks that can refuse it: an observer that raises leaves the space interrupted.
::

    allocate   admitting, admitted          plan_step     planned
    fork       forked                       acknowledge   acknowledging, acknowledged
    append     grown                        abort         aborted (each step, the oldest first)
    fill       refused                      mark_computed declaring
    truncate   truncating                   advance       advanced
    free       leaving, freed               swap_out      leaving, swapped_out
    load       load_begun                   swap_in       returned
                                            finish_load   load_ended
                                            withdraw      withdrawn
"""

from typing import Final

from pagedkv.contract.answers import Load
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.space.hits import PrefixHit
from pagedkv.space.space_view import ObservedSpace
from pagedkv.space.state import Observers
from pagedkv.space.steps import InFlightStep


class SpaceObserver:
    """An observer that does nothing; subclasses override the moments they need. Batches are int32 ``[rows]``."""

    def begin(self, space: ObservedSpace) -> None:
        """The observer was registered. The view can be queried at every moment, also in the middle of an operation."""

    def admitting(self, row: int, hit: PrefixHit) -> None:
        """A row is about to be given to a prompt with this hit. No block is referenced, taken or evicted for it yet."""

    def admitted(self, row: int, hit: PrefixHit, num_reached: int) -> None:
        """A row serves a prompt. ``num_reached``: leading tokens that an earlier life of the request had."""

    def forked(self, parent: int, children: Int32Array, num_tokens: int) -> None:
        """New rows begin with the first ``num_tokens`` tokens of another row."""

    def grown(self, batch: Int32Array) -> None:
        """Rows got tokens or reserved slots."""

    def refused(self, refused: Int32Array, limits: Int32Array) -> None:
        """Tokens were refused, int32 ``[max_sequences]``; everything behind the limits moves down."""

    def truncating(self, batch: Int32Array, lengths: Int64Array) -> None:
        """Rows are about to be rolled back to these lengths, int64 ``[rows]``."""

    def declaring(self, batch: Int32Array) -> None:
        """Rows are about to be declared computed; no step in flight computes for them any more."""

    def planned(self, step: InFlightStep) -> None:
        """A step was planned."""

    def acknowledging(self, step: InFlightStep) -> None:
        """A step has run; the windows of its rows have not slid yet."""

    def acknowledged(self, step: InFlightStep) -> None:
        """A step has run, and its blocks are settled."""

    def aborted(self, step: InFlightStep) -> None:
        """A step has failed; nothing is taken back yet."""

    def leaving(self, batch: Int32Array) -> None:
        """Rows are about to release all their blocks, or those on the device."""

    def freed(self, batch: Int32Array) -> None:
        """Rows are vacant now."""

    def swapped_out(self, batch: Int32Array) -> None:
        """Rows were moved to the host pools."""

    def returned(self, batch: Int32Array) -> None:
        """Rows were moved back from the host pools, in the open step."""

    def load_begun(self, load: Load, hit: PrefixHit) -> None:
        """Blocks behind a hit were reserved for a load, which holds those of the hit as well."""

    def load_ended(self, load: Load) -> None:
        """What a load has brought can be hit, and it holds no block any more."""

    def advanced(self, now_s: float) -> None:
        """The clock was set."""

    def check(self) -> None:
        """Check the observer's own records, as part of ``check()``. Raises AssertionError."""

    def withdrawn(self, digests: frozenset[bytes] | None) -> None:
        """Content was declared bad: digests of its blocks, and of those known to continue them.

        None: it is not known what of all content is sound.
        """


MOMENTS: Final = tuple(name for name in vars(SpaceObserver) if name[0] != "_" and name not in {"begin", "check"})


def register(observers: Observers, observer: SpaceObserver) -> None:
    """Call an observer from now on, at the moments that its class overrides, and at audits. O(1)."""
    observers.check += (observer.check,)
    for moment in MOMENTS:
        if getattr(type(observer), moment) is not getattr(SpaceObserver, moment):
            setattr(observers, moment, (*getattr(observers, moment), getattr(observer, moment)))
