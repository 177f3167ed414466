"""vLLM 0.32 and 0.33: a tier of its KV offloading that verifies what it serves, and an order of eviction that learns.

**A secondary tier**, within its bytes. ``vllm serve MODEL --kv-transfer-config``, with the tier among the others of
vLLM's ``TieringOffloadingSpec``::

    {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [
                {"type": "PagedKVTier", "module_path": "pagedkv.plugins.vllm", "root": "/var/cache/kv", "cap": "200GiB"}
            ],
        },
    }

A chunk of vLLM is an entry of a :class:`~pagedkv.tiers.SharedStore`, under the SHA-256 of its key. Its frame has the
whole key, the layout, the digest of the checkpoint, and a check of every byte::

    scheduler's thread     submit_store, submit_load, touch --> a queue          get_finished_jobs <-- done
    one thread here                                  offer, load <--'  '--> copy into vLLM's rows --^
    threads of the store                                 write, read and verify

vLLM calls a tier between two steps of its model, so a call here only puts into a queue or looks into a dictionary. It
takes no lock: a thread that holds one may itself wait for the interpreter, for milliseconds. vLLM's own
``AsyncLookupManager`` asks the store from another thread.

**The order of eviction** of vLLM's CPU tier is that of pagedkv's learning policy with, beside ``cpu_bytes_to_use``::

    "eviction_policy": "HazardPolicy", "cache_policy_module_path": "pagedkv.plugins.vllm"
"""

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from secrets import token_bytes
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import vllm

from pagedkv.errors import ConfigurationError
from pagedkv.tiers import (
    GroupLayout,
    Identity,
    Load,
    LoadEnd,
    ModelIdentity,
    Run,
    SharedStore,
    StoreIndex,
    StoreOutcome,
    digest_of_weights,
    tier_of_options,
)
from pagedkv.warming import make_ready, of_stores

try:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.config import OffloadingModelConfig
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as problem:
    known = "pagedkv.plugins.vllm is for vLLM 0.32 and 0.33"
    raise ImportError(f"{known}; {vllm.__version__} has not what it is made of: {problem}") from problem

__all__ = ["HazardPolicy", "PagedKVTier"]

LOGGER: Final = logging.getLogger("pagedkv.plugins.vllm")
UNKNOWN_WEIGHTS: Final = bytes(32)
KEPT: Final = {StoreOutcome.STORED, StoreOutcome.PRESENT, StoreOutcome.NOT_ADMITTED}
"""Outcomes that vLLM need not hear of: what second-offer admission leaves out is no failure of a store."""
FEWEST_QUEUED_NBYTES: Final = 2**28
QUEUED_SHARE: Final = 4
"""Offers beyond a fourth of vLLM's memory are dropped: what waits to be written cannot be evicted there."""
MOST_EVENTS: Final = 2**16
RESCAN_S: Final = 30.0


@dataclass(slots=True, eq=False)
class Job:
    """A job of vLLM under way.

    Args:
        told: what vLLM said of it.
        begun_s: when.
        keys: its keys, each once, in vLLM's order: the head of a prompt first.
        rows: the memory of each key's chunk.
        load: of a promotion, once it is asked for.
        runs: of a store, what its keys are to the store of this tier.
        num_open: of a store, keys without an outcome.
        num_lost: of a store, keys that were to be kept and were not.
    """

    told: TransferJob
    begun_s: float
    keys: list[OffloadKey] = field(default_factory=list)
    rows: list[memoryview] = field(default_factory=list)
    load: Load | None = None
    runs: list[Run] = field(default_factory=list)
    num_open: int = 0
    num_lost: int = 0


LOOK: Final = "look"
Task: TypeAlias = Job | list[OffloadKey] | str | None
"""A job to begin, or whose load has its answer; keys that were used; LOOK for what is gone; None: the end."""


