"""Statistics of a store: a frozen snapshot of counts, each of which has one owner, and the rate of reads."""

from dataclasses import dataclass

from pagedkv.tiers.actions import LoadEnd, StoreOutcome
from pagedkv.tiers.breaker import BreakerState

__all__ = ["StoreStatistics", "TransferRate"]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A store at one moment; counts are since it was built.

    Args:
        num_entries: entries that can be loaded.
        nbytes: bytes of all entries, those being written or deleted and foreign ones included.
        foreign_nbytes: of these, bytes of the root that are no entries of this store.
        num_reads, num_writes, num_deletes: actions in flight.
        num_waiting: loads without an answer.
        num_queued: offered entries that wait to be written.
        num_asked: keys of all loads.
        num_loaded: of these, loaded and verified.
        num_not_loaded: of these, not loaded, by the cause that ended their load.
        num_coalesced: keys whose read was shared with an earlier load.
        num_offered: keys offered.
        offers: of these, by what became of them; the rest is queued or being written.
        read_nbytes, written_nbytes: bytes of completed actions.
        num_evicted: entries evicted for room.
        num_found: entries of other processes that scans have found while the store ran.
        num_vanished: entries that other processes, or the body, have removed meanwhile.
        faults: failed actions by fault.
        breaker: state of the circuit breaker.
        times_opened: how often it opened.
        index_nbytes: bytes of the bookkeeping.
        cap_nbytes: most bytes, as set.
    """

    num_entries: int
    nbytes: int
    foreign_nbytes: int
    num_reads: int
    num_writes: int
    num_deletes: int
    num_waiting: int
    num_queued: int
    num_asked: int
    num_loaded: int
    num_not_loaded: dict[LoadEnd, int]
    num_coalesced: int
    num_offered: int
    offers: dict[StoreOutcome, int]
    read_nbytes: int
    written_nbytes: int
    num_evicted: int
    num_found: int
    num_vanished: int
    faults: dict[str, int]
    breaker: BreakerState
    times_opened: int
    index_nbytes: int
    cap_nbytes: int


@dataclass(slots=True)
class TransferRate:
    """Seconds of a read by its bytes, learnt from reads: a line by least squares that forgets.

    Args:
        keeps: weight of the past at each new read.
    """

    keeps: float = 0.95
    weight: float = 0.0
    sum_bytes: float = 0.0
    sum_seconds: float = 0.0
    sum_squares: float = 0.0
    sum_products: float = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Record one read."""
        self.weight = self.weight * self.keeps + 1
        self.sum_bytes = self.sum_bytes * self.keeps + nbytes
        self.sum_seconds = self.sum_seconds * self.keeps + seconds
        self.sum_squares = self.sum_squares * self.keeps + float(nbytes) * nbytes
        self.sum_products = self.sum_products * self.keeps + float(nbytes) * seconds

    def predict(self, nbytes: int, num_reads: int, parallel: int) -> float | None:
        """Predict the seconds of ``num_reads`` reads of ``nbytes`` in all; None before the first read.

        Reads share the medium's bandwidth, and wait for it ``parallel`` at a time.
        """
        if not self.weight:
            return None
        spread = self.weight * self.sum_squares - self.sum_bytes**2
        per_byte = self.sum_seconds / max(self.sum_bytes, 1)
        latency = 0.0
        if spread > 1e-9 * self.weight * self.sum_squares:
            slope = (self.weight * self.sum_products - self.sum_bytes * self.sum_seconds) / spread
            start = (self.sum_seconds - slope * self.sum_bytes) / self.weight
            if slope >= 0 and start >= 0:
                per_byte, latency = slope, start
        return latency * -(-num_reads // parallel) + per_byte * nbytes
