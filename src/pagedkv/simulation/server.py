"""VirtualServer: serves a trace on the virtual clock, and measures everything.

The caller runs the loop, and so controls progress, limits and interruption::

    server = VirtualServer(config, cost_model)
    for request in trace:
        server.offer(request)
    server.finish()
    print(server.result())

A live view follows it, which lets virtual time pass at a speed of its own (:meth:`VirtualServer.follow`).
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pagedkv.contract.space_config import DEFAULT_EVICTION
from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import Meters, RequestLog, SpaceWatch
from pagedkv.simulation.planning.figures import Bounds, Division, PartFigures, parts_of
from pagedkv.simulation.result import ServingResult, sum_up
from pagedkv.simulation.virtual_clock import MeterPair, StepMeters, VirtualClock
from pagedkv.space import BlockSpace, SpaceStatistics
from pagedkv.warming import make_ready, of_spaces


class VirtualServer(VirtualClock):
    """Serves requests on a virtual clock, and measures everything.

    Args:
        config: the pools and the rules.
        costs: duration of steps.
        is_divided: whether :meth:`parts` will be called; it takes 44 bytes a request.

    Raises:
        ConfigurationError: the configuration contradicts itself.
    """

    def __init__(self, config: ServingConfig, costs: CostModel, *, is_divided: bool = False) -> None:
        space, watch = BlockSpace(config.space_config()), SpaceWatch()
        space.observe(watch)
        self._log = RequestLog(config.scheduling_config()) if is_divided else None
        self._all_meters = Meters(config, space, watch, self._log)
        super().__init__(config, costs, space, self._all_meters)

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
