"""vLLM's real tiering manager with one secondary tier, driven as its scheduler drives it, without a GPU.

vLLM's CPU tier lies in shared memory. What a GPU would copy there is written by this class and follows from its key, so
each chunk that comes back can be judged. As a program it stores until it is killed::

    python tests/peers/vllm_tiers.py '{"type": "PagedKVTier", ...}' FIRST
"""

import json
import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CHUNK_NBYTES", "WEIGHTS", "Tiers", "content_of", "keys_of", "ours", "stock"]

CHUNK_NBYTES: Final = 8192
WEIGHTS: Final = "ab" * 32
WAITING: Final = (LookupResult.RETRY, LookupResult.HIT_PENDING)
STEPS: Final = 30_000
"""More steps than any answer takes: what has none by then never comes."""
STEP_S: Final = 0.001


def ours(root: object, cap: str | int | None = "1GiB", **options: object) -> dict[str, object]:
    """Configure our tier in a folder."""
    own = {"type": "PagedKVTier", "module_path": "pagedkv.plugins.vllm", "root": str(root), "cap": cap}
    return {**own, "weights": WEIGHTS, **options}


def stock(root: object) -> dict[str, object]:
    """Configure vLLM's own tier in a folder."""
    return {"type": "fs", "root_dir": str(root)}


def keys_of(numbers: Iterable[int]) -> list[OffloadKey]:
    """Name chunks."""
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in numbers]


def content_of(key: OffloadKey) -> npt.NDArray[np.uint8]:
    """Make up the bytes of a chunk, which follow from its key."""
    return np.random.default_rng(list(key)).integers(0, 256, CHUNK_NBYTES, dtype=np.uint8)


class Tiers(AbstractContextManager["Tiers"]):
    """The manager.

    Args:
        tier: the secondary tier, as in vLLM's JSON.
        num_chunks: of the CPU tier.
        model, dtype: as vLLM tells them.
        has_events: whether vLLM's KV events are on.
        own: further entries of ``kv_connector_extra_config``.
    """

    def __init__(
        self,
        tier: dict[str, object],
        *,
        num_chunks: int = 64,
        model: str = "a-model",
        dtype: str = "float16",
        has_events: bool = False,
        **own: object,
    ) -> None:
        extra = {"cpu_bytes_to_use": CHUNK_NBYTES * num_chunks, "secondary_tiers": [tier], **own}
        spec = TieringOffloadingSpec(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(16, ("layer",), 0),),
                worker_kv_bytes_per_block=CHUNK_NBYTES,
                enable_kv_cache_events=has_events,
                extra_config=extra,
                engine_id=uuid4().hex,
                model=OffloadingModelConfig(name=model, dtype=dtype),
                cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False),
            )
        )
        self.manager: Any = spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._lock: Any = getattr(self.manager, "lock", nullcontext())  # from vLLM 0.33 on
        self._requests = count()
        self._never = threading.Event()

    def step(self) -> None:
        """End a step, and wait as for a model."""
        with self._lock:
            self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        self._never.wait(STEP_S)

    def settle(self) -> None:
        """Step until no transfer is under way."""
        for _ in range(STEPS):
            if not self.manager.has_pending_work():
                return
            self.step()
        raise AssertionError("a transfer never ended")

    def request(self) -> ReqContext:
        """Begin a request."""
        context = ReqContext(req_id=str(next(self._requests)))
        with self._lock:
            self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        """End a request."""
        with self._lock:
            self.manager.on_request_finished(context)
        self.step()

    def store(self, keys: list[OffloadKey]) -> int:
        """Compute chunks, and store them in both tiers; return how many the CPU tier took."""
        context = self.request()
        with self._lock:
            prepared = self.manager.prepare_store(keys, context)
        new = [] if prepared is None else prepared.keys_to_store
        for key, chunk in zip(new, [] if prepared is None else prepared.store_spec.chunk_ids, strict=True):
            self.memory[chunk] = content_of(key)
        if prepared is not None:
            with self._lock:
                self.manager.complete_store(new, context)
        self.settle()
        self.finish(context)
        return len(new)

    def load(self, keys: list[OffloadKey]) -> list[bool | None]:
        """Ask for chunks; return for each: True and False, a hit that is right or wrong, or None, a miss."""
        context = self.request()
        found = [LookupResult.RETRY] * len(keys)
        for _ in range(STEPS):
            with self._lock:
                found = [self.manager.lookup(key, context) for key in keys]
            if not any(each in WAITING for each in found):
                break
            self.step()
        assert not any(each in WAITING for each in found), "a request would wait for ever"
        judged: list[bool | None] = [None] * len(keys)
        for place, key in enumerate(keys):
            if found[place] is LookupResult.HIT:
                with self._lock:
                    (chunk,) = self.manager.prepare_load([key], context).chunk_ids
                judged[place] = bool(np.array_equal(self.memory[chunk], content_of(key)))
                with self._lock:
                    self.manager.complete_load([key], context)
        self.finish(context)
        return judged

    def events(self) -> list[OffloadingEvent]:
        """Take the events of the secondary tier."""
        with self._lock:
            return list(self.tier.take_events())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.memory
        self.manager.shutdown()


def store_until_killed(tier: dict[str, object], first: int) -> None:
    """Store chunk after chunk, four at a time, and say which are stored."""
    with Tiers(tier) as tiers:
        for number in count(first, 4):
            tiers.store(keys_of(range(number, number + 4)))
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    store_until_killed(json.loads(sys.argv[1]), int(sys.argv[2]))
