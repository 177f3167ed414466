"""Decode steps of the engine on a GPU, by graphs or not, compiled or not: the shape of an 8B Llama, random weights.

    python -m benchmarks.engine.on_gpu [--rows 64 256] [--ways overlapped compiled captured plain]
                                       [--kinds greedy drawn by-host] [--json FILE]
    python -m benchmarks.engine.on_gpu --shape latents --ways captured unfolded

The second shape has the attention of DeepSeek-V2-Lite (16 heads, latents of 512 + 64 dimensions, 27 layers) between
dense layers. Prompts of 1,024 tokens that share nothing are computed; then all decode up to 1,151 tokens, and these
steps are timed. The captured forward pass is timed by itself as well: its graph, replayed on the tables of the last
step. Idle is the share of a step during which the device waits for the host, between sampling and the next step, or
before sampling. Tokens are the most likely ones, or drawn (temperature 0.8, top-k 50, top-p 0.95, a repetition penalty
of 1.1): by the device without the host, or by the sampler, for which the host waits for the device's results.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.machine import describe
from pagedkv.engine import LLM, EngineConfig, SamplingParams, StepRecord
from pagedkv.engine.sampling import BatchSampler
from pagedkv.probe import compat

PROMPT: Final = 1024
NUM_NEW: Final = 128
VOCABULARY: Final = 128_256
WAYS: Final = ("overlapped", "compiled", "captured", "plain", "unfolded")
"""Compiled and captured, steps that overlap; compiled and captured; captured; call by call; latents unfolded."""
KINDS: Final = ("greedy", "drawn", "by-host")
DRAWN: Final = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1)
PARTS: Final = ("schedule", "forward", "sample", "finish")


@dataclass(frozen=True)
class Served:
    """What one engine did.

    Args:
        num_rows: sequences; way: one of :data:`WAYS`; kind: one of :data:`KINDS`.
        tokens_per_s: of decode steps, the median step; step_ms: its time.
        parts_ms: of it, each part.
        graph_ms: the graph alone; None: there is none. idle_share: of the time of the steps measured for it.
        prompts_s: seconds of the steps that computed prompts; built_s: seconds until the engine could serve.
        refusal: why steps were not replayed.
    """

    num_rows: int
    way: str
    tokens_per_s: float
    step_ms: float
    parts_ms: dict[str, float]
    graph_ms: float | None
    idle_share: float
    prompts_s: float
    built_s: float
    refusal: str | None
    kind: str = "greedy"


def make_llama(num_layers: int) -> PreTrainedModel:
    """Build the shape of Llama 3 8B."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_latents(num_layers: int) -> PreTrainedModel:
    """Build the attention of DeepSeek-V2-Lite between dense layers of its first layer's size."""
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=10_944,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    return DeepseekV3ForCausalLM(config)


SHAPES: Final = {"llama": (make_llama, 32), "latents": (make_latents, 27)}


def make_model(shape: str, num_layers: int | None) -> compat.Model:
    """Build a shape with random weights on the GPU, in bfloat16."""
    make, all_layers = SHAPES[shape]
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: compat.Model = make(num_layers or all_layers).eval()
            return model
    finally:
        torch.set_default_dtype(before)


