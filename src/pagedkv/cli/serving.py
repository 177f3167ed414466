"""Serves a trace on the virtual clock, for several commands: options, configuration, the loop over the requests.

The bar goes to stderr, and only when that is a terminal. It shows the share of the trace that has been read, in stored
bytes, and how far the virtual clock is.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, cast

from pagedkv.cli import options as opt
from pagedkv.cli.progress import prepare, progress_bars
from pagedkv.cli.sizes import parse_blocks, parse_gpu, require_memory
from pagedkv.cli.trace_options import TimedTraceOptions
from pagedkv.cli.user_errors import InterruptedRunError
from pagedkv.errors import ConfigurationError
from pagedkv.models import ModelMemory, read_model
from pagedkv.models.memory import GIB
from pagedkv.models.sizing import block_nbytes_of, blocks_that_fit, groups_of
from pagedkv.scheduling import PreemptionKind
from pagedkv.simulation import ServingConfig, ServingResult, VirtualServer, compile_loops
from pagedkv.simulation.cost import CostModel, derive_cost_model, find_gpu, kv_budget_nbytes, read_cost_model
from pagedkv.traces.request import Request, TokenizedRequest

__all__ = [
    "DEFAULTS",
    "ServedTrace",
    "ServingOptions",
    "default_num_blocks",
    "serve_requests",
    "serve_trace",
]

LONGEST_CONTEXT: Final = 2**17
"""Of a model that does not tell its own."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The options of the commands that serve a trace, as typed; ``pagedkv replay --help`` tells each."""

    num_blocks: opt.NumBlocks = None
    block_size: opt.BlockSize = 16
    model: opt.ModelName = None
    gpu: opt.GpuName = None
    memory_gib: opt.MemoryGib = None
    kv_dtype: opt.KvDtype = None
    host_blocks: opt.HostBlocks = 0
    cost_model: opt.CostModelName = None
    max_sequences: opt.MaxSequences = 256
    max_batched_tokens: opt.MaxBatchedTokens = 8192
    watermark: opt.Watermark = 0.01
    policy: opt.PolicyName = "lru"
    preemption: opt.PreemptionName = "recompute"
    samples: opt.Samples = None
    beams: opt.Beams = None
    max_length: opt.MaxLength = None
    speed: opt.Speed = 1.0
    seed: opt.Seed = 0
    trace: TimedTraceOptions = TimedTraceOptions()  # noqa: RUF009 - a value: frozen

    def configuration(self) -> tuple[ServingConfig, CostModel]:
        """Read and check everything that the options name.

        Raises:
            ConfigurationError: an option is out of range, contradicts another one, or names nothing known.
        """
        model = None if self.model is None else read_model(self.model, self.kv_dtype)
        if model is None and (self.gpu or self.memory_gib is not None or self.kv_dtype):
            raise ConfigurationError("--gpu, --memory and --kv-dtype say what a model has to itself: name it (--model)")
        block_nbytes = {} if model is None else block_nbytes_of(model, self.block_size)
        config = ServingConfig(
            num_blocks=self._num_blocks(model, block_nbytes),
            block_size=self.block_size,
            groups=None if model is None else groups_of(model, self.block_size),
            block_nbytes=block_nbytes,
            model=None if model is None else model.name,
            num_host_blocks=self.host_blocks,
            max_sequences=self.max_sequences,
            max_batched_tokens=self.max_batched_tokens,
            watermark=self.watermark,
            policy=self.policy,
            preemption=cast("PreemptionKind", self.preemption),
            num_samples=self.samples,
            beam_width=self.beams,
            speed=self.speed,
            seed=self.seed,
            max_length=self.max_length if self.max_length or model is None else model.max_context,
        )
        if self.host_blocks and self.preemption != "swap":
            raise ConfigurationError(
                f"--host-blocks {self.host_blocks} is for --preemption swap: give both, or neither"
            )
        require_memory(config.space_config())
        return config, self._cost_model(model)

    def _num_blocks(self, model: ModelMemory | None, block_nbytes: Mapping[str, int]) -> int | dict[str, int]:
        if self.num_blocks is not None:
            if self.memory_gib is not None:
                raise ConfigurationError("--memory and --num-blocks say the same in two ways: give one of them")
            return parse_blocks(self.num_blocks)
        if model is not None and self.memory_gib is not None:
            if not 0 < self.memory_gib <= opt.MOST_GIB:
                raise ConfigurationError(
                    f"--memory must be over 0 and at most {opt.MOST_GIB:,} GiB, got {self.memory_gib}"
                )
            return self._split(model, block_nbytes, self.memory_gib * GIB)
        if model is not None and self.gpu is not None:
            num_gpus, name = parse_gpu(self.gpu)
            return self._split(model, block_nbytes, kv_budget_nbytes(model, find_gpu(name), num_gpus))
        return default_num_blocks(self.block_size)

    def _split(self, model: ModelMemory, block_nbytes: Mapping[str, int], nbytes: float) -> dict[str, int]:
        if self.max_sequences < 1:
            raise ConfigurationError(f"--max-sequences must be at least 1, got {self.max_sequences}")
        groups = groups_of(model, self.block_size)
        return blocks_that_fit(groups, block_nbytes, nbytes, self.max_sequences, model.max_context or LONGEST_CONTEXT)

    def _cost_model(self, model: ModelMemory | None) -> CostModel:
        if self.cost_model is not None:
            return read_cost_model(self.cost_model)
        if model is not None and self.gpu is not None:
            num_gpus, name = parse_gpu(self.gpu)
            return derive_cost_model(model, find_gpu(name), num_gpus)
        return read_cost_model(opt.DEFAULT_COST_MODEL)


