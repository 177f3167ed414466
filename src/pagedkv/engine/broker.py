"""MemoryBroker: engines of one process share a device's memory, which moves between their pools as their loads change.

An engine with ``EngineConfig.kv_at_first`` has addresses for all blocks that it can ever have, and memory for some of
them. Between two steps the broker asks a *rule* how many bytes each engine should have, takes pieces that no request
uses from those that have more, with what is cached there, and gives them to those that have less::

    engine A   | used | used | cached | empty |        .        .     |      all addresses are reserved;
    engine B   | used | used | used   |       .        .        .     |      dots have no memory
                                          |________________^   a piece, when A has none to use it and B lacks it

No running request loses a block to the broker. An engine whose pool has become small lets requests wait, or preempts
its last ones when the others grow, as in any full pool; so nothing fails for want of memory that will come. The rule
must see to it that it comes: :func:`share_by_demand` first gives what the requests can take that came first, so that
the oldest of all always ends, whatever the others need.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from pagedkv.contract.arguments import require_instance
from pagedkv.engine.core import EngineCore, PoolSize
from pagedkv.engine.outputs import StepRecord
from pagedkv.errors import ConfigurationError

Rule: TypeAlias = Callable[[Sequence[PoolSize], int], Sequence[int]]
"""Returns how many bytes each engine should have, of a total; it may be any number, which is rounded to pieces."""


def share_by_demand(sizes: Sequence[PoolSize], total_nbytes: int) -> list[int]:
    """Divide memory by what requests may come to take; what none takes stays with its engine, which caches in it.

    Every engine has its least. Then each gets what its first request can take, where so much is left, the request that
    came first before the others. Then all that lack memory for their requests get equal parts of the rest, those that
    lack least first.

    >>> def engine(nbytes: int, wanted: int) -> PoolSize:
    ...     return PoolSize(1, nbytes, least_nbytes=1, most_nbytes=90, wanted_nbytes=wanted)
    >>> share_by_demand([engine(50, 90), engine(50, 10)], 100)
    [90, 10]
    >>> share_by_demand([engine(50, 90), engine(50, 80)], 100)
    [50, 50]
    >>> share_by_demand([engine(50, 60), engine(50, 0)], 100)
    [60, 40]
    """
    granted = [size.least_nbytes for size in sizes]
    left = total_nbytes - sum(granted)
    for place in sorted(range(len(sizes)), key=lambda place: sizes[place].first_arrived):
        more = min(sizes[place].first_nbytes, sizes[place].most_nbytes) - granted[place]
        if 0 < more <= left:
            granted[place] += more
            left -= more
    lacks = [max(0, min(it.wanted_nbytes, it.most_nbytes) - has) for it, has in zip(sizes, granted, strict=True)]
    for num_done, place in enumerate(sorted(range(len(sizes)), key=lacks.__getitem__)):
        more = min(lacks[place], left // (len(sizes) - num_done))
        granted[place] += more
        left -= more
    for place, size in enumerate(sizes):
        kept = max(0, min(left, size.nbytes - granted[place]))
        granted[place] += kept
        left -= kept
    return granted


@final
class MemoryBroker:
    """Divides the memory of blocks that some engines have together. One thread drives it and all of its engines.

    Args:
        engines: the engines, on one device, each with ``EngineConfig.kv_at_first``.
        rule: how many bytes each engine should have.

    Attributes:
        total_nbytes: what the engines have together, which never grows.
        num_moves: pieces that have changed their engine.

    Raises:
        ConfigurationError: an engine's pool keeps its size; the engines are on several devices; or one could never have
            all of its blocks, even if the others had their least: its largest request might wait for ever.
    """

    def __init__(self, engines: Sequence[EngineCore], *, rule: Rule = share_by_demand) -> None:
        for engine in engines:
            require_instance(engine, EngineCore, "engines")
        self._engines, self._rule = tuple(engines), rule
        sizes = [engine.pool_size for engine in engines]
        devices = {engine.executor.storage.device for engine in engines}
        if len(devices) > 1:
            raise ConfigurationError(
                f"engines that share memory must be on one device, got {sorted(map(str, devices))}"
            )
        self.total_nbytes = sum(size.nbytes for size in sizes)
        self.num_moves = 0
        least = sum(size.least_nbytes for size in sizes)
        for place, size in enumerate(sizes):
            if size.most_nbytes + least - size.least_nbytes > self.total_nbytes:
                raise ConfigurationError(
                    f"engine {place} may come to {size.most_nbytes:,} bytes, but of {self.total_nbytes:,} the others "
                    f"keep at least {least - size.least_nbytes:,}: give it fewer blocks, or a larger kv_at_first"
                )

    @property
    def has_work(self) -> bool:
        """Whether any engine has work."""
        return any(engine.has_work for engine in self._engines)

    def step(self) -> list[StepRecord | None]:
        """Divide the memory, then run a step of each engine that has work; None for the others. Raises EngineError."""
        self.balance()
        return [engine.step() if engine.has_work else None for engine in self._engines]

    def balance(self) -> None:
        """Move memory by the rule, as far as no request uses it. Between steps of all engines.

        Raises:
            ConfigurationError: the rule's answer is not one number for each engine; or the device has less memory than
                was given back to it, as where another process has taken it.
            EngineError: an engine has failed, or sleeps.

        Cost: O(requests); where memory moves, O(blocks) and the device's pending work.
        """
        sizes = [engine.pool_size for engine in self._engines]
        targets = self._rule(sizes, self.total_nbytes)
        if len(targets) != len(sizes):
            raise ConfigurationError(
                f"the rule divides memory among {len(targets)} engines, and there are {len(sizes)}"
            )
        wanted = [_units(size, target) for size, target in zip(sizes, targets, strict=True)]
        free = self.total_nbytes - sum(size.nbytes for size in sizes)
        missing = sum(max(0, count) * size.unit_nbytes for size, count in zip(sizes, wanted, strict=True)) - free
        for engine, size, count in zip(self._engines, sizes, wanted, strict=True):
            if count < 0 < missing:
                given = engine.shrink(min(-count, -(-missing // size.unit_nbytes)))
                free += given * size.unit_nbytes
                missing -= given * size.unit_nbytes
        for engine, size, count in zip(self._engines, sizes, wanted, strict=True):
            taken = min(max(0, count), free // size.unit_nbytes)
            if taken:
                engine.grow(taken)
                free -= taken * size.unit_nbytes
                self.num_moves += taken


def _units(size: PoolSize, target: int) -> int:
    """Return by how many pieces an engine is to grow, or, below 0, to shrink; within what it can have."""
    bounded = max(size.least_nbytes, min(int(target), size.most_nbytes))
    return -((size.nbytes - bounded) // size.unit_nbytes)
