"""Machine code that outlives the process: the cache that a loop reads before it compiles, and writes afterwards.

Numba's own cache considers a loop fresh while the loop's own file is unchanged, although the loops that it calls are
compiled into it; and it stops the program if no folder can be written. So each loop gets this cache instead, through
the interface of Numba's dispatcher; other users of Numba in the process keep Numba's.

The name of an entry is made of the loop, the digest of all sources that the loop can reach, the types of its arguments,
and the processor. The sources include those reached through moments that classes of its arguments bind (``choice.py``),
besides those that it imports (``loop_sources.py``). So a loop with changed sources finds no entry, sources that are
restored (an earlier branch) find their former entry, and two processes never write different content under one name.
Code for this machine's processor is looked up first, then code for a class of processors (``targets.py``).
"""

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, cast

from numba.core import serialize, types
from numba.core.caching import _Cache

from pagedkv.compilation.cache_folder import CacheFolder, find_cache_folder, folders_to_read, warn_once
from pagedkv.compilation.choice import sources_of_bound
from pagedkv.compilation.loop_sources import PACKAGE_FOLDER, digest_of_sources
from pagedkv.compilation.notice import NOTICE
from pagedkv.compilation.piece import packed, restored
from pagedkv.compilation.targets import Processor, runnable

Opaque: TypeAlias = Any
"""Objects that Numba passes in and takes back: types, code generators, results of its compiler."""


class LoopCache(_Cache):
    """The cache of one loop. Nothing is read or created before the loop is first called.

    Args:
        function: the loop's Python function.
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
        """Read and write from now on, which is the default."""
        self._is_enabled = True

    def disable(self) -> None:
        """Neither read nor write from now on."""
        self._is_enabled = False

    def flush(self) -> None:
        """Remove all entries of this loop, for any types and sources, as ``dispatcher.recompile`` requires."""
        if (folder := find_cache_folder(PACKAGE_FOLDER)) is not None:
            folder.remove(self._name + "-")

    def load_overload(self, sig: Opaque, target_context: Opaque) -> Opaque:
        """Return the machine code for arguments of these types, or None if it must be compiled."""
        target_context.refresh()  # as Numba's own caches do before a look-up
        if (digest := self._digest(sig)) is None:
            return None
        for processor in runnable(target_context.codegen().magic_tuple()):
            key = self._key(sig, processor)
            name = CacheFolder.named(self._name, digest, key)
            for folder in folders_to_read(PACKAGE_FOLDER):
                if (entry := folder.read(name)) is not None:
                    with NOTICE.loading():
                        parts = _parts(entry, key)
                        found = None if parts is None else restored(target_context, parts)
                    if found is not None:
                        return found
        return None

    def save_overload(self, sig: Opaque, data: Opaque) -> None:
        """Write machine code, unless it contains addresses of this process."""
        if (digest := self._digest(sig)) is None or (folder := find_cache_folder(PACKAGE_FOLDER)) is None:
            return
        key = self._key(sig, data.codegen.magic_tuple())
        if not data.library.has_dynamic_globals:
            folder.write(folder.named(self._name, digest, key), cast("Any", serialize).dumps((key, packed(data))))

    def _key(self, sig: Opaque, processor: Processor) -> Opaque:
        # The line number distinguishes two functions of one name, one of which is defined by a condition.
        return sig, processor, self._line

    def _digest(self, sig: Opaque) -> str | None:
        """Return the digest of the loop's sources and of loops bound to classes; None if nothing is read or written."""
        if not self._is_enabled:
            return None
        try:
            return digest_of_sources(self._source, *_sources_of_classes(sig))
        except OSError:
            warn_once(f"pagedkv compiles its loops anew in each process: there are no sources in {PACKAGE_FOLDER}.")
            return None


def _sources_of_classes(sig: Opaque) -> Iterator[Path]:
    """Find the sources of loops bound to the classes of arguments; ``sig``: a signature, or the types alone."""
    for kind in cast("tuple[Opaque, ...]", getattr(sig, "args", sig)):
        if isinstance(kind, types.BaseNamedTuple):
            yield from sources_of_bound(kind.instance_class)


def _parts(entry: bytes, key: Opaque) -> Opaque:
    """Return the content of an entry; None if it has another key and the same name."""
    kept_key, parts = pickle.loads(entry)  # noqa: S301  # written by pagedkv, where no other user can write
    return parts if kept_key == key else None
