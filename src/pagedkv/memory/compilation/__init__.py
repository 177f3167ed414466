"""Machine code: how loops are compiled, and kept on disk by the contents of their sources.

``compiled`` has the decorators that every loop of the project wears; the rest is theirs.
"""
