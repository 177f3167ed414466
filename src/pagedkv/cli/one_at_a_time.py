"""Drives ``pagedkv replay --one-at-a-time``: the loop over the requests, its progress bar, its interruption.

The bar goes to stderr, and only when that is a terminal. Over a trace it shows the share of the file that has been
read, in stored bytes, for nobody knows the number of requests in advance.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import PurePath

from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.trace_options import TraceOptions
from pagedkv.cli.user_errors import InterruptedRunError
from pagedkv.replay.replayer import ReplayConfig, Replayer, compile_loops
from pagedkv.replay.request import TokenizedRequest
from pagedkv.replay.summary import ReplaySummary
from pagedkv.replay.tokens import tokenized

__all__ = ["replay_trace"]


def replay_trace(path: str, config: ReplayConfig, options: TraceOptions) -> ReplaySummary:
    """Replay a trace, as far as ``options`` say.

    Raises:
        ConfigurationError: a size is out of range.
        TraceError: the trace cannot be read.
        InterruptedRunError: Ctrl-C.
    """
    with options.open(path) as trace:
        prepare(compile_loops)
        with progress_bars() as progress:
            task = progress.add_task(PurePath(path).name, total=trace.num_bytes, come_to="")
            return _serve(
                tokenized(options.requests(trace)),
                config,
                lambda come_to: progress.update(task, completed=trace.num_bytes_read, come_to=come_to),
            )


def _serve(requests: Iterable[TokenizedRequest], config: ReplayConfig, show: Callable[[str], None]) -> ReplaySummary:
    replayer = Replayer(config, time.perf_counter_ns)
    try:
        for request in requests:
            replayer.serve(request)
            show(f"{replayer.num_requests:,} requests")
    except KeyboardInterrupt as error:
        message = f"interrupted after {replayer.num_requests:,} requests; nothing was written"
        raise InterruptedRunError(message) from error
    return replayer.summary()
