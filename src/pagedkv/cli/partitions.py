"""Divisions of a trace's requests, by its options and its content: by tenant, by window of time."""

from collections.abc import Iterator

from pagedkv.cli.trace_options import TraceOptions
from pagedkv.contract.arrays import Float64Array
from pagedkv.planner.capacity.partition import Partition
from pagedkv.planner.capacity.references import BlockReferences
from pagedkv.planner.traces.windows import Window

__all__ = ["partitions_of", "windows_of"]


def partitions_of(references: BlockReferences, options: TraceOptions, origin_s: float) -> Iterator[Partition]:
    """Yield the divisions of a trace's requests. Raises ConfigurationError: there are no such windows."""
    if references.tenants:
        yield Partition("tenant", references.tenants, references.tenant_numbers)
    if options.windows is not None:
        windows, numbers = options.windows.divide(references.arrivals_s, origin_s)
        yield Partition("window", [window.name for window in windows], numbers)


def windows_of(arrivals_s: Float64Array, options: TraceOptions, origin_s: float) -> list[Window]:
    """Return the windows of arrivals; none if none are requested. Raises ConfigurationError."""
    return [] if options.windows is None else options.windows.divide(arrivals_s, origin_s)[0]
