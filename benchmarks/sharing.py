"""Memory saved by sharing among samples and beams, beside the figures of PagedAttention (SOSP 2023, Fig. 15).

The paper served OPT-13B on one A100 with 40 GB, requests of Alpaca's lengths: 19.31 prompt and 58.45 output tokens in
the mean (its Fig. 11). Only the means are published, so lengths here are log-normal with these means and an assumed
spread. How the paper's beams picked their parents is not known; here each picks one at random (docs/replay.md).

    python -m benchmarks.sharing
"""

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from rich.console import Console

from pagedkv.contract.space_config import blocks_that_fit
from pagedkv.models import read_model
from pagedkv.models.memory import block_nbytes_of, groups_of
from pagedkv.planner.traces import TokenizedRequest
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import find_gpu, kv_budget_nbytes, read_cost_model

BLOCK_SIZE: Final = 16
MAX_SEQUENCES: Final = 256
CONTEXT: Final = 2048
NUM_REQUESTS: Final = 2000
REQUESTS_PER_S: Final = 8.0
MEAN_PROMPT: Final = 19.31
MEAN_OUTPUT: Final = 58.45
SIGMA_PROMPT: Final = 0.4
SIGMA_OUTPUT: Final = 0.8
PUBLISHED: Final = {
    ("num_samples", 2): 6.1,
    ("num_samples", 4): 8.5,
    ("num_samples", 6): 9.8,
    ("beam_width", 2): 37.6,
    ("beam_width", 4): 53.1,
    ("beam_width", 6): 55.2,
}
"""Percent of the blocks."""


def requests() -> Iterator[TokenizedRequest]:
    """Generate requests of Alpaca's mean lengths, from a fixed seed, arriving as a Poisson process."""
    random = np.random.default_rng(0)
    arrival_s = 0.0
    for _ in range(NUM_REQUESTS):
        arrival_s += random.exponential(1 / REQUESTS_PER_S)
        prompt, output = length(random, MEAN_PROMPT, SIGMA_PROMPT), length(random, MEAN_OUTPUT, SIGMA_OUTPUT)
        tokens = random.integers(2**31, size=prompt + output, dtype=np.int32)
        yield TokenizedRequest(arrival_s, tokens[:prompt], tokens[prompt:])


def length(random: np.random.Generator, mean: float, sigma: float) -> int:
    """Draw a log-normal length of the given mean, at least 1."""
    return max(1, round(random.lognormal(math.log(mean) - sigma**2 / 2, sigma)))


def saving(kind: str, width: int) -> float:
    """Serve the requests, each with so many samples or beams; return the saving in percent."""
    model = read_model("opt-13b")
    block_nbytes = block_nbytes_of(model, BLOCK_SIZE)
    groups = groups_of(model, BLOCK_SIZE)
    nbytes = kv_budget_nbytes(model, find_gpu("a100-40"))
    options: dict[str, Any] = {kind: width}
    config = ServingConfig(
        num_blocks=blocks_that_fit(groups, block_nbytes, nbytes, CONTEXT, CONTEXT),
        block_size=BLOCK_SIZE,
        groups=groups,
        max_sequences=MAX_SEQUENCES,
        block_nbytes=block_nbytes,
        **options,
    )
    result = VirtualServer(config, read_cost_model("opt-13b/a100-40")).run(requests())
    assert result.requests["num_finished"] == NUM_REQUESTS, result.requests
    return 100 * float(result.sharing["mean_saving"])


def savings() -> Iterator[tuple[str, float, float]]:
    """Yield for each row of the table what it is about, the published saving and the one here, in percent."""
    for (kind, width), published in PUBLISHED.items():
        yield f"{width} {'samples' if kind == 'num_samples' else 'beams'}", published, saving(kind, width)


def main() -> None:
    """Print a table in Markdown."""
    console = Console()
    console.print("| | published | here |\n|---|---|---|")
    for name, published, here in savings():
        console.print(f"| {name} | {published} % | {here:.1f} % |")


if __name__ == "__main__":
    main()