DEFAULTS: Final = ServingOptions()


def default_num_blocks(block_size: int) -> int:
    """Give the number of blocks that hold the default number of tokens."""
    return opt.DEFAULT_NUM_TOKENS // max(1, block_size)


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """What came out, and how long it took here.

    Args:
        result: the figures.
        wall_s: seconds of this machine, reading the trace included.
    """

    result: ServingResult
    wall_s: float


def serve_trace(path: str, options: ServingOptions) -> ServedTrace:
    """Serve a trace, as far as ``options.trace`` says.

    Raises:
        ConfigurationError: an option is out of range.
        TraceError: the trace cannot be read.
        InterruptedRunError: Ctrl-C.
    """
    config, cost_model = options.configuration()
    with options.trace.open(path) as trace:
        prepare(compile_loops)
        with progress_bars() as progress:
            task = progress.add_task(PurePath(path).name, total=trace.num_bytes, come_to="")
            return _serve(
                options.trace.requests(trace),
                VirtualServer(config, cost_model),
                lambda come_to: progress.update(task, completed=trace.num_bytes_read, come_to=come_to),
            )


def serve_requests(name: str, requests: Iterable[TokenizedRequest], options: ServingOptions) -> ServedTrace:
    """Serve generated requests.

    Raises:
        ConfigurationError: an option is out of range.
        InterruptedRunError: Ctrl-C.
    """
    config, cost_model = options.configuration()
    prepare(compile_loops)
    with progress_bars() as progress:
        task = progress.add_task(name, total=None, come_to="")
        server = VirtualServer(config, cost_model)
        return _serve(requests, server, lambda come_to: progress.update(task, come_to=come_to))


def _serve(
    requests: Iterable[Request | TokenizedRequest], server: VirtualServer, show: Callable[[str], None]
) -> ServedTrace:
    started_s = time.perf_counter()
    try:
        for request in requests:
            server.offer(request)
            show(f"{server.num_requests:,} requests, {server.now_s:,.0f} s")
        show(f"{server.num_requests:,} requests, finishing")
        server.finish()
    except KeyboardInterrupt as error:
        message = f"interrupted after {server.num_requests:,} requests, at {server.now_s:,.1f} s; nothing was written"
        raise InterruptedRunError(message) from error
    return ServedTrace(server.result(), time.perf_counter() - started_s)
