"""One engine in a process of its own: ``side.py ENGINE MODEL_FOLDER DTYPE``, run by the engine's own interpreter.

It imports nothing of this repository but what the engine needs, so that it runs beside vLLM as well. A line of standard
input is one piece of work, a line of standard output its answer; with "profiled", "products" is the share of the time
that torch spends in products of matrices::

    {"prompts": [[...], ...], "num_new": 64, "profiled": false}
    {"seconds": 1.2, "processor_seconds": 1.2, "products": null, "token_ids": [[...], ...]}
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

Engine: TypeAlias = Callable[[list[list[int]], int], list[list[int]]]
"""Takes prompts and a number of new tokens; returns the most likely ones of each, without an end."""
MOST_TOKENS: Final = 2048
"""Of a step, for both."""
PRODUCTS: Final = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "mkldnn::_linear_pointwise",
    "mkldnn::_convolution_pointwise",
)


def pagedkv(folder: str, dtype: str) -> Engine:
    """Build ours, with as many blocks as vLLM's are given."""
    from pagedkv.engine import LLM, EngineConfig, SamplingParams  # noqa: PLC0415 - the other engine's process lacks it
    from pagedkv.engine.loading import load  # noqa: PLC0415 - as above

    model, tokenizer = load(folder, dtype=dtype, device="cpu")
    llm = LLM(model, EngineConfig(kv_nbytes=2**30, max_batched_tokens=MOST_TOKENS), tokenizer=tokenizer)

    def answer(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        return [list(output.completions[0].token_ids) for output in llm.generate(prompts, params)]

    return answer


def vllm(folder: str, dtype: str) -> Engine:
    """Build vLLM's, within this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - the other engine's process lacks it

    llm: Any = LLM(
        folder, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_num_batched_tokens=MOST_TOKENS
    )

    def answer(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in llm.generate(given, params, use_tqdm=False)]

    return answer


def share_of_products(run: Callable[[], object]) -> float:
    """Run under torch's profiler; return the share of products of matrices in the processor's time."""
    began = time.process_time()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
        taken = time.process_time() - began
    spent: float = sum(each.self_cpu_time_total for each in profile.key_averages() if each.key in PRODUCTS)
    return spent / 1e6 / taken


def main() -> None:
    """Answer pieces of work until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # engines print
    engine = {"pagedkv": pagedkv, "vllm": vllm}[sys.argv[1]](*sys.argv[2:4])
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        prompts, num_new = work["prompts"], work["num_new"]
        answer: dict[str, Any] = {}
        if work["profiled"]:
            answer["products"] = share_of_products(lambda: engine(prompts, num_new))  # noqa: B023 - called at once
        else:
            began, processor = time.perf_counter(), time.process_time()
            answer["token_ids"] = engine(prompts, num_new)
            answer["seconds"] = time.perf_counter() - began
            answer["processor_seconds"] = time.process_time() - processor
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
