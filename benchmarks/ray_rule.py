"""RayRule: the rule of Ray Serve's ``PrefixCacheAffinityRouter`` (Ray 2.60), over Ray's own tree of prefixes.

As its documentation states it (Ray Serve LLM, prefix-aware routing): while the longest and the shortest queue differ by
no more than ``imbalanced_threshold`` (default: infinity), a request goes to the replicas that share the longest prefix
of its text by the requests sent before, or, if that is less than a tenth of the text, to those with the fewest
characters in the tree; otherwise to one of two at random. Of several, the one with the shortest queue takes it.
Evictions are not known to it. The router's class asks for vLLM or SGLang when it is imported; the tree does not.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Final, final

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

LEAST_MATCH: Final = 0.1


@final
class RayRule:
    """Chooses replicas as Ray's prefix-aware router does.

    Args:
        names: the replicas.
        imbalanced_threshold: largest difference of the queues' lengths at which prefixes count.
        seed: of the random pairs.
    """

    def __init__(self, names: Sequence[str], imbalanced_threshold: float = float("inf"), seed: int = 0) -> None:
        self._names = list(names)
        self._threshold = imbalanced_threshold
        self._random = Random(seed)
        self._tree = PrefixTree()
        self._tree.add_tenants(self._names, 0.0)

    def choose(self, token_ids: Sequence[int], queues: Mapping[str, int], now_s: float) -> str:
        """Choose a replica by the numbers of requests under way, and note the prompt, a character for each token."""
        best: list[str] | None
        text = "".join(chr(0x4E00 + token) for token in token_ids)
        if max(queues.values()) - min(queues.values()) > self._threshold:
            best = self._random.sample(self._names, min(2, len(self._names)))
        else:
            matched, best = self._tree.prefix_match(text, self._names)
            if len(matched) < LEAST_MATCH * len(text):
                best = self._tree.get_smallest_tenants()
        name: str = min(best or self._names, key=queues.__getitem__)
        self._tree.insert(text, name, now_s)
        return name
