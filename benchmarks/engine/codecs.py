"""Figures of codecs of tiers: bytes, speed, what rounding changes. ``python -m benchmarks.engine.codecs [--smollm2]``.

A model computes prompts, and its tier stores them. A second engine loads them through each codec and computes the last
token of each. The log-probabilities of the most likely next tokens are compared with those of an engine without a tier.
Speed is bytes of keys and values by the processor time of one thread, the best of some rounds.

The model is a small Llama made from its configuration with a fixed seed, of random weights. With ``--smollm2`` it is
SmolLM2 135M, in the environment that ``make test-pretrained`` makes.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.tiers import AesGcm, Codec, FolderTier, Fp8, Zstd
from pagedkv.tiers.codecs import NO_CODEC

CODECS: Final[dict[str, Codec]] = {
    "none": NO_CODEC,
    "zstd": Zstd(),
    "zstd:9": Zstd(9),
    "aes-gcm": AesGcm(bytes(32)),
    "fp8-e4m3": Fp8(),
}
CONFIG: Final = EngineConfig(num_blocks=2000, warm_up=False, self_test=False)
NUM_PROMPTS: Final = 8
PROMPT_TOKENS: Final = 257
TOP: Final = 10
ROUNDS: Final = 3
SECONDS: Final = 600.0


def small_model(dtype: torch.dtype) -> Any:  # noqa: ANN401 - of transformers
    """Make a small Llama of random weights."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=1024, **sizes))
    return cast("Any", model).to(dtype).eval()


def next_tokens(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[list[dict[int, float]], int]:
    """Return the log-probabilities of the most likely next tokens of each prompt, and how many tokens were loaded."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, logprobs=TOP, ignore_eos=True))
    tokens = [dict(output.completions[0].logprobs[0].top) for output in outputs]  # type: ignore[index]
    return tokens, sum(sum(output.num_loaded_tokens.values()) for output in outputs)


def speed(work: Callable[[], object], nbytes: int) -> float:
    """Return MB for each second of processor time, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return nbytes / max(best, 1e-9) / 1e6


def measure(
    model: Any,  # noqa: ANN401 - of transformers
    prompts: Sequence[Sequence[int]],
    exact: list[dict[int, float]],
    codec: Codec,
) -> dict[str, float]:
    """Measure one codec; ``exact``: the next tokens without a tier."""
    with tempfile.TemporaryDirectory() as folder:
        tier = FolderTier(folder, "4GiB", loads="always", deadline_s=SECONDS, codec=codec)
        config = replace(CONFIG, tiers=(tier,))
        llm = LLM(model, config)
        next_tokens(llm, prompts)
        assert llm.close(SECONDS)
        again = LLM(model, config)
        coded, num_loaded = next_tokens(again, prompts)
        stored = again.tier_statistics()[0].store.nbytes
        content = again.core._content  # noqa: SLF001 - its layout is no public thing
        assert content is not None
        layout = content.identity(1).groups[0]
        again.close()
    block_nbytes = torch.empty((), dtype=getattr(torch, layout.dtype)).element_size()
    for size in layout.shape:
        block_nbytes *= size
    differences = [
        abs(logprob - after[token])
        for before, after in zip(exact, coded, strict=True)
        for token, logprob in before.items()
        if token in after
    ]
    part = _some_part(model, prompts[0], layout.dtype, block_nbytes)
    key = bytes(32)
    written = b"".join(codec.seal([codec.encode(layout, part)], key))

    def read() -> None:
        frame = codec.unseal(written, key)
        assert isinstance(frame, bytes | memoryview)
        assert codec.decode(layout, memoryview(frame)) is not None

    return {
        "bytes": stored / (num_loaded / layout.block_size * block_nbytes),
        "writing MB/s": speed(lambda: b"".join(codec.seal([codec.encode(layout, part)], key)), len(part)),
        "reading MB/s": speed(read, len(part)),
        "mean difference": sum(differences) / len(differences),
        "largest": max(differences),
        "same first token": sum(
            max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in zip(exact, coded, strict=True)
        )
        / len(exact),
    }


def _some_part(model: Any, prompt: Sequence[int], dtype: str, block_nbytes: int) -> bytes:  # noqa: ANN401 - of transformers
    """Return keys and values of a prompt, in whole blocks, as bytes: by layer, then keys and values, by token."""
    with torch.no_grad():
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    layers = [torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2) for layer in cache.layers]
    numbers = torch.stack(layers)[:, :, : (len(prompt) - 1) // 16 * 16]
    blocks = numbers.unflatten(2, (-1, 16)).permute(2, 0, 1, 3, 4, 5).contiguous()
    content = bytes(blocks.to(getattr(torch, dtype)).view(torch.uint8).numpy())
    assert len(content) % block_nbytes == 0
    return content


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS), metavar="CODEC")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, metavar="N")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = ("float32",) if arguments.smollm2 else ("float32", "bfloat16")
    table = Table("model", "codec", "bytes", "writing MB/s", "reading MB/s", "mean", "largest", "same first token")
    for dtype in dtypes:
        if arguments.smollm2:
            from tests.pretrained.smollm2 import model_folder, weights_file  # noqa: PLC0415 - in its environment alone

            weights = weights_file()
            assert weights is not None, "make test-pretrained installs SmolLM2"
            folder = model_folder(weights)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            words = AutoTokenizer.from_pretrained(folder)(TEXT * 50)["input_ids"]
            prompts = [words[97 * number : 97 * number + PROMPT_TOKENS] for number in range(arguments.prompts)]
        else:
            model = small_model(getattr(torch, dtype))
            generator = torch.Generator().manual_seed(1)
            prompts = torch.randint(0, 1000, (arguments.prompts, PROMPT_TOKENS), generator=generator).tolist()
        exact, _ = next_tokens(LLM(model, CONFIG), prompts)
        for name in arguments.codecs:
            figures = measure(model, prompts, exact, CODECS[name])
            table.add_row(
                f"{'SmolLM2' if arguments.smollm2 else 'small'} {dtype}",
                name,
                f"{figures['bytes']:.3f}",
                f"{figures['writing MB/s']:,.0f}",
                f"{figures['reading MB/s']:,.0f}",
                f"{figures['mean difference']:.2g}",
                f"{figures['largest']:.2g}",
                f"{figures['same first token']:.3f}",
            )
    Console(width=140).print(table)


TEXT: Final = (
    "The harbour master wrote down every boat that came in before the storm, and the names of those that did not. "
    "In the morning the list was longer than anybody had expected; three of them were from the islands. "
)

if __name__ == "__main__":
    main()
