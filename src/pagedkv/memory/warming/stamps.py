"""Which rehearsals have all their loops on disk: an entry beside the loops, named as theirs are.

It is named by all sources that the rehearsal reaches, so an edit of any loop makes it another one.
"""

import time

from pagedkv.memory.compilation.cache_folder import CacheFolder, find_cache_folder, folders_to_read
from pagedkv.memory.compilation.loop_sources import PACKAGE_FOLDER, digest_of_sources
from pagedkv.memory.compilation.targets import Processor, own_processor, runnable
from pagedkv.memory.warming.rehearsals import Rehearsal

__all__ = ["is_stamped", "stamp"]


def is_stamped(rehearsal: Rehearsal) -> bool:
    """Tell whether loops that this processor can run were compiled, all of them."""
    names = [_name(rehearsal, processor) for processor in runnable(own_processor())]
    return any(name and folder.read(name) for name in names for folder in folders_to_read(PACKAGE_FOLDER))


def stamp(rehearsal: Rehearsal, processor: Processor) -> None:
    """Note that all loops of a rehearsal were compiled for a processor."""
    name, folder = _name(rehearsal, processor), find_cache_folder(PACKAGE_FOLDER)
    if name is not None and folder is not None:
        folder.write(name, str(time.time()).encode())


def _name(rehearsal: Rehearsal, processor: Processor) -> str | None:
    """Name the entry; None where nothing is kept, since sources have changed or cannot be read."""
    try:
        digest = digest_of_sources(rehearsal.source)
    except OSError:
        return None
    return digest and CacheFolder.named("all-loops", digest, rehearsal, processor)
