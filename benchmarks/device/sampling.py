"""Figures of sampling on the device: draws from whole vocabularies, and filters before them."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from benchmarks.device.timing import Figure, by_graph, figure
from pagedkv.device.kernels import reference
from pagedkv.device.kernels.inputs import Draws, Filters
from pagedkv.device.kernels.selection import kernels_for

__all__ = ["sampling_figures"]

NUM_ROWS: Final = 64
NUM_TOKENS: Final = 128_256
RUNS_A_GRAPH: Final = 4
NUM_RUNS: Final = 20


def sampling_figures() -> Iterator[Figure]:
    """Measure greedy rows, rows with noise, and filters; tokens are those of plain torch."""
    kernels = kernels_for(torch.device("cuda"), "triton")
    scores = 2 * torch.randn(NUM_ROWS, NUM_TOKENS, device="cuda")
    ones = torch.ones(NUM_ROWS, device="cuda")
    numbers = torch.arange(NUM_ROWS, device="cuda")
    out, least, greatest = torch.zeros_like(numbers), torch.full_like(ones, -torch.inf), torch.zeros_like(ones)
    name = f"{NUM_ROWS} rows of {NUM_TOKENS:,} tokens"
    for what, temperature in (("greedy", 0.0), ("drawn with noise", 0.8)):
        draws = Draws(ones * temperature, least, numbers, numbers, numbers)
        kernels.draw_tokens(draws, scores, out, greatest)
        expected = torch.zeros_like(out)
        reference.draw_tokens(draws, scores, expected, torch.empty_like(ones))
        assert torch.equal(out, expected), "other tokens were drawn"
        yield figure(
            f"{name}, {what}",
            by_graph([partial(kernels.draw_tokens, draws, scores, out, greatest)] * RUNS_A_GRAPH, NUM_RUNS),
        )
    for what, top_k, top_p, temperature in (
        ("top-k 50", 50, 1.0, 1.0),
        ("top-k 50 and top-p 0.9", 50, 0.9, 1.0),
        ("top-p 0.9 of few likely tokens", 0, 0.9, 0.4),
        ("top-p 0.9 of many", 0, 0.9, 1.0),
    ):
        filters = Filters(ones * temperature, numbers * 0 + top_k, (ones * top_p).double(), ones * 0)
        kernels.find_least(filters, scores, least)
        expected_least = torch.zeros_like(least)
        reference.find_least(filters, scores, expected_least)
        assert torch.allclose(least, expected_least, rtol=1e-4, atol=1e-4), "another threshold was found"
        yield figure(
            f"{name}, {what} found",
            by_graph([partial(kernels.find_least, filters, scores, least)] * RUNS_A_GRAPH, NUM_RUNS),
        )
