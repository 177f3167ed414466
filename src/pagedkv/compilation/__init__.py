"""Machine code: the compilation of loops, and its cache on disk, keyed by the contents of the loops' sources.

``compiled`` has the decorators of all loops of the project; the other modules serve it.
"""
