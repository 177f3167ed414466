"""The inspector: a page that shows the pool's blocks, the requests under way, and why prompts missed.

::

    pages       paths: the page, its events, one block, prefixes, history
    watch       snapshots between two steps, taken only while a watcher is connected
    history     what every step and request was, in rings of bounded size
    buckets     steps and misses summed over seconds, for plots
    prefix_tree cached prefixes as a tree of bounded size
    messages    snapshots as JSON
    static      the page: one file each of HTML, CSS and JavaScript

Nothing of it exists unless :func:`add_inspector` was called.
"""

from pagedkv.serving.server.inspector.pages import add_inspector

__all__ = ["add_inspector"]
