"""vLLM's `KVCacheManager` on a `BlockSpace`: what vLLM's scheduler and its own suites call, answered by the space.

It is loaded into the process of vLLM's suites, in which ``tests`` is vLLM's folder, so it imports nothing of ours but
pagedkv. Blocks, tables, hits, references, evictions and events are the space's. The adapter only translates:

==========================================  ====================================================================
vLLM                                        BlockSpace
==========================================  ====================================================================
a request's first slots                     ``allocate``, with the answer of ``match`` that its lookup got
further slots                               ``append``; drafts and placeholders are lookahead slots until accepted
slots of tokens that a connector loads      ``num_external_tokens``; in the background: lookahead, ``mark_computed``
a step, its outputs processed               ``plan_step`` and ``acknowledge``, by the tokens that each request counts
blocks that a connector reads               ``hold`` and ``release``
its hash of a block                         the digest of the same tokens and keys (:mod:`vllm_core_views`)
==========================================  ====================================================================

A view such as ``block_pool.blocks[7].ref_cnt`` asks the space each time. Structures that a view cannot give (the links
of vLLM's free queue, its map of hashes, blocks taken from its pool without a request) are not here.
"""
# ruff: noqa: ANN401, ARG002, D102, FBT001, FBT002, PLR0913, PLR0917 - methods and values are vLLM's, without types here

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, partial_hash_hits_enabled
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_mamba_prefill_checkpoint_position,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus
from vllm_core_views import Block, BlockPool, Groups, Names, NotOfferedError, keys_of

from pagedkv import (
    AllocStatus,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    SpaceConfig,
)
from pagedkv.wire.encoding import BatchEncoder, changes_of

MOST_ROWS: Final = 1024


