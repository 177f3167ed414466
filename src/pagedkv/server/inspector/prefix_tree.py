"""The tree of cached prefixes, with bounded depth and number of nodes; the largest prefixes come first.

A node is a run of blocks, each the only child of the one before it::

    blocks a - b - c -+- d - e            node (a b c), with two children (d e) and (f)
                      `- f

A node's size counts all blocks in its run and after it; its hits count those that ended in its run or after it.
"""

from heapq import heappop, heappush
from typing import Any, Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.space import CachedPrefixes

__all__ = ["MOST_DEPTH", "MOST_NODES", "as_tree"]

MOST_NODES: Final = 200
MOST_DEPTH: Final = 16
NONE: Final = -1


def as_tree(prefixes: CachedPrefixes, *, most_nodes: int = MOST_NODES, most_depth: int = MOST_DEPTH) -> dict[str, Any]:
    """Return the largest prefixes as nested nodes.

    Args:
        prefixes: the cached prefixes of one pool.
        most_nodes: most nodes of the tree.
        most_depth: most nodes from a root to a leaf.

    Returns:
        ``roots``, each with ``block`` (the first block's id), ``blocks`` and ``tokens`` of the run, ``all_blocks``,
        ``all_hits``, ``live`` (live blocks in the run and after it), ``tenant`` by number, ``group``, ``children``, and
        ``more``, the number of children that are left out. ``more_roots`` is the number of roots left out.

    Cost: O(blocks x log(longest chain)).
    """
    return _Tree(prefixes).grown(most_nodes, most_depth)


@final
class _Tree:
    """The chains of one pool, with sums over each block and all blocks after it."""

    def __init__(self, prefixes: CachedPrefixes) -> None:
        self._prefixes = prefixes
        parents = prefixes.parents
        self._sums = _behind(parents, np.stack([np.ones_like(parents), prefixes.num_hits, prefixes.is_live], axis=1))
        by_parent = np.argsort(parents, kind="stable")
        num_children = np.bincount(parents[parents >= 0], minlength=len(parents))
        num_roots = int((parents < 0).sum())
        self._roots = by_parent[:num_roots].tolist()
        self._children = by_parent[num_roots:].tolist()
        self._firsts = np.concatenate([[0], np.cumsum(num_children)]).tolist()

    def grown(self, most_nodes: int, most_depth: int) -> dict[str, Any]:
        """Take the largest nodes, each one after its parent."""
        top: dict[str, Any] = {"pool": self._prefixes.pool, "num_blocks": len(self._prefixes.parents), "children": []}
        heap: list[tuple[int, int, int]] = []
        owners: dict[int, dict[str, Any]] = {}

        def offer(places: list[int], owner: dict[str, Any], depth: int) -> None:
            owner["more"] = len(places)
            for place in places:
                owners[place] = owner
                heappush(heap, (-int(self._sums[place, 0]), place, depth))

        offer(self._roots, top, 1)
        for _ in range(most_nodes):
            if not heap:
                break
            _, place, depth = heappop(heap)
            owner = owners[place]
            node, last = self._node(place)
            owner["children"].append(node)
            owner["more"] -= 1
            if depth < most_depth:
                offer(self._children_of(last), node, depth + 1)
            else:
                node["more"] = len(self._children_of(last))
        return {"pool": top["pool"], "num_blocks": top["num_blocks"], "roots": top["children"], "more": top["more"]}

    def _children_of(self, place: int) -> list[int]:
        children: list[int] = self._children[self._firsts[place] : self._firsts[place + 1]]
        return children

    def _node(self, place: int) -> tuple[dict[str, Any], int]:
        """Return the node of the run that begins at a block, and the run's last block."""
        last, num_blocks = place, 1
        while len(children := self._children_of(last)) == 1:
            last, num_blocks = children[0], num_blocks + 1
        prefixes, (all_blocks, all_hits, num_live) = self._prefixes, self._sums[place].tolist()
        group = int(prefixes.groups[place])
        return {
            "block": int(prefixes.block_ids[place]),
            "last_block": int(prefixes.block_ids[last]),
            "blocks": num_blocks,
            "tokens": num_blocks * prefixes.block_sizes[group],
            "all_blocks": all_blocks,
            "all_hits": all_hits,
            "live": num_live,
            "tenant": int(prefixes.tenants[place]),
            "group": group,
            "children": [],
            "more": 0,
        }, last


def _behind(parents: Int32Array, values: Int32Array) -> Int64Array:
    """Sum values, int32 ``[n, any]``, over each block and all blocks after it."""
    sums = values.astype(np.int64)
    depths, ancestors = (parents >= 0).astype(np.int64), parents.copy()
    while (ancestors >= 0).any():  # each round doubles the distance to the ancestors
        has_ancestor = ancestors >= 0
        depths[has_ancestor] += depths[ancestors[has_ancestor]]
        ancestors[has_ancestor] = ancestors[ancestors[has_ancestor]]
    by_depth = np.argsort(-depths, kind="stable")
    by_depth = by_depth[: np.count_nonzero(depths)]  # first blocks have no parent
    bounds = np.flatnonzero(np.diff(depths[by_depth])) + 1
    for level in np.split(by_depth, bounds):
        np.add.at(sums, parents[level], sums[level])
    return sums
