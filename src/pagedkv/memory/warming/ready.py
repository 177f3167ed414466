"""Compiling before the first request instead of during it."""

import sys
from functools import cache

from pagedkv.memory.compilation.cache_folder import find_cache_folder
from pagedkv.memory.compilation.compiled import is_compiling_at_all
from pagedkv.memory.compilation.loop_sources import PACKAGE_FOLDER
from pagedkv.memory.compilation.notice import NOTICE
from pagedkv.memory.warming.rehearsals import Rehearsal
from pagedkv.memory.warming.stamps import is_stamped
from pagedkv.memory.warming.warm_up import compile_all

__all__ = ["make_ready"]


@cache
def make_ready(*rehearsals: Rehearsal) -> None:
    """Have all loops on disk that these rehearsals reach; from then on none is compiled.

    What serves requests calls it when it is built, so that no request waits for a compiler. O(1) where it is so; else
    all cores compile (:func:`~pagedkv.memory.warming.warm_up`). Where nothing can be kept on disk, this process
    compiles. Whoever starts workers calls it first, so that not each of them finds nothing and compiles.
    """
    if not is_compiling_at_all():
        return
    missing = [rehearsal for rehearsal in rehearsals if not is_stamped(rehearsal)]
    if not missing:
        return
    folder = find_cache_folder(PACKAGE_FOLDER)
    if folder is None or not sys.executable:
        for rehearsal in missing:
            rehearsal.run()
        return
    NOTICE.say_now(str(folder.path))
    compile_all(missing)