class PagedKVTier(SecondaryTierManager):
    """A secondary tier in a folder, a Redis server or an object store.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: vLLM's.
        root, redis, object: exactly one of them: a folder, or the URL of a Redis server or of an object store, as of
            :class:`~pagedkv.tiers.FolderTier`, ``RedisTier`` and ``ObjectTier``.
        cap: most bytes, a number or text such as "200GiB"; a folder needs one.
        weights: what names the weights: at least 32 hexadecimal digits, or the path of the checkpoint. None: the
            folder of the model that vLLM serves, or its only revision in the cache of Hugging Face. Where there is
            none, and for caches in fp8, whose scales vLLM may compute while it runs, what this process stores is
            served by this process alone.
        forget_on_reset: whether a reset of vLLM's caches (new weights, sleep) ends all hits on what was stored before
            it; what is stored after it is then served by this process alone.
        locality, enable_kv_events: as of vLLM's own tier "fs"; removals are told as well.
        options: further ones of the tier: ``admission``, ``eviction``, ``floor_nbytes``, ``deadline_s`` of a promotion,
            ``rescan_s`` (30 s), ``settings``.

    Raises:
        ConfigurationError: not one medium, a medium that does not answer, an option that there is not.
        OSError: a file of the checkpoint cannot be read.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(  # noqa: PLR0913 - vLLM passes the keys of its JSON as keywords
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        root: str | None = None,
        redis: str | None = None,
        object: str | None = None,  # noqa: A002 - as above
        cap: str | int | None = None,
        weights: str | None = None,
        forget_on_reset: bool = True,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **options: Any,  # noqa: ANN401 - the tier checks them
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._memory = primary_kv_view.cast("B")
        self._forget_on_reset = forget_on_reset
        self._names: dict[bytes, OffloadKey] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._names = {}
        elif enable_kv_events:
            LOGGER.warning("tier %s: enable_kv_events does nothing while vLLM's KV events are off", tier_type)
        settings = {
            "max_queued_nbytes": max(FEWEST_QUEUED_NBYTES, primary_kv_view.nbytes // QUEUED_SHARE),
            "max_events": 0 if self._names is None else MOST_EVENTS,
            **options.pop("settings", {}),
        }
        tier = tier_of_options(root=root, redis=redis, object=object, cap=cap, settings=settings, **options)
        digest = _digest(offloading_spec.config.model, weights, tier_type)
        self._life = token_bytes(32) if digest is None else b""
        identity = _identity(offloading_spec, self.block_size_bytes, digest or UNKNOWN_WEIGHTS)
        make_ready(of_stores(tier.eviction))
        self._store = SharedStore(
            tier.open_body(tier.coding.identity_of(identity).fingerprint),
            identity,
            tier.store_config(self.block_size_bytes),
            codec=tier.coding,
            rescan_s=RESCAN_S if tier.rescan_s is None else tier.rescan_s or None,
        )
        self._deadline_s = tier.deadline_s
        self._changed = threading.Condition()
        self._num_submitted = 0  # of the scheduler's thread; what has ended is counted by others
        self._num_ended = 0
        self._done: deque[tuple[JobResult, list[OffloadKey]]] = deque()
        self._events: deque[OffloadingEvent] = deque()
        self._is_looking = False
        self._is_closing = False
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._lookup_manager = _Lookups(self._contains, tier_type)
        self._thread = threading.Thread(target=self._work, name=f"pagedkv-{tier_type}", daemon=True)
        self._thread.start()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Tell whether a chunk can be loaded; RETRY: the next step knows. O(1)."""
        is_there = self._lookup_manager.lookup(key, req_context)
        return LookupResult.RETRY if is_there is None else LookupResult.HIT if is_there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue chunks to be stored; vLLM leaves their memory as it is until the job's result. O(1)."""
        self._submit(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue chunks to be loaded into vLLM's memory. O(1)."""
        self._submit(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call. What was not loaded is a miss for the requests that wait."""
        results = []
        while self._done:
            result, missing = self._done.popleft()
            self._lookup_manager.mark_miss(missing)
            results.append(result)
        return results

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks as used. O(keys)."""
        del req_context
        self._tasks.put(list(keys))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for each chunk when it is computed."""
        del req_context
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what a request looked up."""
        self._lookup_manager.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the step's lookups off."""
        del context
        self._lookup_manager.flush()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield what whole jobs have stored since the last call, and what is there no more: a call later, at most."""
        if self._names is None:
            return
        if not self._is_looking:
            self._is_looking = True
            self._tasks.put(LOOK)
        while self._events:
            yield self._events.popleft()

    def drain_jobs(self) -> None:
        """Wait until no job is under way, as vLLM does before it resets its caches."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended == self._num_submitted)
        if self._forget_on_reset:
            self._life = token_bytes(32)
        if self._forget_on_reset and self._names is not None:
            with self._changed:
                gone = list(self._names.values())
                self._names.clear()
                self._tell(gone, removed=True)

    def shutdown(self) -> None:
        """End all threads. What is queued is dropped; calls of the medium under way have some seconds."""
        self._is_closing = True
        self._lookup_manager.shutdown()
        self._tasks.put(None)
        self._thread.join()
        self._store.close()
        self._memory.release()  # or vLLM could not unmap it

    def _submit(self, told: TransferJob) -> None:
        self._num_submitted += 1
        self._tasks.put(Job(told, time.monotonic()))

    def _work(self) -> None:
        """Begin jobs, and copy what was loaded; an error ends its job alone."""
        while (task := self._tasks.get()) is not None:
            try:
                if isinstance(task, str):
                    self._look()
                elif isinstance(task, list):
                    self._store.select_for_offer([self._run(key) for key in task])
                elif self._is_closing:
                    self._end(task, [])
                elif task.load is not None:
                    self._end(task, self._copied(task, task.load))
                elif task.told.is_promotion:
                    self._load(task)
                else:
                    self._offer(task)
            except Exception as problem:  # noqa: BLE001 - vLLM waits for the end of every job
                LOGGER.warning("tier %s: a call failed: %s", self.tier_type, problem)
                if isinstance(task, Job):
                    self._end(task, [])

    def _offer(self, job: Job) -> None:
        """Offer the chunks of a job; outcomes come from the store's threads, when nothing reads the memory any more."""
        self._read(job)
        job.num_open = len(job.keys)
        if not job.keys:
            self._end(job, [])
            return

        def answered(place: int, outcome: StoreOutcome) -> None:
            del place
            with self._changed:
                job.num_open -= 1
                job.num_lost += outcome not in KEPT
                is_last = not job.num_open
            if is_last:
                self._end(job, [] if job.num_lost else job.keys)

        job.runs = [self._run(key) for key in job.keys]
        self._store.offer(job.runs, [[row] for row in job.rows], answered)

    def _load(self, job: Job) -> None:
        """Ask for the chunks of a job; the answer brings the job back into the queue."""
        self._read(job)
        runs = [self._run(key) for key in job.keys]
        job.load = self._store.load(runs, self._deadline_s, lambda: self._tasks.put(job))

    def _copied(self, job: Job, load: Load) -> list[OffloadKey]:
        """Copy the verified chunks that came; return their keys, the leading ones of the job."""
        loaded = load.wait()
        for row, (part,) in zip(job.rows, loaded.parts, strict=False):
            np.asarray(row)[:] = np.asarray(part)  # other threads can run meanwhile
        if loaded.cause is LoadEnd.CORRUPT:
            LOGGER.warning("tier %s: refused what the medium returned: %s", self.tier_type, self._store.last_problem)
        return job.keys[: loaded.num_runs]

    def _read(self, job: Job) -> None:
        """Take a job's keys and the memory of their chunks. Raises ConfigurationError: a chunk is outside of it."""
        size, num_rows = self.block_size_bytes, self._memory.nbytes // self.block_size_bytes
        chunks = dict(zip(job.told.keys, job.told.chunk_ids.tolist(), strict=True))
        outside = [chunk for chunk in chunks.values() if not 0 <= chunk < num_rows]
        if outside:
            raise ConfigurationError(f"chunks {outside[:4]} are not among vLLM's {num_rows}")
        job.keys = list(chunks)
        job.rows = [self._memory[chunk * size : (chunk + 1) * size] for chunk in chunks.values()]

    def _end(self, job: Job, done: list[OffloadKey]) -> None:
        """Report a job, and let go of vLLM's memory."""
        is_promotion, is_whole = job.told.is_promotion, len(done) == len(job.told.keys)
        came = set(done)
        missing = [key for key in job.told.keys if key not in came] if is_promotion else []
        result = JobResult(
            job.told.job_id,
            is_whole,
            successful_keys=tuple(done) if done and is_promotion and not is_whole else None,
            transfer_time=time.monotonic() - job.begun_s,
            transfer_bytes=len(done) * self.block_size_bytes,
        )
        job.rows = []
        with self._changed:
            self._done.append((result, missing))
            if self._names is not None and done and not is_promotion:
                self._names.update(zip((run.key for run in job.runs), done, strict=True))
                self._tell(done, removed=False)
            self._num_ended += 1
            self._changed.notify_all()

    def _contains(self, keys: list[OffloadKey]) -> list[bool]:
        """Return for each key whether it can be loaded; of the lookups' thread."""
        found: list[bool] = self._store.contains([self._key(key) for key in keys]).tolist()
        return found

    def _key(self, key: OffloadKey) -> bytes:
        """Return the key of a chunk's entry."""
        return self._run(key).key

    def _run(self, key: OffloadKey) -> Run:
        """Identify a chunk by vLLM's whole key: whoever knows another life of this tier does not find it."""
        return Run.named(self._life + key)

    def _look(self) -> None:
        """Tell what is in the store no more. The store is asked without our lock, since its threads take ours."""
        self._is_looking = False
        changed = [bytes(key) for key in self._store.drain_events().keys]
        names = self._names
        assert names is not None
        while True:
            with self._changed:
                told, num_ended = [key for key in dict.fromkeys(changed) if key in names], self._num_ended
            is_there: list[bool] = self._store.contains(told).tolist() if told else []
            with self._changed:
                if self._num_ended == num_ended:  # else one of them may have been stored again
                    gone = [key for key, there in zip(told, is_there, strict=True) if not there and key in names]
                    self._tell([names.pop(key) for key in gone], removed=True)
                    return

    def _tell(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys:
            event = OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality)
            self._events.append(event)


class _Lookups(AsyncLookupManager):
    """vLLM's own lookups without waiting, of a tier's store."""

    def __init__(self, contains: Callable[[list[OffloadKey]], list[bool]], tier_type: str) -> None:
        self._contains = contains
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Look keys up, in vLLM's thread."""
        del req_context
        return self._contains(keys)


def _identity(spec: OffloadingSpec, row_nbytes: int, weights: bytes) -> Identity:
    """Identify the bytes of a chunk, by all that vLLM's own tiers name their folders after, and more."""
    config = spec.config
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    layout = GroupLayout("chunk", config.cache.tokens_per_hash, config.model.dtype, "C", (row_nbytes,), (1,))
    versions = (
        ("vllm", vllm.__version__),
        ("config", json.dumps(mapper.get_run_config(), sort_keys=True)),
        ("rank", str(mapper.rank)),
        ("layout", str(config.kv_cache_layout)),
    )
    return Identity((layout,), ModelIdentity(config.model.name, weights, versions=versions))


def _digest(model: OffloadingModelConfig, weights: str | None, tier_type: str) -> bytes | None:
    """Return what names the weights outside this process; None, and a line in the log, where nothing does."""
    try:
        return digest_of_weights(model.name, model.dtype, weights)
    except ConfigurationError as problem:
        if weights is not None:
            raise
        why = 'so what this process stores ends with it: the option "weights" keeps it'
        LOGGER.warning("tier %s: %s, %s", tier_type, problem, why)
        return None


NO_ENTRY: Final = 0


@dataclass(slots=True)
class Chunk:
    """A chunk of vLLM's CPU tier.

    Args:
        status: vLLM's: its place, and how many transfers read it.
        entry: in the index, with a reference while it cannot be evicted, and while it waits.
        position: of its end in the prompt that brought it; 0 where that is unknown.
        parent: the chunk before it, in that prompt.
        is_named: whether its content has come.
    """

    status: ChunkStatus
    entry: int
    position: int = 0
    parent: OffloadKey | None = None
    is_named: bool = False


@dataclass(slots=True)
class Order:
    """What one request has asked for: before each chunk stands the one that it continues."""

    owner: object
    parents: dict[OffloadKey, OffloadKey | None] = field(default_factory=dict)
    last: dict[bytes, OffloadKey] = field(default_factory=dict)


class HazardPolicy(CachePolicy):
    """The order of eviction of vLLM's CPU tier: what will least likely be asked for again goes first, as it has learnt.

    Chunks that transfers hold are entries with a reference, so none of them is evicted. What an unfinished request has
    brought waits: it is evicted last, and its tail before its head.

    Args:
        cache_capacity: chunks of the CPU tier.

    Cost: some microseconds a chunk; the loops are compiled when it is built, unless they are on disk already.
    """

    policy: ClassVar[str] = "hazard"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        make_ready(of_stores(self.policy))
        self.clear()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Find a chunk. O(1)."""
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.status

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """Add a chunk, whose content is yet to come unless its count says otherwise. O(1)."""
        name = hashlib.sha256(key).digest()
        added = self._chunks[key] = Chunk(chunk, self._index.take(name, 1))
        if req_context is not None:
            added.position = req_context.get_offload_key_position(key) or 0
            added.parent = self._order_of(req_context).parents.get(key)
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk, such as one whose content did not come. O(1)."""
        chunk = self._chunks[key]
        if not chunk.status.ref_cnt:
            self.mark_non_evictable(key)
        self._release([key])
        del self._chunks[key]
        if not chunk.is_named:
            self._index.abandon(chunk.entry)
            return
        del self._keys[self._index.key_of(chunk.entry)]
        self._index.drop(chunk.entry)
        self._index.let_go(chunk.entry)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks of one prompt as used, given head first. O(keys)."""
        del req_context
        self._use(keys, frozenset())

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing: what comes again after its eviction is seen when its content has come."""

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note the order of a request's chunks, group by group. O(keys)."""
        order = self._order_of(req_context)
        for key in keys:
            group = key[-4:]
            order.parents[key] = order.last.get(group)
            order.last[group] = key

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Count what a request used, and let its tail be evicted before its head. O(keys)."""
        del reused_keys
        self._use(order_request_keys(key_groups, req_context), insertion_only_keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict ``n`` chunks that are not in ``protected``; None, and nothing changed: there are not as many."""
        can_go = [key for key in protected if key in self._chunks and not self._chunks[key].status.ref_cnt]
        if self._num_evictable - len(can_go) < n:
            return None
        kept = _entries(*(self._chunks[key] for key in can_go))
        self._index.hold(kept)
        waiting = [key for key in self._waiting if key not in protected and not self._chunks[key].status.ref_cnt]
        if self._num_evictable - len(can_go) - len(waiting) < n:
            self._release(sorted(waiting, key=lambda key: self._chunks[key].position, reverse=True))
        names = [self._index.key_of(self._index.evict()) for _ in range(n)]
        for entry in kept.tolist():
            self._index.let_go(entry)
        self._num_evictable -= n
        keys = [self._keys.pop(name) for name in names]
        return [(key, self._chunks.pop(key).status) for key in keys]

    def clear(self) -> None:
        """Remove all chunks, and what was learnt. O(capacity)."""
        self._index = StoreIndex(max(1, self.cache_capacity), self.policy)
        self._chunks: dict[OffloadKey, Chunk] = {}
        self._waiting: dict[OffloadKey, None] = {}
        self._keys: dict[bytes, OffloadKey] = {}
        self._num_evictable = 0

    def mark_evictable(self, key: OffloadKey) -> None:
        """Let go of a chunk that nothing reads any more, or whose content has come."""
        chunk = self._chunks[key]
        if not chunk.is_named:
            parent = None if chunk.parent is None else self._chunks.get(chunk.parent)
            self._index.publish(chunk.entry, NO_ENTRY if parent is None or not parent.is_named else parent.entry)
            self._keys[self._index.key_of(chunk.entry)] = key
            chunk.is_named = True
            self._waiting[key] = None
        else:
            self._index.let_go(chunk.entry)
        self._num_evictable += 1

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Hold a chunk that is about to be read."""
        self._num_evictable -= 1
        self._index.hold(_entries(self._chunks[key]))

    def _use(self, keys: Iterable[OffloadKey], inserted: Collection[OffloadKey]) -> None:
        """Note a hit on each chunk that was not inserted by this request, and put all of them at the back."""
        self._index.advance(time.monotonic())
        named = [key for key in keys if key in self._chunks and self._chunks[key].is_named]
        self._index.use(_entries(*(self._chunks[key] for key in named if key not in inserted)))
        self._index.hold(_entries(*(self._chunks[key] for key in named if key in inserted)))
        self._release(named)
        self._index.let_go_chain(_entries(*(self._chunks[key] for key in named)))

    def _release(self, keys: Iterable[OffloadKey]) -> None:
        """Let chunks wait no longer."""
        for key in keys:
            if key in self._waiting:
                del self._waiting[key]
                self._index.let_go(self._chunks[key].entry)

    def _order_of(self, req_context: ReqContext) -> Order:
        """Return what a request has asked of this policy."""
        order: Order | None = req_context.get_state(Order)
        if order is None or order.owner is not self:
            order = Order(self)
            req_context.set_state(order)
        return order


def _entries(*chunks: Chunk) -> npt.NDArray[np.int32]:
    return np.array([chunk.entry for chunk in chunks], np.int32)
