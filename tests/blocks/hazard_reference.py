"""The policy that learns, as a cache and nothing else: requests come one at a time; dicts and lists, no bounds on work.

Written from the policy's rules (docs/decisions/0025-a-policy-that-learns.md), without any code of the package. What
production spreads over requests is done here at once (bins alone take the same turns), what it draws at random is drawn
here by Python's generator, ghosts are never lost before their runs are, and it never asks what LRU would have. So hits
differ a little, and shares should not.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["HazardCache", "index_of"]

Floats = npt.NDArray[np.float64]
Key = tuple[int, ...]
Classes = tuple[Key, Key, Key]

SECONDS: Final = np.append(0.0, 0.5 * 2 ** (np.arange(60) / 4))
BINS_A_REQUEST: Final = 17
REFERENCES: Final = np.append(0.0, 32 * 2 ** (np.arange(68) / 4))


@dataclass(eq=False)
class Run:
    """Blocks of one request that were released together.

    Args:
        time_s: when it was released.
        refs: blocks that all requests before this had.
        keys: its class in each tree, from the root's children down.
        uses: earlier uses of its blocks.
        output: class of the output of its request.
        serial: how many runs there were before.
        blocks: all that it ever had.
        num_alive: those of them not asked for since, cached or ghosts.
    """

    time_s: float
    refs: int
    keys: Classes
    uses: int
    output: int
    serial: int
    blocks: list[int] = field(default_factory=list)
    num_alive: int = 0


class Tree:
    """Classes and what was counted of them, at the leaves.

    Args:
        starts: float64 ``[bins]``, where each bin of ages begins.
        more: what is added to the middle of a bin.
    """

    def __init__(self, starts: Floats, more: float) -> None:
        self.starts = starts
        self.widths = np.append(np.diff(starts), starts[-1] * (2**0.25 - 1))
        self.middles = starts + self.widths / 2 + more
        self.counts: dict[Key, Floats] = {}
        self.indices: dict[Key, Floats] = {}
        self.make_indices(1.0)

    def of(self, key: Key) -> Floats:
        """Hits and time at risk of a leaf, float64 ``[2, bins]``."""
        return self.counts.setdefault(key, np.zeros((2, len(self.starts))))

    def bin_of(self, age: float) -> int:
        """Find the bin of an age."""
        return int(np.searchsorted(self.starts, age, side="right")) - 1

    def make_indices(self, fading: float) -> None:
        """Let counts fade, sum them up, and make the indices of all classes that have any."""
        sums: dict[Key, Floats] = {(): np.zeros((2, len(self.starts)))}
        for key in self.counts:
            self.counts[key] *= fading
            for length in range(len(key) + 1):
                sums[key[:length]] = sums.get(key[:length], 0) + self.counts[key]
        hits, risk = sums[()]
        shape = (hits.sum() + 1) / ((risk / self.middles).sum() + 1 / 0.3)
        rates: dict[Key, Floats] = {(): (hits + 1) / (risk / self.middles + 1 / shape) / self.middles}
        for key in sorted(sums, key=len)[1:]:
            above = rates[key[:-1]]
            hits, risk = sums[key]
            ratio = (hits.sum() + 1) / ((risk * above).sum() + 1)
            rates[key] = (hits + 1) / (risk + 1 / (ratio * above))
        self.indices = {key: index_of(rate, self.widths) for key, rate in rates.items()}

    def index(self, key: Key, age: float) -> float:
        """Tell the index of a class, or the nearest above that has one, at an age."""
        while key not in self.indices:
            key = key[:-1]
        return float(self.indices[key][self.bin_of(age)])


def index_of(rates: Floats, widths: Floats) -> Floats:
    """Give for each age the most hits per time held, over all later bins at whose end one may give up.

    By its definition, O(bins**2); production does it with a stack.
    """
    hits = -np.expm1(-rates * widths)
    held = hits / rates
    index = np.empty(len(rates))
    for first in range(len(rates)):
        waiting = np.concatenate([[1.0], np.cumprod(1 - hits[first:-1])])
        index[first] = (np.cumsum(waiting * hits[first:]) / np.cumsum(waiting * held[first:])).max()
    return index


class HazardCache:
    """A cache of ``capacity`` blocks. Blocks are numbers that name whole prefixes.

    Args:
        capacity: blocks.
        seed: of the draws.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.trees = (Tree(SECONDS, 1.0), Tree(SECONDS, 1.0), Tree(REFERENCES, 200.0))
        self.runs: deque[Run] = deque()
        self.passed = ([0] * (len(SECONDS) - 1), [0] * (len(REFERENCES) - 1))  # runs that have each bin behind them
        self.first_bin = 0
        self.num_forgotten = 0
        self.run_of: dict[int, Run] = {}
        self.parents: dict[int, int] = {}
        self.cached: set[int] = set()
        self.num_children: Counter[int] = Counter()
        self.leaves: list[int] = []
        self.num_alive = self.num_requests = self.num_refs = self.last_refresh = 0
        self.next_refresh = 16
        self.now_s = 0.0
        self.random = random.Random(seed)

    @property
    def weight(self) -> float:
        """Requests to a block so far."""
        return self.num_requests / max(1, self.num_refs)

    def serve(self, prompt: Sequence[int], now_s: float, num_outputs: int) -> int:
        """Serve one request; return how many of its leading blocks hit."""
        self.now_s = now_s
        prompt = prompt[: self.capacity]
        num_known = sum(1 for _ in takewhile(self.run_of.__contains__, prompt))
        hits = list(takewhile(self.cached.__contains__, prompt))
        classes = self._classes(prompt, num_known, num_outputs)
        for block in prompt[:num_known]:
            self._ask(self.run_of[block])
        self._make_room(len(prompt) - len(hits), hits)
        for parent, block in zip([0, *prompt], prompt, strict=False):
            self.parents[block] = parent
            if block not in self.cached:
                self.cached.add(block)
                self.num_children[parent] += 1
        if prompt and not self.num_children[prompt[-1]]:
            self.leaves.append(prompt[-1])
        self._pass_bins()
        self._release(prompt, classes)
        self._forget(len(prompt))
        self._learn()
        return len(hits)

    # What is counted

    def _ask(self, run: Run) -> None:
        run.num_alive -= 1
        self.num_alive -= 1
        ages = (self.now_s - run.time_s, self.now_s - run.time_s, self.num_refs - run.refs)
        for tree, key, age, passed in zip(self.trees, run.keys, ages, self.passed_by_tree, strict=True):
            hits, risk = tree.of(key)
            place = tree.bin_of(age)
            is_behind = run.serial >= np.array(passed[:place], np.int64)  # and would not find the block in its run
            risk[:place] += is_behind * tree.widths[:place] * self.weight
            hits[place] += self.weight
            risk[place] += (age - tree.starts[place]) * self.weight

    @property
    def passed_by_tree(self) -> tuple[list[int], list[int], list[int]]:
        """How many runs each bin of each tree has behind it."""
        return (self.passed[0], self.passed[0], self.passed[1])

    def _pass_bins(self) -> None:
        for _ in range(BINS_A_REQUEST):
            in_seconds = self.first_bin < len(SECONDS)
            self._pass_bin(0 if in_seconds else 1, self.first_bin - (0 if in_seconds else len(SECONDS)))
            self.first_bin = (self.first_bin + 1) % (len(SECONDS) + len(REFERENCES))

    def _pass_bin(self, scale: int, place: int) -> None:
        trees = ((self.trees[0], 0), (self.trees[1], 1)) if scale == 0 else ((self.trees[2], 2),)
        if place == len(trees[0][0].starts) - 1:
            return  # the last class stays
        passed = self.passed[scale]
        passed[place] = max(passed[place], self.num_forgotten)
        while passed[place] < self.num_forgotten + len(self.runs):
            run = self.runs[passed[place] - self.num_forgotten]
            if (self.now_s - run.time_s, self.num_refs - run.refs)[scale] < trees[0][0].starts[place + 1]:
                break
            for tree, which in trees:
                tree.of(run.keys[which])[1, place] += run.num_alive * tree.widths[place] * self.weight
            passed[place] += 1

    def _learn(self) -> None:
        if self.num_requests >= self.next_refresh:
            for tree in self.trees:
                tree.make_indices(0.5 ** ((self.num_requests - self.last_refresh) / 4000))
            self.last_refresh = self.num_requests
            self.next_refresh = self.num_requests + max(16, min(self.num_requests // 16, 512))

    # Runs

    def _classes(self, prompt: Sequence[int], num_known: int, num_outputs: int) -> dict[tuple[int, int], Classes]:
        """Give the classes of the runs of a prompt, by uses of the block and whether it is the last."""
        output = min(num_outputs.bit_length(), 12)
        length = min((len(prompt) - num_known).bit_length() // 2, 7)
        gap = previous = 0
        if num_known:
            run = self.run_of[prompt[num_known - 1]]
            gap = 1 + min(int(2 * (self.now_s - run.time_s)).bit_length() // 2, 6)
            previous = 1 + run.output
        return {
            (uses, last): ((last, min(uses, 1), output, gap), (output, previous), (last, uses, length))
            for uses in range(4)
            for last in range(2)
        }

    def _release(self, prompt: Sequence[int], classes: dict[tuple[int, int], Classes]) -> None:
        self.num_refs += len(prompt)
        self.num_requests += 1
        output = classes[0, 0][1][0]
        latest = None
        is_known = True
        for place, block in enumerate(prompt):
            is_known = is_known and block in self.run_of
            uses = min(self.run_of[block].uses + 1, 3) if is_known else 0
            if (uses, place == len(prompt) - 1) != latest:
                latest = (uses, place == len(prompt) - 1)
                self.runs.append(
                    Run(
                        self.now_s,
                        self.num_refs - len(prompt),
                        classes[latest],
                        uses,
                        output,
                        self.num_forgotten + len(self.runs),
                    )
                )
            self.run_of[block] = self.runs[-1]
            self.runs[-1].blocks.append(block)
            self.runs[-1].num_alive += 1
        self.num_alive += len(prompt)

    def _forget(self, num_blocks: int) -> None:
        while self.num_alive > max(16 * self.capacity, 65536) + num_blocks:
            run = self.runs.popleft()
            self.num_forgotten += 1
            self.num_alive -= run.num_alive
            for block in run.blocks:
                if self.run_of.get(block) is run:
                    del self.run_of[block]

    # Room

    def _make_room(self, num_blocks: int, held: Sequence[int]) -> None:
        if held and held[-1] in self.leaves:
            self.leaves.remove(held[-1])
        while len(self.cached) + num_blocks > self.capacity:
            drawn = self.leaves if len(self.leaves) <= 64 else self.random.choices(self.leaves, k=64)
            victim = min(drawn, key=self._value)
            run = self.run_of.get(victim)
            self.leaves.remove(victim)
            while True:
                parent = self.parents[victim]
                self.cached.remove(victim)
                self.num_children[parent] -= 1
                is_leaf = parent in self.cached and not self.num_children[parent] and parent != (held or [0])[-1]
                if not (is_leaf and self.run_of.get(parent) is run and len(self.cached) + num_blocks > self.capacity):
                    break
                victim = parent
            if is_leaf:
                self.leaves.append(parent)

    def _value(self, block: int) -> tuple[float, int]:
        run = self.run_of.get(block)
        if run is None:
            return (-math.inf, 0)
        ages = (self.now_s - run.time_s, self.now_s - run.time_s, self.num_refs - run.refs)
        a, b, f = (tree.index(key, age) for tree, key, age in zip(self.trees, run.keys, ages, strict=True))
        return (math.log(a) / 2 + math.log(b) / 2 + 0.8 * math.log(f), run.refs)
