"""Compiling before the first request instead of during it."""

import sys
import time
from functools import cache
from pathlib import Path

from numba.core.registry import cpu_target

from pagedkv.compilation.cache_folder import find_cache_folder
from pagedkv.compilation.compiled import is_compiling_at_all
from pagedkv.compilation.loop_sources import PACKAGE_FOLDER, digest_of_sources
from pagedkv.compilation.notice import NOTICE
from pagedkv.warming import rehearsal
from pagedkv.warming.warm_up import warm_up

__all__ = ["make_ready"]


@cache
def make_ready(eviction: str) -> None:
    """Have all loops on disk that a space with this eviction policy can reach; from then on none is compiled.

    What serves requests calls it when it is built, so that no request waits for a compiler. O(1) where it is so; else
    all cores compile (:func:`~pagedkv.warming.warm_up`). Where nothing can be kept on disk, this process compiles.

    Raises:
        ConfigurationError: the policy is not known.
    """
    if not is_compiling_at_all():
        return
    digest = _digest()
    folder = find_cache_folder(PACKAGE_FOLDER)
    if digest is None or folder is None or not sys.executable:
        rehearsal.rehearse(eviction)
        return
    processor = cpu_target.target_context.codegen().magic_tuple()
    stamp = folder.named("all-loops", digest, eviction, processor)
    if folder.read(stamp) is None:
        NOTICE.say_now(str(folder.path))
        warm_up((eviction,))
        folder.write(stamp, str(time.time()).encode())


def _digest() -> str | None:
    """Name the sources of all loops; None where nothing is kept, since they have changed or cannot be read."""
    try:
        return digest_of_sources(Path(rehearsal.__file__))
    except OSError:
        return None
