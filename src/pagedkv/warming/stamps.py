"""Stamps: which rehearsals have all their loops on disk. A stamp is an entry beside those of the loops.

Its name includes the digest of all sources that the rehearsal reaches, so a change of any loop makes it invalid.
"""

import time

from pagedkv.compilation.cache_folder import CacheFolder, find_cache_folder, folders_to_read
from pagedkv.compilation.loop_sources import PACKAGE_FOLDER, digest_of_sources
from pagedkv.compilation.targets import Processor, own_processor, runnable
from pagedkv.warming.rehearsals import Rehearsal

__all__ = ["is_stamped", "stamp"]


def is_stamped(rehearsal: Rehearsal) -> bool:
    """Whether all loops of a rehearsal were compiled for this processor, or for one with code that it can run."""
    names = [_name(rehearsal, processor) for processor in runnable(own_processor())]
    return any(name and folder.read(name) for name in names for folder in folders_to_read(PACKAGE_FOLDER))


def stamp(rehearsal: Rehearsal, processor: Processor) -> None:
    """Record that all loops of a rehearsal were compiled for a processor."""
    name, folder = _name(rehearsal, processor), find_cache_folder(PACKAGE_FOLDER)
    if name is not None and folder is not None:
        folder.write(name, str(time.time()).encode())


def _name(rehearsal: Rehearsal, processor: Processor) -> str | None:
    """Return the name of the stamp; None if nothing is kept, since sources have changed or cannot be read."""
    try:
        digest = digest_of_sources(rehearsal.source)
    except OSError:
        return None
    return digest and CacheFolder.named("all-loops", digest, rehearsal, processor)
