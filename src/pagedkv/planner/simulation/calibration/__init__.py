"""A cost model that was measured: its parameters fitted to steps that an engine took.

In the order in which data flows::

    steps         MeasuredSteps: what each step computed, and how long it took
    step_files    read_steps(): a CSV file, records of steps as JSON lines, or a vLLM log
    vllm_log      what a vLLM log tells of steps, which is little
    bench_results what a result of vllm bench serve tells of them
    bench_latencies what it states of latencies, beside the same requests on the virtual clock
    nonnegative   least squares without negative coefficients
    fitting       fit(): the parameters of a cost model that fit best
    calibration   calibrate(): the fit, and its error on steps that it has not seen; validate(): that of any cost model
"""

from pagedkv.planner.simulation.calibration.bench_latencies import BenchLatencies, ComparedLatency, compare_latencies
from pagedkv.planner.simulation.calibration.bench_results import steps_of_bench
from pagedkv.planner.simulation.calibration.calibration import (
    Calibration,
    ErrorSummary,
    Validation,
    calibrate,
    validate,
)
from pagedkv.planner.simulation.calibration.step_files import bench_result_in, read_steps
from pagedkv.planner.simulation.calibration.steps import MeasuredSteps

__all__ = [
    "BenchLatencies",
    "Calibration",
    "ComparedLatency",
    "ErrorSummary",
    "MeasuredSteps",
    "Validation",
    "bench_result_in",
    "calibrate",
    "compare_latencies",
    "read_steps",
    "steps_of_bench",
    "validate",
]
