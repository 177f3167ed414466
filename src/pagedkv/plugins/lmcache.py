"""LMCache 0.5.6: an L2 adapter of its server (multiprocess mode) that verifies what it serves, within its bytes.

``lmcache server ... --l2-adapter``::

    {
        "type": "plugin",
        "module_path": "pagedkv.plugins.lmcache",
        "class_name": "PagedKVAdapter",
        "adapter_params": {"root": "/var/cache/kv", "cap": "200GiB", "weights": "/models/MODEL"},
    }

An object of LMCache is an entry of a :class:`~pagedkv.tiers.SharedStore`, under the SHA-256 of its key. Its frame has
the whole key, the digest of the weights, and a check of every byte::

    LMCache's threads      submit_...  --> a queue                   query_..., pop_... <-- done, an event fd
    one thread here        contains, offer, load <--'  '--> copy into LMCache's memory --^
    threads of the store   write, read and verify

Objects are read one by one, so what is damaged or gone is a miss of that object alone. The store evicts by itself; an
object that was found and is evicted before it is loaded is a miss.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from queue import SimpleQueue
from secrets import token_bytes
from typing import Any, Final

import lmcache
import torch  # noqa: F401 - before LMCache's compiled part

from pagedkv.tiers import (
    GroupLayout,
    Identity,
    Load,
    ModelIdentity,
    Run,
    SharedStore,
    StoreOutcome,
    digest_of_weights,
    tier_of_options,
)
from pagedkv.warming import make_ready, of_stores

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.platform import create_event_notifier
except ImportError as problem:
    known = "pagedkv.plugins.lmcache is for LMCache 0.5.6"
    raise ImportError(f"{known}; the installed one has not what it is made of: {problem}") from problem

__all__ = ["PagedKVAdapter"]

LOGGER: Final = logging.getLogger("pagedkv.plugins.lmcache")
UNKNOWN_WEIGHTS: Final = bytes(32)
KEPT: Final = {StoreOutcome.STORED, StoreOutcome.PRESENT, StoreOutcome.NOT_ADMITTED}
"""Outcomes that LMCache need not hear of: what second-offer admission leaves out is no failure of a store."""
OBJECT_NBYTES: Final = 2**20
"""About; by which the number of entries is bounded."""
FEWEST_QUEUED_NBYTES: Final = 2**30
MOST_EVENTS: Final = 2**16
RESCAN_S: Final = 30.0


class Kind(StrEnum):
    """What a task is."""

    STORE = "store"
    LOOK_UP = "look up"
    LOAD = "load"


@dataclass(slots=True, eq=False)
class Task:
    """A task of LMCache until its result.

    Args:
        number, kind, keys, objects: LMCache's.
        loads: of a load, one for each key, once they are asked for.
        outcomes: of a store, by place of the key.
        num_open: keys without an answer.
    """

    number: int
    kind: Kind
    keys: list[ObjectKey]
    objects: list[MemoryObj] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    outcomes: dict[int, StoreOutcome] = field(default_factory=dict)
    num_open: int = 0


class PagedKVAdapter(L2AdapterInterface):
    """An L2 adapter in a folder, a Redis server or an object store.

    Args:
        params: the ``adapter_params``:

            - ``root``, ``redis``, ``object``: exactly one of them, and ``cap``, as of
              :func:`~pagedkv.tiers.tier_of_options`;
            - ``weights``: what names the weights: at least 32 hexadecimal digits, or the path of the checkpoint. None:
              what this process stores is served by this process alone, and the log says so;
            - further ones of the tier: ``admission``, ``eviction``, ``floor_nbytes``, ``deadline_s`` of a load,
              ``rescan_s`` (30 s), ``settings``.
        unused: LMCache's, such as ``l1_memory_desc``.

    Raises:
        ConfigurationError: not one medium, a medium that does not answer, an option that there is not.
        OSError: a file of the checkpoint cannot be read.
    """

    def __init__(self, params: Mapping[str, Any], **unused: object) -> None:
        del unused
        options = dict(params)
        weights: str | None = options.pop("weights", None)
        settings = {"max_events": MOST_EVENTS, **options.pop("settings", {})}
        tier = tier_of_options(settings=settings, **options)
        super().__init__(max_capacity_bytes=tier.cap_nbytes)
        if weights is None:
            LOGGER.warning('no "weights": what this process stores is served by this process alone')
        self._life = token_bytes(32) if weights is None else b""
        identity = _identity(UNKNOWN_WEIGHTS if weights is None else digest_of_weights("", "", weights))
        make_ready(of_stores(tier.eviction))
        config = tier.store_config(OBJECT_NBYTES)
        self._store = SharedStore(
            tier.open_body(tier.coding.identity_of(identity).fingerprint),
            identity,
            replace(config, max_queued_nbytes=max(config.max_queued_nbytes, FEWEST_QUEUED_NBYTES)),
            codec=tier.coding,
            rescan_s=RESCAN_S if tier.rescan_s is None else tier.rescan_s or None,
        )
        self._deadline_s = tier.deadline_s
        self._notifiers = {kind: create_event_notifier() for kind in Kind}
        self._lock = threading.Lock()
        self._numbers = count()
        self._done: dict[Kind, dict[int, Any]] = {kind: {} for kind in Kind}
        self._sizes: dict[bytes, tuple[ObjectKey, int]] = {}  # of what this process has stored
        self._is_closed = False
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pagedkv-lmcache", daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        """Return the descriptor that tells ends of stores."""
        return int(self._notifiers[Kind.STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that tells ends of look-ups."""
        return int(self._notifiers[Kind.LOOK_UP].fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that tells ends of loads."""
        return int(self._notifiers[Kind.LOAD].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue objects to be stored; LMCache leaves their memory as it is until the result. O(1)."""
        return self._submit(Kind.STORE, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the stores that ended since the last call."""
        with self._lock:
            done, self._done[Kind.STORE] = self._done[Kind.STORE], {}
        return done

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Queue a question for objects. Nothing is locked: what goes before it is loaded is a miss. O(1)."""
        del group_layout_descs
        return self._submit(Kind.LOOK_UP, keys)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return once for each object whether it is there; None: not yet."""
        return self._pop(Kind.LOOK_UP, task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing, as nothing is locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Queue objects to be loaded into LMCache's memory. O(1)."""
        return self._submit(Kind.LOAD, keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return once for each object whether it came; None: not yet."""
        return self._pop(Kind.LOAD, task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects at once for later lookups; their space is free a little later."""
        if not self._is_closed and keys:
            named = [self._run(key).key for key in keys]
            self._store.withdraw_keys(named)
            self._note_gone(named)

    def report_status(self) -> dict[str, Any]:
        """Tell whether the medium answers, and what the store counts."""
        seen = self._store.statistics()
        return {
            "is_healthy": not self._store.is_out_of_service,
            "type": type(self).__name__,
            "num_entries": seen.num_entries,
            "used_nbytes": seen.nbytes,
        }

    def close(self) -> None:
        """End all threads. What is queued is dropped; calls of the medium under way have some seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tasks.put(None)
        self._thread.join()
        self._store.close()
        for notifier in self._notifiers.values():
            notifier.close()

    def _submit(self, kind: Kind, keys: list[ObjectKey], objects: Iterable[MemoryObj] = ()) -> int:
        task = Task(next(self._numbers), kind, list(keys), list(objects))
        self._tasks.put(task)
        return task.number

    def _pop(self, kind: Kind, number: int) -> Any:  # noqa: ANN401 - the results of a kind
        with self._lock:
            return self._done[kind].pop(number, None)

    def _work(self) -> None:
        """Begin tasks, and end those that have their answers; an error ends its task alone, as a miss or a failure."""
        while (task := self._tasks.get()) is not None:
            try:
                if task.outcomes or task.loads or not task.keys:
                    self._finish(task)
                else:
                    self._begin(task)
            except Exception as problem:  # noqa: BLE001 - LMCache waits for the end of every task
                LOGGER.warning("a task to %s failed: %s", task.kind, problem)
                self._end(task, L2StoreResult(False, 0) if task.kind is Kind.STORE else Bitmap(len(task.keys)))  # noqa: FBT003 - LMCache's

    def _begin(self, task: Task) -> None:
        runs = [self._run(key) for key in task.keys]
        if task.kind is Kind.LOOK_UP:
            self._end(task, _bitmap(self._store.contains([run.key for run in runs]).tolist()))
            return
        task.num_open = len(runs)
        if task.kind is Kind.LOAD:
            task.loads = [self._store.load([run], self._deadline_s, lambda: self._answered(task)) for run in runs]
            return
        for place, (run, each) in enumerate(zip(runs, task.objects, strict=True)):
            self._store.offer([run], [[each.byte_array]], self._outcome_of(task, place))

    def _outcome_of(self, task: Task, place: int) -> Callable[[int, StoreOutcome], None]:
        def note(_: int, outcome: StoreOutcome) -> None:
            task.outcomes[place] = outcome
            self._answered(task)

        return note

    def _answered(self, task: Task) -> None:
        """Count an answer; the last one brings the task back into the queue."""
        with self._lock:
            task.num_open -= 1
            is_last = not task.num_open
        if is_last:
            self._tasks.put(task)

    def _finish(self, task: Task) -> None:
        if task.kind is Kind.LOAD:
            came = [self._copied(load, each) for load, each in zip(task.loads, task.objects, strict=True)]
            self._end(task, _bitmap(came))
            used = [key for key, is_there in zip(task.keys, came, strict=True) if is_there]
            if used:
                self._notify_keys_accessed(used)
        elif task.kind is Kind.LOOK_UP:
            self._end(task, Bitmap(0))
        else:
            self._tell_stored(task)
        self._look()

    def _copied(self, load: Load, into: MemoryObj) -> bool:
        """Copy a verified object into LMCache's memory; whether it came, and is of its size."""
        parts = load.wait().parts
        target = memoryview(into.byte_array).cast("B")
        if not parts or memoryview(parts[0][0]).nbytes != target.nbytes:
            return False
        target[:] = memoryview(parts[0][0]).cast("B")
        return True

    def _tell_stored(self, task: Task) -> None:
        sizes = [memoryview(each.byte_array).nbytes for each in task.objects]
        new = [place for place, outcome in sorted(task.outcomes.items()) if outcome is StoreOutcome.STORED]
        with self._lock:
            for place in new:
                self._sizes[self._run(task.keys[place]).key] = (task.keys[place], sizes[place])
        if new:
            self._notify_keys_stored([task.keys[place] for place in new], [sizes[place] for place in new])
        is_whole = KEPT.issuperset(task.outcomes.values())
        self._end(task, L2StoreResult(is_whole, sum(sizes[place] for place in new)))

    def _end(self, task: Task, result: L2StoreResult | Bitmap) -> None:
        """Report a task, and let go of LMCache's memory."""
        task.objects = []
        with self._lock:
            self._done[task.kind][task.number] = result
        self._notifiers[task.kind].notify()

    def _look(self) -> None:
        """Tell LMCache what the store has evicted, or refused as damaged."""
        changed = [bytes(key) for key in self._store.drain_events().keys]
        with self._lock:
            own = [key for key in dict.fromkeys(changed) if key in self._sizes]
        there = self._store.contains(own).tolist() if own else []
        self._note_gone([key for key, is_there in zip(own, there, strict=True) if not is_there])

    def _note_gone(self, named: Iterable[bytes]) -> None:
        with self._lock:
            gone = [self._sizes.pop(key) for key in named if key in self._sizes]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [nbytes for _, nbytes in gone])

    def _run(self, key: ObjectKey) -> Run:
        """Identify an object by LMCache's whole key and this adapter's life."""
        fields = [key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash.hex()]
        return Run.named(self._life + json.dumps(fields).encode())


def _bitmap(bits: Iterable[bool]) -> Bitmap:
    given = list(bits)
    bitmap = Bitmap(len(given))
    for place, bit in enumerate(given):
        if bit:
            bitmap.set(place)
    return bitmap


def _identity(weights: bytes) -> Identity:
    """Identify the bytes of objects, whose sizes are their own."""
    layout = GroupLayout("object", 1, "uint8", "C", (1,), (1,))
    versions = (("lmcache", str(getattr(lmcache, "__version__", "0.5.6"))),)
    return Identity((layout,), ModelIdentity("", weights, versions=versions))
