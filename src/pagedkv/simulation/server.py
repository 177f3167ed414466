"""VirtualServer: serves a trace on the virtual clock, and measures everything.

The caller runs the loop, and so controls progress, limits and interruption::

    server = VirtualServer(config, cost_model)
    for request in trace:
        server.offer(request)
    server.finish()
    print(server.result())

A live view follows it, which lets virtual time pass at a speed of its own (:meth:`VirtualServer.follow`), and sees its
requests from arrival to end (:class:`RequestsUnderWay`).

The result consists of plain numbers. The requests and the configuration alone determine it, so it is equal on every
run. It has no times of the machine that ran it.
"""

from collections.abc import Iterable, Mapping, ValuesView
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from pagedkv.contract.answers import Explanation, Miss
from pagedkv.contract.space_config import DEFAULT_EVICTION
from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.scheduling import Batch, Progress, Request as ScheduledRequest
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import COUNTS, LEVELS, POOL_LEVELS, Meters, RequestLog, SpaceWatch
from pagedkv.simulation.planning.figures import Bounds, Division, PartFigures, parts_of
from pagedkv.simulation.tiers import SimulatedTiers, tier_figures
from pagedkv.simulation.virtual_clock import MeterPair, StepMeters, VirtualClock
from pagedkv.space import BlockSpace, ObservedSpace, PrefixHit, SpaceObserver, SpaceStatistics
from pagedkv.tiers.served import TierNote
from pagedkv.warming import make_ready, of_spaces


