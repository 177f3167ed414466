"""``pagedkv replay --engine``: a trace on the virtual clock, and by the engine in the same steps.

The simulation runs first and records before which step each request arrived. The engine then gets the same requests
before the same steps, with the same pools, limits and rules; with ``--overlap`` the steps of both overlap. Its answers
are the trace's: the model computes every token, but its own choice is dropped. So its work is that of the trace for any
weights. Hits, preemptions and recomputed tokens must agree exactly, and the measurement is the time of the steps.

Tokens of a trace are taken modulo the model's vocabulary, for both. Seconds are predicted by ``--cost-model``, or else
by a cost model that is measured beforehand, on separate steps::

    one sequence decodes  ->  many do  ->  a prompt is computed      fixed_s, sequence_s, token_compute_s
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, final

import numpy as np
import torch

from pagedkv.cli.interrupting import leaving_at_once
from pagedkv.cli.progress import prepare, progress_bars, working
from pagedkv.cli.serving import ServingOptions, require_some_served
from pagedkv.contract.arrays import Int32Array
from pagedkv.engine import LLM, EngineConfig, EngineRequest, SamplingParams
from pagedkv.engine.core import EngineCore
from pagedkv.engine.demo.trained import load_trained
from pagedkv.engine.loading import load
from pagedkv.engine.sampling import Place, SampledTokens, WaitingRow
from pagedkv.errors import ConfigurationError, InterruptedRunError, RequestError
from pagedkv.planner.results import Result
from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.planner.traces.token_blocks import tokenize
from pagedkv.probe import compat
from pagedkv.simulation import ServingConfig, ServingResult, VirtualServer, compile_loops
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.virtual_clock import sequence_tokens


@final
class Script:
    """A sampler of the engine that returns the trace's answers for any logits.

    Args:
        vocabulary: size of the model's vocabulary.

    Attributes:
        answers: tokens of each request's samples, int32 ``[samples, tokens]``, by the seed of the request.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.answers: dict[int, Int32Array] = {}

    def write(self, number: int, request: TokenizedRequest) -> None:
        """Store the tokens of a request's samples, equal to the simulation's, within the model's vocabulary."""
        tokens = request.output_token_ids
        if request.num_samples > 1:
            tokens = sequence_tokens(tokens, request.num_samples, number)
        self.answers[number] = tokens.reshape(request.num_samples, -1) % np.int32(self._vocabulary)

    def sample(self, logits: torch.Tensor, places: Sequence[Place]) -> SampledTokens:
        """Return the next token of each row."""
        tokens = [
            self.answers[sequence.params.seed or 0][sequence.sample, len(sequence.generated_ids)]
            for sequence in (place.sequence for place in places)
        ]
        return SampledTokens(torch.from_numpy(np.array(tokens, np.int32)).to(logits.device))

    def resume(self, waiting: Sequence[WaitingRow]) -> SampledTokens:
        """Resume no row, since no row waits for a script."""
        assert not waiting, "a row waits for a script"
        return SampledTokens(torch.zeros(0, dtype=torch.int32))


def within_vocabulary(request: TokenizedRequest, vocabulary: int, num_samples: int | None = None) -> TokenizedRequest:
    """Return a request with tokens of the vocabulary, at least one to generate, and the default priority."""
    outputs = request.output_token_ids if request.output_length else np.zeros(1, np.int32)
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids % np.int32(vocabulary),
        output_token_ids=outputs % np.int32(vocabulary),
        num_samples=num_samples or request.num_samples,
        priority=0,
    )


def submit_scripted(core: EngineCore, script: Script, request: TokenizedRequest, number: int) -> EngineRequest:
    """Queue a request, and store its answers in the script by its number. Raises RequestError if it never fits."""
    params = SamplingParams(
        max_tokens=request.output_length, n=request.num_samples, temperature=1.0, ignore_eos=True, seed=number
    )
    admitted = core.add(request.prompt_token_ids, params)
    script.write(number, request)
    return admitted


