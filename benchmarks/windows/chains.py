"""Names of full blocks: equal numbers stand for equal tokens from the first one on.

What a digest is to a cache, as small integers that are never reused, so that models of caches can be dicts.
"""

import numpy as np

from benchmarks.windows.setting import BLOCK_SIZE
from benchmarks.windows.workloads import Request

__all__ = ["Chains"]


class Chains:
    """Numbers the prefixes that it is shown."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, bytes], int] = {}

    def of(self, request: Request) -> list[int]:
        """Name each full block of the tokens that a request computes: its prompt and all but the last of its answer."""
        tokens = np.concatenate([request.prompt, request.answer[:-1]])
        chain: list[int] = []
        parent = -1
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = parent, tokens[start : start + BLOCK_SIZE].tobytes()
            parent = self._names.setdefault(key, len(self._names))
            chain.append(parent)
        return chain