@dataclass(frozen=True, slots=True)
class ServingResult:
    """All figures, in sections; docs/replay.md explains each.

    Args:
        config: configuration of the replay.
        requests, hits, misses, steps, waste, preemptions, sharing, latency: counts and means.
        pools: by pool, its blocks over time, and hits and evictions by age.
        timeline: levels and counts over time, in at most 512 intervals.
        tiers: hits by medium, and the counts of each tier; None without tiers.
    """

    config: Mapping[str, Any]
    requests: Mapping[str, Any]
    hits: Mapping[str, Any]
    misses: Mapping[str, Any]
    steps: Mapping[str, Any]
    waste: Mapping[str, Any]
    preemptions: Mapping[str, Any]
    sharing: Mapping[str, Any]
    latency: Mapping[str, Any]
    pools: Mapping[str, Mapping[str, Any]]
    timeline: Mapping[str, Any]
    tiers: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for JSON, by section."""
        return {name: section for name in self.__slots__ if (section := getattr(self, name)) is not None}


def sum_up(
    meters: Meters,
    config: Mapping[str, Any],
    virtual_s: float,
    block_nbytes: Mapping[str, int],
    tiers: SimulatedTiers | None = None,
) -> ServingResult:
    """Make the result from the meters.

    Args:
        meters: the meters.
        config: the configuration, for JSON.
        virtual_s: seconds from the start of the trace to now.
        block_nbytes: bytes of a block of each pool, where they are known.
        tiers: the tiers; None: there are none.
    """
    return ServingResult(
        config=config,
        requests={
            "num_requests": meters.num_requests,
            "num_with_content": meters.num_with_content,
            "num_rejected": meters.num_rejected,
            "num_finished": meters.num_finished,
            "num_prompt_tokens": meters.num_prompt_tokens,
            "num_output_tokens": meters.num_output_tokens,
        },
        hits={
            "num_prompt_blocks": meters.num_prompt_blocks,
            "num_hit_blocks": meters.num_hit_blocks,
            "block_hit_ratio": _hit_ratio(meters, meters.num_hit_blocks, meters.num_prompt_blocks),
            "num_hit_tokens": meters.num_hit_tokens,
            "token_hit_ratio": _hit_ratio(meters, meters.num_hit_tokens, meters.num_prompt_tokens),
        },
        misses=meters.misses.as_dict(),
        steps={
            "num_steps": meters.num_steps,
            "num_decode_steps": meters.num_decode_steps,
            "virtual_s": virtual_s,
            "busy_s": meters.busy_s,
            "mean_sequences": meters.sequences.as_dict(meters.num_steps)["mean"],
            "peak_sequences": meters.sequences.peak,
            "num_computed_tokens": meters.num_computed_tokens,
        },
        waste=meters.waste.as_dict(),
        preemptions={
            "num_recompute": meters.num_recompute,
            "num_swap": meters.num_swap,
            "num_recomputed_tokens": meters.num_recomputed_tokens,
            "num_swapped_out_blocks": meters.num_swapped_out_blocks,
            "num_swapped_in_blocks": meters.num_swapped_in_blocks,
        },
        sharing=meters.sharing.as_dict(),
        latency=meters.latencies.as_dict(),
        pools={pool: _pool(meters, pool, virtual_s, block_nbytes.get(pool)) for pool in meters.occupancy},
        timeline=_timeline(meters),
        tiers=None if tiers is None else tier_figures(tiers, meters.num_hit_tokens, meters.num_prompt_tokens),
    )


def _pool(meters: Meters, pool: str, virtual_s: float, block_nbytes: int | None) -> dict[str, Any]:
    history = meters.history.pools[pool]
    return {
        "num_blocks": meters.num_usable[pool],
        "block_nbytes": block_nbytes,
        **meters.occupancy[pool].as_dict(virtual_s),
        "num_evictions": history.num_evictions,
        "num_never_reused": history.num_never_reused,
        "hits_by_age": history.hits_by_age.as_dict(),
        "evictions_by_age": history.evictions_by_age.as_dict(),
    }


def _timeline(meters: Meters) -> dict[str, Any]:
    columns = meters.timeline.columns()
    durations_s = columns["duration_s"]
    hit_tokens, prompt_tokens = columns["num_hit_tokens"].tolist(), columns["num_prompt_tokens"].tolist()
    return {
        "time_s": durations_s.cumsum().tolist(),
        "duration_s": durations_s.tolist(),
        **{level: columns[level].tolist() for level in LEVELS},
        "token_hit_ratio": [
            hit / prompt if prompt and meters.num_with_content else None
            for hit, prompt in zip(hit_tokens, prompt_tokens, strict=True)
        ],
        **{count: columns[count].astype(int).tolist() for count in COUNTS[:2]},
        "pools": {
            pool: {level: columns[f"{level} {pool}"].tolist() for level in POOL_LEVELS} for pool in meters.occupancy
        },
    }


def _hit_ratio(meters: Meters, part: int, whole: int) -> float | None:
    """Divide, with 0 / 0 = 0. None if the trace has no content, so that hits are unknown."""
    if meters.num_requests and not meters.num_with_content:
        return None
    return part / whole if whole else 0.0


class VirtualServer(VirtualClock):
    """Serves requests on a virtual clock, and measures everything.

    Args:
        config: the pools and the rules.
        costs: duration of steps.
        is_divided: whether :meth:`parts` will be called; it takes 44 bytes a request.
        is_closed: whether :meth:`take_ended` will be called, as by :func:`serve_closed`.

    Raises:
        ConfigurationError: the configuration contradicts itself.
    """

    def __init__(
        self, config: ServingConfig, costs: CostModel, *, is_divided: bool = False, is_closed: bool = False
    ) -> None:
        space, watch = BlockSpace(config.space_config()), SpaceWatch()
        space.observe(watch)
        has_log = is_divided or is_closed
        self._log = RequestLog(config.scheduling_config(), records_ended=is_closed) if has_log else None
        self._all_meters = Meters(config, space, watch, self._log)
        super().__init__(config, costs, space, self._all_meters, uses_queue_file=not is_closed)

    @property
    def meters(self) -> Meters:
        """The measurements so far."""
        return self._all_meters

    def follow(self, follower: StepMeters) -> None:
        """Notify further meters of all that follows, after the server's own: for a live view. Changes no result.

        Args:
            follower: its ``num_requests`` is not asked for.
        """
        self._meters = MeterPair(self._meters, follower)

    @property
    def num_steps(self) -> int:
        """Steps run so far."""
        return self._all_meters.num_steps

    def run(self, requests: Iterable[Request | TokenizedRequest]) -> ServingResult:
        """Serve requests to their end."""
        for request in requests:
            self.offer(request)
        self.finish()
        return self.result()

    def take_ended(self) -> list[int]:
        """Return the numbers of the requests that have ended since the last call, and forget them."""
        assert self._log is not None, "a server of a closed loop"
        return self._log.take_ended()

    # Results

    def statistics(self) -> SpaceStatistics:
        """Take a snapshot of the block space."""
        return self._space.statistics()

    def parts(self, division: Division) -> tuple[PartFigures, ...]:
        """Sum up by tenant and by window, after all requests are served; empty unless ``is_divided``.

        Raises:
            ConfigurationError: the trace has no such windows.
        """
        return () if self._log is None else parts_of(self._log, Bounds(), division, self._config.load)

    def check(self) -> None:
        """Check every invariant of the block space and of the tiers. Raises AssertionError. O(blocks + entries)."""
        self._space.check()
        if self._tiers is not None:
            self._tiers.check()

    def result(self) -> ServingResult:
        """Sum up the replay so far. Changes nothing."""
        config = {**self._config.as_dict(), "cost_model": dict(self._costs.as_dict())}
        return sum_up(self._all_meters, config, self._now_s, self._config.block_nbytes, self._tiers)


def compile_loops(eviction: str = DEFAULT_EVICTION) -> None:
    """Serve a few tiny requests in a temporary space, so that loops are compiled before time is measured.

    The requests hit, evict, branch, swap and preempt: every case of a replay.

    Args:
        eviction: eviction policy of the replay's space.
    """
    make_ready(of_spaces(eviction))
    config = ServingConfig(
        num_blocks=12, num_host_blocks=12, block_size=2, max_sequences=8, max_batched_tokens=8, eviction=eviction
    )
    server = VirtualServer(replace(config, preemption="swap"), CostModel())
    for number, num_samples in enumerate((1, 1, 3, 2, 1)):
        token_ids = np.arange(9, dtype=np.int32) + 100 * (number % 2)
        server.offer(TokenizedRequest(float(number // 3), token_ids[:4], token_ids[4:], None, num_samples))
    server.finish()
    server.result()


SERVED: Final = "length"
REJECTED: Final = "rejected"


@final
@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """A request of a replay.

    Args:
        scheduled: the scheduler's record of it.
        num_sequences: its samples or beams.
        num_cached_tokens: tokens of its prompt that hit at its first admission; None before it.
        explanation: why no more of them hit, with all misses of its prompt; None before its first admission.
        finish_reason: "length" if it was served, "rejected" if it cannot be; None before its end.
    """

    scheduled: ScheduledRequest
    num_sequences: int
    num_cached_tokens: int | None = None
    explanation: Explanation | None = None
    finish_reason: str | None = None

    @property
    def number(self) -> int:
        """Its number."""
        return self.scheduled.number

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        return self.scheduled.num_preemptions

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all its answers."""
        num_each = self.scheduled.max_new_tokens if self.finish_reason == SERVED else self.scheduled.num_generated
        return num_each * self.num_sequences

    @property
    def tier_notes(self) -> tuple[TierNote, ...]:
        """Nothing: a replay counts by tier, not by request."""
        return ()


