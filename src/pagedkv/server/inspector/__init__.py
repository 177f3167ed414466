"""The inspector: a page that shows the pool's blocks, the requests under way, and why prompts missed.

::

    pages          paths: the page, its events, one block, prefixes, history
    replay_server  ReplayServer: the page of a replay, served in a thread
    inspected      InspectedEngine, InspectedReplay: the data of one engine, or of one replay, without keys and paths
    watch          snapshots between two steps, taken only while a watcher is connected
    snapshot       the pool's blocks and requests between two steps; cached prefixes as a tree of bounded size
    history        steps and requests of the last minutes, in rings of bounded size, and their sums for plots
    messages       snapshots as JSON
    static         the page: one file each of HTML, CSS and JavaScript

Without a call of :func:`add_inspector` or :func:`add_inspected`, or a :class:`ReplayServer`, there are no paths, no
history and no snapshots.
"""

from pagedkv.server.inspector.inspected import LAST_EVENT, Inspected, InspectedEngine, InspectedReplay
from pagedkv.server.inspector.pages import add_inspected, add_inspector, add_inspector_paths
from pagedkv.server.inspector.replay_server import ReplayServer
from pagedkv.server.inspector.subject import MissedTokens, ReplayState

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
