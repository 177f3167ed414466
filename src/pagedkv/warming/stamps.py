"""Stamps: which parts have all their loops on disk. A stamp is an entry beside those of the loops.

Its name includes the digest of all sources that the loops reach, so a change of any loop makes it invalid.
"""

from pagedkv.compilation.loop_cache import (
    PACKAGE_FOLDER,
    CacheFolder,
    digest_of_sources,
    find_cache_folder,
    folders_to_read,
)
from pagedkv.compilation.targets import Processor, own_processor, runnable
from pagedkv.warming.parts import Part


def num_stamped(part: Part) -> int | None:
    """Return the number of loops that were compiled with a part's; None: not all of its own were.

    Code for this processor counts, and for a kind of processors that this one is of.
    """
    names = [_name(part, processor) for processor in runnable(own_processor())]
    found = (folder.read(name) for name in names if name for folder in folders_to_read(PACKAGE_FOLDER))
    return next((int(entry) for entry in found if entry), None)


def stamp(part: Part, processor: Processor, num_loops: int) -> None:
    """Record that all loops of a part were compiled for a processor, ``num_loops`` with those of others."""
    name, folder = _name(part, processor), find_cache_folder(PACKAGE_FOLDER)
    if name is not None and folder is not None:
        folder.write(name, str(num_loops).encode())


def _name(part: Part, processor: Processor) -> str | None:
    """Return the name of the stamp; None if nothing is kept, since sources have changed or cannot be read."""
    try:
        digest = digest_of_sources(*part.sources)
    except OSError:
        return None
    return digest and CacheFolder.named("number-of-loops", digest, part, processor)
