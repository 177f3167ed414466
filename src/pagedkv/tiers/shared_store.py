"""SharedStore: a store whose medium other processes write to as well.

A store lists what it wrote itself, and what a scan found when it was opened. What another process writes later is
found by further scans, in a thread of their own, or is announced by name, as in a hand-off between engines. Such an
entry is verified when it is read, as any other: if it is not there, or is another one, that is a miss.

::

    scan of the body, without the lock      listed keys, some thousands at a time
    under the lock, piece by piece          which are new -> which have vanished -> list the new ones
    only if anything differed               measure the body

A piece takes the lock for less than a millisecond, so a request that is looked up waits no longer.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Final, TypeVar, final

from pagedkv.contract.arguments import as_count
from pagedkv.tiers.body import Body, Stored
from pagedkv.tiers.codecs import NO_CODEC, Codec
from pagedkv.tiers.identity import Identity
from pagedkv.tiers.store import TierStore
from pagedkv.tiers.timing import BreakerState
from pagedkv.tiers.words import StoreConfig, array_of

T = TypeVar("T")

COMPARED: Final = 2048
"""Listed keys that are compared with the index under one lock."""
LOOKED_AT: Final = 2**14
"""Entries among which vanished ones are looked for under one lock."""
LISTED: Final = 32
"""New entries that are listed under one lock: some 15 us each."""


@final
class SharedStore(TierStore):
    """As :class:`TierStore`, with entries of other processes.

    Args:
        body, identity, config, secret, codec, clock: as of a :class:`TierStore`.
        rescan_s: seconds from the end of a scan for entries of other processes to the next; None: never.

    Raises:
        ConfigurationError: as of a :class:`TierStore`.
    """

    def __init__(  # noqa: PLR0913 - as of a TierStore, and one more
        self,
        body: Body,
        identity: Identity,
        config: StoreConfig,
        *,
        secret: bytes | None = None,
        codec: Codec = NO_CODEC,
        clock: Callable[[], float] = time.monotonic,
        rescan_s: float | None = None,
    ) -> None:
        super().__init__(body, identity, config, secret=secret, codec=codec, clock=clock)
        self._ends = threading.Event()
        self._one_scan = threading.Lock()
        if rescan_s is not None:
            name = f"tier-{body.medium}-scan"
            scans = threading.Thread(target=self._keep_scanning, args=(rescan_s,), name=name, daemon=True)
            self._threads.append(scans)
            scans.start()

    def sizes_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the bytes of each key's entry; 0 where there is none. O(keys). Changes nothing."""
        with self._changed:
            return self._core.sizes_of(array_of(keys))

    def rescan(self) -> int:
        """Scan the body now: list what other processes have stored, and remove what they have deleted.

        Nothing is evicted or deleted for what is found. After :meth:`reset` the first scan deletes what it finds, since
        that may be older than the reset.

        Returns:
            The number of entries that are newly listed.

        Raises:
            ConfigurationError: the store is closed.
            OSError: the body cannot be listed; entries are left as they are.

        Cost: O(entries of the medium), outside the lock but for pieces of less than a millisecond.
        """
        with self._one_scan:
            try:
                return self._scan()
            finally:
                with self._changed:
                    self._core.end_scan(is_whole=False)
                self._call_back()

    def close(self, timeout_s: float = 5.0) -> None:
        """End all threads and close the body, as of a :class:`TierStore`."""
        self._ends.set()
        super().close(timeout_s)

    def announce(self, keys: Sequence[bytes], sizes: Sequence[int]) -> int:
        """List entries that another process has stored; return how many of them are listed now.

        Nothing is evicted or deleted for them: the first ones are listed for which there is room.

        Args:
            keys: 32 bytes each, head first.
            sizes: bytes of each entry, exactly: an entry of another size counts as damaged when it is read.

        Raises:
            ConfigurationError: the store is closed, or a size is below 1.

        Cost: O(keys).
        """
        sizes = [as_count(nbytes, "the size of an entry", least=1) for nbytes in sizes]
        with self._changed:
            self._require_open()
            there = self._core.contains(array_of(keys)).tolist()
            seen, config = self._core.statistics(), self._core.config
            entries_left = config.max_entries - seen.num_entries - seen.num_writes - seen.num_deletes
            nbytes_left = seen.cap_nbytes - seen.nbytes
            fitting: list[tuple[bytes, int]] = []
            for key, nbytes, is_there in zip(keys, sizes, there, strict=True):
                if is_there:
                    continue
                nbytes_left -= nbytes
                if nbytes_left < 0 or len(fitting) >= entries_left:
                    break
                fitting.append((key, nbytes))
            fitting.reverse()  # the least recently used first: the head is evicted last
            self._core.restore(array_of([key for key, _ in fitting]), [size for _, size in fitting], self._clock())
            self._pass_on()
            num_there = int(self._core.contains(array_of(keys)).sum())
        self._call_back()
        return num_there

    def _keep_scanning(self, rescan_s: float) -> None:
        """Scan now and then. While the body is out of service it is left alone; a scan that fails is tried again."""
        while not self._ends.wait(rescan_s):
            with self._changed:
                is_in_service = self._core.breaker is BreakerState.CLOSED
            if not is_in_service:
                continue
            try:
                self.rescan()
            except Exception as problem:  # noqa: BLE001 - a body is others' code: its faults are the tier's, not ours
                if not self._ends.is_set():
                    self.last_problem = f"scan: {problem}"

    def _scan(self) -> int:
        """Compare the body with the index, and follow the differences; return how many entries are newly listed."""
        with self._changed:
            self._require_open()
            self._core.begin_scan()
            num_before = self._core.statistics().num_vanished
        new = sorted(self._unlisted(), key=lambda each: each.used_s)
        is_more = True
        while is_more:
            with self._changed:
                is_more = self._core.lose_vanished(LOOKED_AT)
        num_listed = 0
        for piece in _pieces(new, LISTED):
            with self._changed:
                keys, sizes = array_of([each.key for each in piece]), [each.nbytes for each in piece]
                num_listed += self._core.adopt(keys, sizes, self._clock())
                self._pass_on()
        with self._changed:
            self._core.end_scan(is_whole=True)
            num_vanished = self._core.statistics().num_vanished - num_before
        if new or num_vanished:
            self._measure()  # what has no room in the index has bytes all the same
        return num_listed

    def _unlisted(self) -> Iterator[Stored]:
        """Scan the body; yield what the index does not have."""
        for piece in _pieces(self.body.scan(), COMPARED):
            with self._changed:
                is_new = self._core.compare_scan(array_of([each.key for each in piece]))
            yield from compress(piece, is_new.tolist())


def _pieces(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``; the last one may be shorter."""
    left = iter(items)
    while piece := list(islice(left, size)):
        yield piece
