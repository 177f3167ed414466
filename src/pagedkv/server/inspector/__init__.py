"""The inspector: a page that shows the pool's blocks, the requests under way, and why prompts missed.

::

    pages      paths: the page, its events, one block, prefixes, history; ReplayServer: a replay's page, in a thread
    inspected  InspectedEngine, InspectedReplay: the data of one engine, or of one replay; snapshots while one watches
    snapshot   the pool's blocks and requests between two steps; cached prefixes as a tree of bounded size; as JSON
    history    steps and requests of the last minutes, in rings of bounded size, and their sums for plots
    static     the page: one file each of HTML, CSS and JavaScript

Without a call of :func:`add_inspector` or :func:`add_inspected`, or a :class:`ReplayServer`, there are no paths, no
history and no snapshots.
"""

from pagedkv.server.inspector.history import MissedTokens, ReplayState
from pagedkv.server.inspector.inspected import LAST_EVENT, Inspected, InspectedEngine, InspectedReplay
from pagedkv.server.inspector.pages import ReplayServer, add_inspected, add_inspector, add_inspector_paths

__all__ = [
    "LAST_EVENT",
    "Inspected",
    "InspectedEngine",
    "InspectedReplay",
    "MissedTokens",
    "ReplayServer",
    "ReplayState",
    "add_inspected",
    "add_inspector",
    "add_inspector_paths",
]
