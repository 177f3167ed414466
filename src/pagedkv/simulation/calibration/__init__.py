"""A measured cost model: its parameters are fitted to steps of an engine.

In the order in which data flows::

    steps         MeasuredSteps: the work of each step, and its seconds
    step_files    read_steps(): a CSV file, records of steps as JSON lines, or a vLLM log
    vllm_log      steps from a vLLM log, of which only some can be used
    bench_results steps from a result of vllm bench serve
    bench_latencies latencies stated by that result, beside those on the virtual clock
    nonnegative   least squares without negative coefficients
    fitting       fit(): the best parameters of a cost model
    tier_rates    measure_tier(): bandwidth and latency of a tier
    calibration   calibrate(): the fit, and its error on steps left out of it; validate(): the error of any cost model
"""

from pagedkv.simulation.calibration.bench_latencies import BenchLatencies, ComparedLatency, compare_latencies
from pagedkv.simulation.calibration.bench_results import steps_of_bench
from pagedkv.simulation.calibration.calibration import (
    Calibration,
    ErrorSummary,
    Validation,
    calibrate,
    validate,
)
from pagedkv.simulation.calibration.step_files import bench_result_in, read_steps
from pagedkv.simulation.calibration.steps import MeasuredSteps
from pagedkv.simulation.calibration.tier_rates import TierRate, measure_tier

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