@final
class RequestsUnderWay(SpaceObserver):
    """Records the requests of one replay.

    Args:
        space: the replay's block space, which records explanations. It is observed from now on.
    """

    def __init__(self, space: BlockSpace) -> None:
        self._space = space
        self._requests: dict[ScheduledRequest, ReplayedRequest] = {}
        self._misses: list[tuple[Miss, ...]] = []
        space.observe(self)

    @property
    def requests(self) -> ValuesView[ReplayedRequest]:
        """The requests that wait or run, in the order of arrival."""
        return self._requests.values()

    # Moments of the space

    def begin(self, space: ObservedSpace) -> None:
        """Ask this view of the space."""
        self._observed = space

    def admitting(self, row: int, hit: PrefixHit) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record why a prompt's tokens do not hit, before blocks are evicted for it."""
        self._misses.append(self._observed.misses(hit))

    # Moments of the replay

    def arrived(self, request: ScheduledRequest) -> ReplayedRequest:
        """Record a request, and return its record."""
        made = self._requests[request] = ReplayedRequest(request, request.num_sequences)
        return made

    def rejected(self, request: ScheduledRequest) -> None:
        """Record that a request cannot be served."""
        self._requests.pop(request).finish_reason = REJECTED

    def scheduled(self, batch: Batch) -> None:
        """Record the hits of first admissions, and rejections."""
        misses, self._misses = self._misses, []
        for admission, own_misses in zip(batch.admitted, misses, strict=True):
            request = self._requests[admission.request]
            if request.num_cached_tokens is None:
                request.num_cached_tokens = admission.num_hit_tokens
                recorded = self._space.explanation(admission.request.rows[0])
                request.explanation = replace(recorded, misses=own_misses)
        for rejected in batch.rejected:
            self.rejected(rejected)

    def progressed(self, progress: Progress) -> None:
        """Record requests that were served."""
        for request in progress.finished:
            self._requests.pop(request).finish_reason = SERVED