MEASURED: Final = "measured here"
LONGEST: Final = 2**20
"""Positions of the demonstration's model here, since a trace's prompts are longer than those of its training."""
DEMONSTRATION: Final = "the demonstration's model"
NUM_TOGETHER: Final = 32
NUM_PREFILLED: Final = 256
NUM_TRIES: Final = 12


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """Predicted and measured figures.

    Args:
        model: name of the model.
        cost_model: source of the predicted seconds, and its kind.
        seconds: the cost model in short.
        predicted, measured: equal sets of counts and seconds.
        simulation: the result of the simulation.
    """

    DERIVED: ClassVar = ("differing", "warnings")

    model: str
    cost_model: Mapping[str, object]
    seconds: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    simulation: ServingResult

    @property
    def differing(self) -> list[str]:
        """Counts that differ between the two; seconds may differ."""
        return [name for name in COUNTS if self.predicted[name] != self.measured[name]]

    @property
    def warnings(self) -> list[str]:
        """List warnings about the figures."""
        warning = f"engine and simulation differ in {', '.join(self.differing)}"
        return [warning] if self.differing else []

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of a table."""
        one, other = self.predicted, self.measured
        return [(words, form.format(one[name]), form.format(other[name])) for name, (words, form) in ROWS.items()]


ROWS: Final = {
    "token_hit_ratio": ("hit ratio by token", "{:.4%}"),
    "num_hit_tokens": ("tokens that hit", "{:,.0f}"),
    "num_computed_tokens": ("tokens computed", "{:,.0f}"),
    "num_steps": ("steps", "{:,.0f}"),
    "num_recompute": ("preemptions by recompute", "{:,.0f}"),
    "num_swap": ("preemptions by swap", "{:,.0f}"),
    "num_rejected": ("rejected, too large", "{:,.0f}"),
    "num_output_tokens": ("tokens generated", "{:,.0f}"),
    "busy_s": ("seconds of all steps", "{:,.2f}"),
    "tokens_per_s": ("generated tokens a second", "{:,.0f}"),
}
COUNTS: Final = tuple(name for name in ROWS if name.startswith("num_"))
"""Figures that must be equal; seconds may differ."""


def replay_with_engine(
    name: str, recorded: Sequence[Request], options: ServingOptions, model_path: str | None
) -> Comparison:
    """Serve requests twice: on the virtual clock, and by the engine in the same steps.

    Args:
        name: name of the trace, for the bar.
        recorded: requests of the trace.
        options: options of the simulation, with the pools' blocks, and without other models.
        model_path: folder of the model; None: the demonstration's.

    Raises:
        ConfigurationError: an option is out of range; a request is too long for the model; no request fits the pools.
        UnsupportedModelError: the engine refuses the model.
        InterruptedRunError: Ctrl-C.
    """
    config, cost_model = options.configuration()
    compat.be_silent()
    with working("Loading the model"), leaving_at_once():
        model = load_trained(max_positions=LONGEST) if model_path is None else load(model_path)[0]
    requests = _for_model(recorded, model, options.samples)
    prepare(lambda: compile_loops(config.eviction))
    script = Script(compat.vocabulary_size(model))
    with working("Measuring steps of the model"), leaving_at_once():
        llm = LLM(model, _engine_config(config), sampler=script)
        if options.cost_model is None:
            cost_model = _measure(model, _engine_config(config))
    seconds_of = MEASURED if options.cost_model is None else str(config.cost_model_name)
    config = replace(config, groups=llm.groups.specs, cost_model_name=seconds_of, block_nbytes={})
    server = VirtualServer(config, cost_model)
    steps = _simulate(server, requests)
    result = server.result()
    most = max(llm.core.space.config.blocks_by_pool().values())
    require_some_served(result.requests["num_requests"], result.requests["num_rejected"], most)
    return Comparison(
        DEMONSTRATION if model_path is None else model_path,
        {"name": seconds_of, **cost_model.as_dict()},
        MEASURED if options.cost_model is None else options.seconds_of(config).in_short,
        _predicted(result),
        _run(llm, script, requests, steps, name),
        result,
    )


# Requests of both


def _for_model(recorded: Iterable[Request], model: compat.Model, num_samples: int | None) -> list[TokenizedRequest]:
    """Return requests that the model can serve. Raises ConfigurationError."""
    vocabulary, longest = compat.vocabulary_size(model), compat.longest_sequence(model)
    requests = [
        within_vocabulary(tokenize(each, place), vocabulary, num_samples) for place, each in enumerate(recorded)
    ]
    most = max((each.input_length + each.output_length for each in requests), default=0)
    if longest is not None and most > longest:
        raise ConfigurationError(
            f"a request of the trace has {most:,} tokens, and the model has {longest:,} positions: name another "
            "model (--model-path), or serve fewer requests (--limit)"
        )
    return requests


def _engine_config(config: ServingConfig) -> EngineConfig:
    return EngineConfig(
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        max_sequences=config.max_sequences,
        max_batched_tokens=config.max_batched_tokens,
        max_tokens=config.space_config().max_tokens,
        preemption=config.preemption,
        watermark=config.watermark,
        eviction=config.eviction,
        tail_tokens=config.tail_tokens,
        overlap=config.overlap,
    )


# The simulation


def _simulate(server: VirtualServer, requests: Iterable[TokenizedRequest]) -> list[int]:
    """Serve on the virtual clock; return how many steps were scheduled before each request arrived."""
    steps = []
    try:
        for request in requests:
            server.offer(request)
            steps.append(server.num_scheduled)
        server.finish()
    except KeyboardInterrupt as error:
        message = f"interrupted after {server.num_requests:,} requests of the simulation; nothing was written"
        raise InterruptedRunError(message) from error
    return steps


def _predicted(result: ServingResult) -> dict[str, float]:
    known = {**result.hits, **result.steps, **result.preemptions, **result.requests}
    figures = {name: known[name] or 0.0 for name in ROWS if name in known}
    return {**figures, "tokens_per_s": known["num_output_tokens"] / known["busy_s"] if known["busy_s"] else 0.0}


# The engine


def _run(
    llm: LLM, script: Script, requests: Sequence[TokenizedRequest], steps: Sequence[int], name: str
) -> dict[str, float]:
    """Serve by the engine; each request is admitted before the same step as in the simulation."""
    served: list[EngineRequest] = []
    run = _Run(llm)
    found = run.found
    try:
        with progress_bars() as progress:
            bar = progress.add_task(name, total=len(requests), so_far="")
            for request, before in zip(requests, steps, strict=True):
                while run.num_scheduled < before and llm.core.has_work:
                    run.step()
                _submit(llm, script, request, served, found)
                progress.update(bar, advance=1, so_far=f"{found['num_steps']:,.0f} steps")
            while llm.core.has_work:
                run.step()
    except KeyboardInterrupt as error:
        message = f"interrupted after {len(served):,} requests of the engine; nothing was written"
        raise InterruptedRunError(message) from error
    found["num_hit_tokens"] = sum(each.num_cached_tokens or 0 for each in served)
    found["num_output_tokens"] = sum(len(sample.token_ids) for each in served for sample in each.samples)
    found["token_hit_ratio"] = found["num_hit_tokens"] / max(1.0, found.pop("num_prompt_tokens"))
    found["tokens_per_s"] = found["num_output_tokens"] / found["busy_s"] if found["busy_s"] else 0.0
    return found


class _Run:
    """Steps of an engine, counted as a simulation counts its own.

    Attributes:
        num_scheduled: all of them; found: counts and seconds.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._num_swapped = 0
        self.num_scheduled = 0
        self.found = dict.fromkeys((*COUNTS, "busy_s", "num_prompt_tokens"), 0.0)

    def step(self) -> None:
        """Run a step, and count it: in an overlap not if it had nothing to compute without the tokens of the last."""
        started = time.perf_counter()
        record = self._llm.step()
        self.found["busy_s"] += time.perf_counter() - started
        num_swapped_in = self._num_swapped + record.num_swapped_out - record.num_swapped
        self._num_swapped = record.num_swapped
        is_empty = not (record.num_tokens or record.num_swapped_out or num_swapped_in)
        self.num_scheduled += 1
        self.found["num_steps"] += not (is_empty and self._llm.core.config.overlap)
        self.found["num_computed_tokens"] += record.num_tokens
        self.found["num_recompute"] += record.num_recomputed
        self.found["num_swap"] += record.num_swapped_out
        self.found["num_rejected"] += record.num_rejected


