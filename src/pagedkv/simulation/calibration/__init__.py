"""A measured cost model: its parameters are fitted to steps of an engine.

In the order in which data flows::

    steps         MeasuredSteps: the work of each step, and its seconds; files of steps, vLLM's logs and results
    fitting       calibrate(): the best parameters of a cost model, and the error on steps left out; validate();
                  measure_tier(): bandwidth and latency of a tier
"""

from pagedkv.simulation.calibration.fitting import (
    Calibration,
    ErrorSummary,
    TierRate,
    Validation,
    calibrate,
    measure_tier,
    validate,
)
from pagedkv.simulation.calibration.steps import (
    BenchLatencies,
    ComparedLatency,
    MeasuredSteps,
    bench_result_in,
    compare_latencies,
    read_steps,
    steps_of_bench,
)

__all__ = [
    "BenchLatencies",
    "Calibration",
    "ComparedLatency",
    "ErrorSummary",
    "MeasuredSteps",
    "TierRate",
    "Validation",
    "bench_result_in",
    "calibrate",
    "compare_latencies",
    "measure_tier",
    "read_steps",
    "steps_of_bench",
    "validate",
]
