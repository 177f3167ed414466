"""SharedStore: a store whose medium other processes write to as well.

A store lists what it wrote itself, and what a scan found when it was opened. What another process writes later is
announced to it by name, as in a hand-off between engines. An announced entry is verified when it is read, as any other:
if it is not there, or is another one, that is a miss.
"""

from collections.abc import Sequence
from typing import final

from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.tiers.keys import array_of
from pagedkv.memory.tiers.store import TierStore

__all__ = ["SharedStore"]


@final
class SharedStore(TierStore):
    """As :class:`TierStore`, with entries that other processes announce."""

    def sizes_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the bytes of each key's entry; 0 where there is none. O(keys). Changes nothing."""
        with self._changed:
            return self._core.sizes_of(array_of(keys))

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