def serve(model: compat.Model, num_rows: int, way: str, kind: str = "greedy") -> Served:
    """Let as many sequences decode together."""
    begun = perf_counter()
    config = EngineConfig(
        num_blocks=num_rows * (PROMPT + NUM_NEW + 32) // 16 + 64,
        max_sequences=num_rows,
        max_batched_tokens=8192,
        max_tokens=2048,
        self_test=False,
        capture_steps=way not in {"plain", "unfolded"},
        absorb_latents=way != "unfolded",
        compile_model=way in {"overlapped", "compiled"},
        overlap=way == "overlapped",
    )
    llm = LLM(model, config)
    torch.cuda.synchronize()
    built_s = perf_counter() - begun
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(5, VOCABULARY, (num_rows, PROMPT), generator=generator).tolist()
    params = SamplingParams() if kind == "greedy" else DRAWN
    if kind == "by-host":
        llm.core._loop._answering._sampler = BatchSampler(VOCABULARY, draws_ahead=False)  # noqa: SLF001 - no other way to it
    llm.submit(prompts, replace(params, max_tokens=NUM_NEW, ignore_eos=True))
    records: list[tuple[float, StepRecord]] = []
    graph_ms = None
    gaps = Gaps(llm)
    while llm.core.has_work:
        if len(records) == 100:
            gaps.stop()
            graph_ms = _graph_ms(llm, num_rows) if llm.core.capture_state.num_graphs else None
        if len(records) == 60:
            gaps.begin()
        start = perf_counter()
        record = llm.step()
        records.append((perf_counter() - start, record))
    timed = [each for each in records if each[1].num_decoded == num_rows and not each[1].num_prefilled][4:]
    step_s = median(seconds for seconds, _ in timed)
    parts = {part: median(getattr(record, f"{part}_seconds") for _, record in timed) * 1e3 for part in PARTS}
    state = llm.core.capture_state
    return Served(
        num_rows,
        way,
        num_rows / step_s,
        step_s * 1e3,
        parts,
        graph_ms,
        gaps.idle_share(),
        sum(seconds for seconds, record in records if record.num_prefilled),
        built_s,
        state.refusal,
        kind,
    )


class Gaps:
    """Marks in the device's stream around launches and sampling: between them the device waits for the host.

    Args:
        llm: the engine, whose calls are wrapped while steps are marked.
    """

    def __init__(self, llm: LLM) -> None:
        self._core = llm.core
        self._calls = llm.core.executor.launch, llm.core._loop._answering.begin  # noqa: SLF001 - there is no other way to it
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Mark every launch and every sampling from now on."""
        launch, begin = self._calls
        self._core.executor.launch = lambda *given: self._marked(launch, *given)  # type: ignore[method-assign]
        self._core._loop._answering.begin = lambda *given: self._marked(begin, *given)  # type: ignore[method-assign]  # noqa: SLF001

    def stop(self) -> None:
        """Mark nothing more."""
        self._core.executor.launch, self._core._loop._answering.begin = self._calls  # type: ignore[method-assign]  # noqa: SLF001

    def idle_share(self) -> float:
        """Give the time between marked calls as a share of the time from the first to the last."""
        torch.cuda.synchronize()
        idle: float = sum(before[1].elapsed_time(behind[0]) for before, behind in pairwise(self._spans))
        whole: float = self._spans[0][0].elapsed_time(self._spans[-1][0])
        return idle / whole

    def _marked(self, call: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - as it is
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        span[0].record()
        answer = call(*given)
        span[1].record()
        self._spans.append(span)
        return answer


def _graph_ms(llm: LLM, num_tokens: int) -> float:
    """Time a graph by itself."""
    captured = llm.core._parts.runner._captured  # noqa: SLF001 - there is no other way to it
    assert captured is not None
    graphs = captured._graphs.items()  # noqa: SLF001 - as above
    graph = next(graph.recording for kind, graph in graphs if kind.size == num_tokens and not kind.has_chunks)
    times: list[float] = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


def figures(model: compat.Model, rows: Sequence[int], ways: Sequence[str], kinds: Sequence[str]) -> Iterator[Served]:
    """Serve in each way, at each number of rows, tokens of each kind."""
    for num_rows, way, kind in product(rows, ways, kinds):
        yield serve(model, num_rows, way, kind)
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:1])
    parser.add_argument("--layers", type=int, help="all of the shape's unless given")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    model = make_model(given.shape, given.layers)
    results = []
    for served in figures(model, given.rows, given.ways, given.kinds):
        results.append(asdict(served))
        parts = ", ".join(f"{name} {value:.2f}" for name, value in served.parts_ms.items())
        graph = "" if served.graph_ms is None else f", its graph alone {served.graph_ms:.2f}"
        print(
            f"{served.num_rows} rows {served.way}, {served.kind}: {served.tokens_per_s:,.0f} tokens/s, a step "
            f"{served.step_ms:.2f} ms ({parts}){graph}; idle {served.idle_share:.1%}; "
            f"prompts {served.prompts_s:.2f} s, built in {served.built_s:.1f} s; {served.refusal or 'nothing refused'}",
            flush=True,
        )
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        card = torch.cuda.get_device_name()
        given.json.write_text(
            json.dumps({"machine": describe() | {"device": card}, "served": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
