"""Machine code that outlives the process: what a loop asks before it compiles, and tells afterwards.

Numba's own cache holds a loop to be fresh while the loop's own file is unchanged, although the loops that it calls are
compiled into it; and it stops the program where no folder can be written. So each loop gets this one instead,
through the interface that Numba's dispatcher has for it; other users of Numba in the process keep theirs.

An entry is named by the loop, by the digest of all sources that the loop can reach, by itself (``loop_sources.py``) or
through moments that classes of its arguments bind (``choice.py``), and by the types of its arguments and the processor.
So a loop whose sources have changed finds nothing, sources that come back (a branch of before) find what they left, and
two processes never write different things under one name. What is made for the processor at hand is looked for first,
then what is made for many (``targets.py``).
"""

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, cast

from numba.core import serialize, types
from numba.core.caching import _Cache

from pagedkv.memory.compilation.cache_folder import CacheFolder, find_cache_folder, folders_to_read, warn_once
from pagedkv.memory.compilation.choice import sources_of_bound
from pagedkv.memory.compilation.loop_sources import PACKAGE_FOLDER, digest_of_sources
from pagedkv.memory.compilation.piece import packed, restored
from pagedkv.memory.compilation.targets import Processor, runnable

__all__ = ["LoopCache"]

Opaque: TypeAlias = Any
"""What Numba hands over and takes back: types, code generators, results of its compiler."""


class LoopCache(_Cache):
    """The cache of one loop. Nothing is read or made before the loop is first called.

    Args:
        function: the loop as it was written.
    """

    def __init__(self, function: Opaque) -> None:
        self._source = Path(inspect.getfile(function))
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._line = function.__code__.co_firstlineno
        self._is_enabled = True

    @property
    def cache_path(self) -> str | None:
        """The folder of the entries, for ``dispatcher.stats``."""
        folder = find_cache_folder(PACKAGE_FOLDER)
        return None if folder is None else str(folder.path)

    def enable(self) -> None:
        """Read and write from now on, as at first."""
        self._is_enabled = True

    def disable(self) -> None:
        """Neither read nor write from now on."""
        self._is_enabled = False

    def flush(self) -> None:
        """Forget what was compiled for this loop, for any types and sources: ``dispatcher.recompile`` wants it anew."""
        if (folder := find_cache_folder(PACKAGE_FOLDER)) is not None:
            folder.remove(self._name + "-")

    def load_overload(self, sig: Opaque, target_context: Opaque) -> Opaque:
        """Give the machine code for arguments of these types, or None if it must be compiled."""
        target_context.refresh()  # as Numba's own caches do before they look
        if (digest := self._digest(sig)) is None:
            return None
        for processor in runnable(target_context.codegen().magic_tuple()):
            key = self._key(sig, processor)
            name = CacheFolder.named(self._name, digest, key)
            for folder in folders_to_read(PACKAGE_FOLDER):
                if (parts := _parts(folder.read(name), key)) is not None:
                    return restored(target_context, parts)
        return None

    def save_overload(self, sig: Opaque, data: Opaque) -> None:
        """Keep what was compiled, unless it holds addresses of this process."""
        if (digest := self._digest(sig)) is None or (folder := find_cache_folder(PACKAGE_FOLDER)) is None:
            return
        key = self._key(sig, data.codegen.magic_tuple())
        if not data.library.has_dynamic_globals:
            folder.write(folder.named(self._name, digest, key), cast("Any", serialize).dumps((key, packed(data))))

    def _key(self, sig: Opaque, processor: Processor) -> Opaque:
        # The line tells apart two functions of one name, of which a condition takes one.
        return sig, processor, self._line

    def _digest(self, sig: Opaque) -> str | None:
        """Name the sources of the loop, and of what classes bind to it; None where nothing is read nor kept."""
        if not self._is_enabled:
            return None
        try:
            return digest_of_sources(self._source, *_sources_of_classes(sig))
        except OSError:
            warn_once(f"pagedkv compiles its loops anew in each process: there are no sources in {PACKAGE_FOLDER}.")
            return None


def _sources_of_classes(sig: Opaque) -> Iterator[Path]:
    """Find where what is bound to classes of arguments stands; ``sig``: a signature, or the types alone."""
    for kind in cast("tuple[Opaque, ...]", getattr(sig, "args", sig)):
        if isinstance(kind, types.BaseNamedTuple):
            yield from sources_of_bound(kind.instance_class)


def _parts(entry: bytes | None, key: Opaque) -> Opaque:
    """Give what an entry holds; None if there is none, or it is of another key that has the same name."""
    if entry is None:
        return None
    kept_key, parts = pickle.loads(entry)  # noqa: S301  # we wrote it, where nobody else can write
    return parts if kept_key == key else None
