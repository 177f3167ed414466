"""Compiling before the first request instead of during it."""

import sys
from functools import cache

from pagedkv.compilation.compiled import is_compiling_at_all
from pagedkv.compilation.loop_cache import PACKAGE_FOLDER, find_cache_folder
from pagedkv.compilation.notice import NOTICE
from pagedkv.warming.parts import Part
from pagedkv.warming.stamps import num_stamped
from pagedkv.warming.warm_up import compile_all


@cache
def make_ready(*parts: Part) -> None:
    """Ensure that all loops that these parts call are on disk, so that none is compiled afterwards.

    Engines and servers call it when they are built, so that no request waits for a compiler. O(1) if the loops are on
    disk; else all cores compile (:func:`~pagedkv.warming.warm_up`). If nothing can be kept on disk, this process
    compiles. A process that starts workers calls it first, since otherwise every worker would compile.
    """
    if not is_compiling_at_all():
        return
    nums = {part: num_stamped(part) for part in parts}
    missing = [part for part, num in nums.items() if num is None]
    NOTICE.num_to_load += sum(num for num in nums.values() if num is not None)
    if not missing:
        return
    folder = find_cache_folder(PACKAGE_FOLDER)
    if folder is None or not sys.executable:
        for part in missing:
            part.compile()
        return
    NOTICE.say_now(str(folder.path))
    NOTICE.num_to_load += compile_all(missing, on_progress=NOTICE.progress).num_loops