def rule_of(spec: Any, *, num_ahead: int, caching: bool, num_ranks: int) -> Any:
    """Return the space's rule for one of vLLM's specs."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    size = spec.block_size * (num_ranks if spec.dcp_sharded else 1)
    kind = type(spec)
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec | SinkFullAttentionSpec):
        return FullAttention(size, num_ahead=num_ahead)
    if isinstance(spec, SlidingWindowSpec):
        if getattr(spec, "bounded_replay", False) or spec.extra_retained_tokens:
            raise NotOfferedError(f"{kind.__name__} that is replayed, or keeps more than its window")
        return SlidingWindow(spec.sliding_window, size, num_ahead=num_ahead)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ChunkedLocal(spec.attention_chunk_size, size)
    if isinstance(spec, MambaSpec):
        if spec.num_speculative_blocks:
            raise NotOfferedError("MambaSpec with states of drafts")
        return RecurrentState(spec.block_size, pool="device", prefix_caching=caching)
    raise NotOfferedError(kind.__name__)


@dataclass(slots=True)
class Known:
    """A request that has a row.

    Args:
        request: vLLM's; row: the space's; token_ids: those that the row was given.
        is_loading: whether a connector fills its slots in the background.
        num_planned: leading tokens that a plan has.
    """

    request: Any
    row: int
    token_ids: list[int]
    is_loading: bool = False
    num_planned: int = 0


class KVCacheManager:
    """Takes the place of vLLM's class of this name.

    Attributes:
        num_actions: rows allocated and grown in any space of this process, for the suites' count of cases.
    """

    num_actions = 0

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: object = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> None:
        if kv_cache_config.hisparse_host_num_blocks is not None or num_prefill_lookahead > 1:
            raise NotOfferedError("pages on the host of a request that runs, or chains of MTP")
        groups = kv_cache_config.kv_cache_groups
        interval = kv_cache_config.prefix_cache_retention_interval
        drafting = {index for index, group in enumerate(groups) if group.is_eagle_group} or set(range(len(groups)))
        ahead = int(num_hash_lookahead_tokens or use_eagle)
        self.hits_inside = enable_caching and partial_hash_hits_enabled(groups, hash_block_size, dcp_world_size)
        self.hash_block_size = hash_block_size
        self._writes_inside = any(
            isinstance(group.kv_cache_spec, MambaSpec) and group.kv_cache_spec.num_prefill_checkpoint_blocks
            for group in groups
        )
        self.max_model_len, self.kv_cache_config = max_model_len, kv_cache_config
        self.scheduler_block_size = scheduler_block_size
        self.enable_caching, self.log_stats = enable_caching, log_stats
        self.space = BlockSpace(
            SpaceConfig(
                groups=tuple(
                    rule_of(
                        group.kv_cache_spec,
                        num_ahead=ahead if enable_caching and index in drafting else 0,
                        caching=enable_caching,
                        num_ranks=dcp_world_size,
                    )
                    for index, group in enumerate(groups)
                ),
                num_blocks=kv_cache_config.num_blocks,
                max_sequences=MOST_ROWS,
                max_tokens=max_model_len,
                watermark=0.0,
                prefix_caching=enable_caching,
                shed_windows=interval is not None,
                retention_interval=interval or 0,
                min_partial_hit=hash_block_size if self.hits_inside else 0,
                in_order=True,
                events=enable_kv_cache_events and enable_caching,
            )
        )
        self.rows: dict[str, Known] = {}
        self.names = Names(self.space, hash_block_size)
        self.block_pool = BlockPool(self, kv_cache_config.num_blocks)
        self.coordinator = Groups(self)
        self.num_kv_cache_groups = len(groups)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in groups))
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.mamba_shared_prefix_checkpoint = False
        self.retained_hit_group_ids = ()
        self._is_scheduled = False
        self._max_chunk = max_in_flight_tokens or max_model_len
        self._hits: dict[str, Any] = {}
        self._steps: deque[tuple[Any, list[tuple[int, int, int]]]] = deque()
        self._copies: list[KVCacheBlockCopy] = []
        self._new_ids: list[int] = []
        self._offers: dict[str, list[tuple[int, int, int]]] = {}
        self._encoder = BatchEncoder(self.space.config.groups, "suite")

    # Questions

    @property
    def usage(self) -> float:
        return self.block_pool.get_usage()

    def named_blocks(self) -> dict[int, tuple[bytes, int]]:
        """Return digest and group of every named block, by its id."""
        if not self.enable_caching:
            return {}
        self.go_on()
        stored = self.space.stored_blocks()
        return {
            int(number): (stored.digests[place].tobytes(), int(stored.groups[place]))
            for place, number in enumerate(stored.block_ids)
        }

    def table(self, row: int, group: int) -> list[Block]:
        """Return a row's blocks in one group."""
        return [self.block_pool.blocks[number] for number in self.space.block_ids(row, group)]

    def num_lacking(self, row: int | None, num_slots: int, hit: Any = None) -> int:
        """Count the blocks that a row, or a new row with a hit, still takes for so many slots."""
        lacking = 0
        for group, rule in enumerate(self.space.config.groups):
            size = (
                rule.block_size if self.enable_caching or not isinstance(rule, RecurrentState) else self.max_model_len
            )
            has = 0 if row is None else int(self.space.num_blocks([row], group)[0])
            if hit is not None:
                has = len(hit.block_ids[group]) - hit.num_free[group]
            lacking += max(0, math.ceil(num_slots / size) - has)
        return lacking

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        known = self.rows.get(request_id)
        if known is None:
            return self.empty_kv_cache_blocks
        return self.create_kv_cache_blocks(
            tuple(self.table(known.row, group) for group in range(self.num_kv_cache_groups))
        )

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        return tuple(
            ids if isinstance(rule, RecurrentState) else ids[: math.ceil(num_computed_tokens / rule.block_size)]
            for ids, rule in zip(self.get_block_ids(request_id), self.space.config.groups, strict=True)
        )

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[Block], ...]) -> KVCacheBlocks:
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        return [0] * self.num_kv_cache_groups

    def estimate_cached_tokens(self, request: Any) -> int:
        """Count the leading tokens of a request that fill blocks of every group."""
        known = self.rows.get(request.request_id)
        if known is None or not self.enable_caching:
            return 0
        num_tokens = self.space.num_tokens(known.row)
        return min(num_tokens // size * size for size in self.coordinator.group_block_sizes)

    # Hits

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, int, int]:
        self.go_on()
        self.names.see(request)
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        tokens = np.array(request.all_token_ids, np.int32)
        keys = keys_of(request)
        hit = self.space.match(tokens, keys=keys, max_hit_tokens=max_cache_hit_length)
        self._hits[request.request_id] = hit
        ids = [of_group.tolist() for of_group in hit.block_ids]
        for tail in hit.tails:
            ids[tail.group].append(tail.block)
        blocks = tuple([self.block_pool.blocks[number] for number in of_group] for of_group in ids)
        longest = self._longest_of_any(tokens, keys, hit)
        return self.create_kv_cache_blocks(blocks), hit.num_tokens, longest if longest > hit.num_tokens else 0

    def _longest_of_any(self, tokens: Any, keys: RequestKeys, hit: Any) -> int:
        """Return how much any group has cached of what the groups that keep all of it have."""
        lengths = self.space.match_each(tokens, keys=keys)
        groups = self.space.config.groups
        whole = [length for length, rule in zip(lengths, groups, strict=True) if isinstance(rule, FullAttention)]
        return min(hit.max_hit_tokens, *whole, max(lengths)) if whole else 0

    def get_computed_blocks_for_connector(
        self,
        request: Any,
        max_cache_hit_length: int | None = None,
    ) -> tuple[Any, int, int, bool]:
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks:
        cut: list[list[Block]] = []
        for of_group, rule in zip(blocks.blocks, self.space.config.groups, strict=True):
            num_blocks, inside = divmod(num_computed_tokens, rule.block_size)
            assert not inside
            assert isinstance(rule, RecurrentState) or num_blocks <= len(of_group)
            cut.append(list(of_group[:num_blocks]))
        return self.create_kv_cache_blocks(tuple(cut))

    # Slots

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        if num_new_tokens == 0 and num_external_computed_tokens == 0 and num_new_computed_tokens == 0:
            raise ValueError("num_new_tokens must be greater than 0 when there are no computed tokens to adopt")
        if num_encoder_tokens:
            raise NotOfferedError("blocks for an encoder's tokens")
        self.names.see(request)
        is_held_back = has_scheduled_reqs and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        watermark = self.watermark_blocks if is_held_back else 0
        beside = reserved_blocks + watermark
        num_local = request.num_computed_tokens + num_new_computed_tokens
        num_computed = min(num_local + num_external_computed_tokens, self.max_model_len)
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        num_known = min(num_computed + num_new_tokens, request.num_tokens)
        known = self.rows.get(request.request_id)
        if known is not None:
            return self._grow(known, num_known, num_slots, beside)
        self.go_on()
        hit = self._hit_of(request, num_new_computed_tokens)
        if full_sequence_must_fit and not self._fits_whole(request, hit, watermark):
            return None
        if beside and self.num_lacking(None, num_slots, hit) + beside > self.space.num_free_blocks():
            return None
        if delay_cache_blocks:
            num_known, num_external = min(num_local + 1, num_slots), 0
        else:
            num_external = num_computed if num_external_computed_tokens else 0
        tokens = list(request.all_token_ids[:num_known])
        answer = self.space.allocate(
            np.array(tokens, np.int32),
            keys=keys_of(request),
            num_lookahead=max(0, num_slots - num_known),
            num_external_tokens=num_external,
            match=hit,
        )
        if isinstance(answer, Shortage):
            return None
        if not num_external:
            assert answer.num_hit_tokens == num_new_computed_tokens, "another hit than that which was told"
        KVCacheManager.num_actions += 1
        known = Known(request, answer.row, tokens, is_loading=delay_cache_blocks)
        self.rows[request.request_id] = known
        self._keep_states(known, num_computed, num_known)
        self._offer_states(known, num_computed, num_known)
        before = [math.ceil(num_computed / size) for size in self.coordinator.group_block_sizes]
        for tail in hit.tails:  # the row goes on in a copy of it
            before[tail.group] = tail.logical_index
        return self._new_blocks(answer.row, before)

    def _hit_of(self, request: Any, num_tokens: int) -> Any:
        hit = self._hits.pop(request.request_id, None)
        if hit is not None and hit.num_tokens == num_tokens and hit.prompt_length == request.num_tokens:
            return hit
        tokens = np.array(request.all_token_ids, np.int32)
        return self.space.match(tokens, keys=keys_of(request), max_hit_tokens=num_tokens)

    def _fits_whole(self, request: Any, hit: Any, watermark: int) -> bool:
        tokens = np.array(request.all_token_ids[: self.max_model_len], np.int32)
        size = max(self.coordinator.group_block_sizes)
        reserved = math.ceil(watermark / self.num_kv_cache_groups) * size
        keys, chunk = keys_of(request), self._max_chunk
        status = self.space.can_allocate(tokens, keys=keys, match=hit, max_chunk=chunk, num_reserved=reserved)
        return status is AllocStatus.OK

    def _grow(self, known: Known, num_known: int, num_slots: int, beside: int) -> KVCacheBlocks | None:
        self._follow(known)
        self.go_on()
        row = known.row
        if beside and self.num_lacking(row, num_slots) + beside > self.space.num_free_blocks():
            return None
        before = [int(self.space.num_blocks([row], group)[0]) for group in range(self.num_kv_cache_groups)]
        if not self._append(known, num_known, num_slots):
            return None
        return self._new_blocks(row, before)

    def _append(self, known: Known, num_known: int, num_slots: int) -> bool:
        new = list(known.request.all_token_ids[len(known.token_ids) : num_known])
        length = len(known.token_ids) + len(new)
        self._keep_states(known, len(known.token_ids), length)
        rows = np.array([known.row], np.int32)
        tokens = np.array(new, np.int32)
        shortage = self.space.append(rows, tokens, [len(new)], num_lookahead=max(0, num_slots - length))
        if shortage is not None:
            return False
        KVCacheManager.num_actions += 1
        self._offer_states(known, len(known.token_ids), length)
        known.token_ids += new
        return True

    def _keep_states(self, known: Known, start: int, end: int) -> None:
        """Keep the states at a prompt's last boundary of hashes, if a chunk ends there or backends write inside one."""
        if not self.hits_inside or known.is_loading:
            return
        num_prompt, size = known.request.num_prompt_tokens, self.hash_block_size
        position = get_mamba_prefill_checkpoint_position(num_prompt, size, drop_eagle_block=False)
        if start < position <= end and (position == end or self._writes_inside):
            kept = self.space.keep_states(known.row, position)
            if not isinstance(kept, Shortage):
                offers = [(each.group, each.block_id, position) for each in kept]
                self._offers.setdefault(known.request.request_id, []).extend(offers)

    def _offer_states(self, known: Known, start: int, end: int) -> None:
        """Offer the states that a chunk leaves at the end of an interval."""
        for group, rule in enumerate(self.space.config.groups):
            if isinstance(rule, RecurrentState) and self.enable_caching and start < end and end % rule.block_size == 0:
                block_id = self.space.block_ids(known.row, group)[end // rule.block_size - 1]
                self._offers.setdefault(known.request.request_id, []).append((group, block_id, end))

    def _follow(self, known: Known) -> None:
        """Roll a row back to where its request's tokens are others now, as of a session that goes on."""
        now = known.request.all_token_ids
        common = next(
            (place for place, token in enumerate(known.token_ids) if place >= len(now) or now[place] != token),
            len(known.token_ids),
        )
        if common < len(known.token_ids):
            self.space.truncate([known.row], [common])
            del known.token_ids[common:]
            known.num_planned = min(known.num_planned, common)

    def _new_blocks(self, row: int, before: Sequence[int]) -> KVCacheBlocks:
        return self.create_kv_cache_blocks(tuple(self.table(row, group)[first:] for group, first in enumerate(before)))

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Name what is known of a request's computed tokens."""
        known = self.rows.get(request.request_id)
        if known is None:
            return
        num_known = min(num_computed_tokens, request.num_tokens)
        if num_known > len(known.token_ids):
            self._append(known, num_known, num_known)
        if known.is_loading:
            self._close()
            self.space.mark_computed([known.row])
            known.is_loading = False

    # The end of requests

    def free(self, request: Any) -> None:
        self._hits.pop(request.request_id, None)
        known = self._leaving(request)
        if known is not None:
            self.space.free([known.row])

    def _leaving(self, request: Any) -> Known | None:
        """Forget a request; what it says that it has computed is planned before."""
        self._offers.pop(request.request_id, None)
        known = self.rows.pop(request.request_id, None)
        if known is not None and (not self._is_scheduled or request.num_computed_tokens > known.num_planned):
            self._close()
        return known

    def pop_blocks_for_free(self, request: Any) -> list[Block]:
        known = self._leaving(request)
        if known is None:
            return []
        ids = [number for group in range(self.num_kv_cache_groups) for number in self.space.block_ids(known.row, group)]
        return self.block_pool.leave_later(ids, known.row)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Empty the cache; as vLLM's, not while requests have blocks."""
        if self.space.num_live_blocks():
            return False
        self.space.reset_prefix_cache()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # Steps

    def new_step_starts(self) -> None:
        self._is_scheduled = True
        self._close()
        self._settle()

    def remove_skipped_blocks(self, *_args: object, **_others: object) -> None:
        """Let windows slide behind what has been processed."""
        self._close()
        self._settle()

    def go_on(self) -> None:
        """Acknowledge what was processed; without a scheduler, which begins steps, each call is in one of its own."""
        if not self._is_scheduled:
            self._close()
        self._settle()

    def _close(self) -> None:
        """Plan what was allocated since the last plan."""
        plan = self.space.plan_step()
        rows, ends = plan.compute.rows.tolist(), plan.compute.ends.tolist()
        of_rows = [(row, self.space.generation(row), end) for row, end in zip(rows, ends, strict=True)]
        self._steps.append((plan.step_id, of_rows))
        for known in self.rows.values():
            known.num_planned = len(known.token_ids)
        for moves in plan.copies:
            pairs = zip(moves.src_ids.tolist(), moves.dst_ids.tolist(), strict=True)
            self._copies += [KVCacheBlockCopy(source, target) for source, target in pairs]
        for new in plan.new_blocks:
            self._new_ids += new.block_ids.tolist()

    def _settle(self) -> None:
        """Acknowledge the steps whose outputs the scheduler has processed."""
        processed = {
            known.row: known.request.num_computed_tokens - known.request.num_in_flight_tokens
            for known in self.rows.values()
        }
        while self._steps:
            step_id, of_rows = self._steps[0]
            if any(
                end > processed.get(row, end) and self.space.generation_or_none(row) == generation
                for row, generation, end in of_rows
            ):
                return
            self.space.acknowledge(step_id)
            self._steps.popleft()

    def take_new_block_ids(self) -> list[int]:
        """Drain the blocks whose content is stale, for zeroing."""
        self._close()
        taken, self._new_ids = self._new_ids, []
        return taken if self.kv_cache_config.needs_kv_cache_zeroing else []

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        for ids, size in zip(self.get_block_ids(request_id), self.coordinator.group_block_sizes, strict=True):
            self._new_ids += ids[start_token // size :]

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[Block]]:
        """Drain the copies of the step; their sources are held by the space."""
        self._close()
        taken, self._copies = self._copies, []
        return taken, []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Drain the states that the step leaves at boundaries, for a connector: group, block, tokens."""
        taken, self._offers = self._offers, {}
        return taken

    def finalize_partial_tail_offloads(self, request: object) -> list[tuple[int, int, int]]:
        return []

    # Events and statistics

    def take_events(self) -> list[Any]:
        """Drain events in vLLM's form, with its hashes where they are known."""
        if not self.space.config.events:
            return []
        changes = changes_of(self.space, self.space.drain_events())
        events = msgspec.msgpack.Decoder(KVEventBatch).decode(self._encoder.batch(0.0, changes)).events
        for event in events:
            group = getattr(event, "group_idx", None) or 0
            for name in ("block_hashes", "parent_block_hash"):
                value = getattr(event, name, None)
                if isinstance(value, list):
                    setattr(event, name, [self.names.hash_of(each, group) for each in value])
                elif value is not None:
                    setattr(event, name, self.names.hash_of(value, group))
        return list(events)

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        stats = self.prefix_cache_stats
        if self.log_stats:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        if self.prefix_cache_stats is None or not self.prefix_cache_lookup_enabled(request):
            return
        self.prefix_cache_stats.record(
            num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
        )
