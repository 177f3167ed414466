"""Points in processes of their own: what is done before the first of these starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pagedkv.cli import plan_runs as runs
from pagedkv.cli.trace_options import SeveralTimedTracesOptions
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.planning import PlanPoint

CONFIG = ServingConfig(num_blocks=20, block_size=2, max_sequences=2, max_batched_tokens=8, eviction="lru")


def test_loops_of_all_policies_are_compiled_once_before_any_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @contextmanager
    def no_workers(*_: object) -> Iterator[tuple[list[object], list[float]]]:
        done.append("workers start")
        yield [], []

    monkeypatch.setattr(runs, "compile_loops", done.append)
    monkeypatch.setattr(runs, "_workers", no_workers)
    points = [
        PlanPoint(replace(CONFIG, eviction=policy), CostModel(fixed_s=0.01, token_compute_s=0.001))
        for policy in ("lru", "fifo", "lru")
    ]
    runs.PointRunner("nowhere", SeveralTimedTracesOptions(), 2).run(points, lambda *_: (), lambda: 0)
    assert done == ["fifo", "lru", "workers start"]
