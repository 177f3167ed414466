"""Machine code: the compilation of loops, and its cache on disk, keyed by the contents of the loops' sources.

``compiled`` has what all loops of the project are written with; the other modules serve it.
"""