def _submit(
    llm: LLM, script: Script, request: TokenizedRequest, served: list[EngineRequest], found: dict[str, float]
) -> None:
    try:
        admitted = submit_scripted(llm.core, script, request, len(served))
    except RequestError:  # as in the simulation: the request does not fit, even alone
        found["num_rejected"] += 1
        return
    found["num_prompt_tokens"] += request.input_length
    served.append(admitted)


# Measured cost of steps


def _measure(model: compat.Model, config: EngineConfig) -> CostModel:
    """Measure the steps of a model: the best of several, for one sequence, for many, and for a prompt."""
    num_together = min(NUM_TOGETHER, config.max_sequences)
    num_prefilled = min(NUM_PREFILLED, config.max_batched_tokens, config.max_tokens or NUM_PREFILLED)
    num_tokens = 4 + NUM_TRIES
    roomy = replace(
        config,
        num_blocks=2 + num_together * (num_tokens // config.block_size + 2) + 2 * num_prefilled // config.block_size,
        num_host_blocks=0,
        preemption="recompute",
        max_tokens=max(num_tokens, num_prefilled) + 1,
        prefix_caching=False,
        self_test=False,
    )
    llm = LLM(model, roomy)
    alone = _best_decode_s(llm, 1)
    together = _best_decode_s(llm, num_together)
    prompt = min(_prefill_s(llm, num_prefilled - 1) for _ in range(3))
    each = max(0.0, (together - alone) / max(1, num_together - 1))
    fixed = max(0.0, alone - each)
    token = max(0.0, (prompt - fixed) / num_prefilled)
    return CostModel(fixed_s=fixed, token_compute_s=token, sequence_s=max(0.0, each - token))


def _best_decode_s(llm: LLM, num_sequences: int) -> float:
    params = SamplingParams(max_tokens=NUM_TRIES, ignore_eos=True)
    llm.submit([[1, 2, 3]] * num_sequences, params)
    seconds = []
    while llm.core.has_work:
        started = time.perf_counter()
        record = llm.step()
        if record.num_decoded == num_sequences and not record.num_prefilled:
            seconds.append(time.perf_counter() - started)
    return min(seconds)


def _prefill_s(llm: LLM, num_tokens: int) -> float:
    llm.submit([(np.arange(num_tokens) % 7).tolist()], SamplingParams(max_tokens=1, ignore_eos=True))
    started = time.perf_counter()
    while llm.core.has_work:
        llm.step()
    return time.perf_counter() - started
