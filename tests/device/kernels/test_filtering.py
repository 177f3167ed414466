"""Filters on the device: the least score that is kept, against sorting, and against the sampler's own thresholds."""

import pytest
import torch

from pagedkv.device.kernels import reference
from pagedkv.device.kernels.inputs import Draws, Filters
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.engine.sampling.drawing import (
    WINDOW,
    RowFilters,
    gumbel,
    keys_of,
    run_words,
    thresholds,
    tiled,
)
from tests.device.kernels.suite import IS_INTERPRETED, KERNEL_DEVICE, needs_kernels

pytestmark = needs_kernels

NUM_TOKENS = 700 if IS_INTERPRETED else 50_000
EDGE = 1e-6
"""Mass by which two sums of probabilities may differ (decision 28)."""
ASKED = [
    (1.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 10**9, 1.0, 0.0), (1.0, 0, 0.9, 0.0),
    (0.3, 0, 0.5, 0.0), (2.0, 40, 0.8, 0.0), (1.0, 0, 1.0, 0.05), (0.8, 30, 0.9, 0.1), (1.5, 0, 0.999, 0.0),
    (0.0, 5, 0.5, 0.5), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 1.0),
]  # fmt: skip
"""Temperature, top-k, top-p, min-p."""


def filters_of(asked: list[tuple[float, int, float, float]]) -> Filters:
    columns = list(zip(*asked, strict=True))
    types = (torch.float32, torch.int64, torch.float64, torch.float32)
    return Filters(*(torch.tensor(each, dtype=dtype) for each, dtype in zip(columns, types, strict=True)))


def found(filters: Filters, scores: torch.Tensor, kernels: str = "triton") -> torch.Tensor:
    """Find thresholds, over poison."""
    out = torch.full((len(scores),), torch.nan, device=KERNEL_DEVICE)
    there = Filters(*(each.to(KERNEL_DEVICE) for each in filters))
    kernels_for(KERNEL_DEVICE, kernels).find_least(there, scores.to(KERNEL_DEVICE), out)  # type: ignore[arg-type]
    return out.cpu()


def scores_of(kind: str, num_rows: int, seed: int = 0) -> torch.Tensor:
    """Scores: flat, peaked, full of equal ones, or partly forbidden."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, NUM_TOKENS, generator=generator)
    if kind == "peaked":
        scores[:, ::100] += 12
    elif kind == "equal":
        scores = scores.mul(2).round()
    elif kind == "forbidden":
        scores[:, 3:] = -torch.inf
    return scores


def require_same(filters: Filters, scores: torch.Tensor, mine: torch.Tensor, expected: torch.Tensor) -> None:
    """Thresholds keep the same scores, but for those on the edge of top-p, or of min-p by rounding."""
    for row in range(len(scores)):
        temperature = float(filters.temperatures[row]) or 1.0
        values = scores[row].double()
        kept, others = (values >= float(each[row]) for each in (mine, expected))
        if torch.equal(kept, others):
            continue
        assert not bool(filters.top_p[row] == 1) or bool(filters.min_p[row] > 0), "nothing is on an edge"
        of_top_k = values.topk(min(len(values), int(filters.top_k[row]) or len(values))).values[-1]
        weights = torch.where(values >= of_top_k, ((values - values.max()) / temperature).exp(), 0)
        sums = [float(weights[some].sum() / weights.sum()) for some in (kept, others)]
        near = [abs(each - float(filters.top_p[row])) for each in sums]
        edge = float((values[kept ^ others] - values.max()).abs().max()) * EDGE
        is_edge_of_min = abs(float(mine[row]) - float(expected[row])) <= edge
        assert min(near) < EDGE or is_edge_of_min, (row, near)


@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "forbidden"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_thresholds_are_those_of_sorting(kernels: str, kind: str) -> None:
    filters, scores = filters_of(ASKED), scores_of(kind, len(ASKED))
    expected = torch.full((len(ASKED),), torch.nan)
    reference.find_least(filters, scores, expected)
    assert not expected.isnan().any()
    require_same(filters, scores, found(filters, scores, kernels), expected)


@pytest.mark.parametrize("kind", ["flat", "peaked", "equal"])
def test_thresholds_are_the_samplers(kind: str) -> None:
    asked = [each for each in ASKED if each[0]]
    filters, scores = filters_of(asked), scores_of(kind, len(asked), seed=1)
    tiles, rows = tiled(scores), torch.arange(len(asked))
    theirs = thresholds(tiles, RowFilters(rows, *filters), tiles.largest(rows, WINDOW)[1])
    require_same(filters, scores, found(filters, scores), theirs)


@pytest.mark.parametrize("kind", ["peaked", "equal"])
def test_rows_with_more_candidates_than_room_are_read_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some fit into the room, others do not, and of top-p alone some of those that fit have too little mass."""
    triton_filtering = pytest.importorskip("pagedkv.device.kernels.triton.filtering")
    monkeypatch.setattr(triton_filtering, "ROOM", 32)
    asked = ASKED[2:7]
    filters, scores = filters_of(asked), scores_of(kind, len(asked), seed=2)
    expected = torch.full((len(asked),), torch.nan)
    reference.find_least(filters, scores, expected)
    require_same(filters, scores, found(filters, scores), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_of_other_types(dtype: torch.dtype) -> None:
    filters, scores = filters_of(ASKED), scores_of("flat", len(ASKED)).to(dtype)
    expected = torch.full((len(ASKED),), torch.nan)
    reference.find_least(filters, scores, expected)
    require_same(filters, scores.float(), found(filters, scores), expected)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_each_filter_shows(name: str) -> None:
    """Negative control: without it another score is the least."""
    filters, scores = filters_of([(1.0, 20, 0.5, 0.3)] * 2), scores_of("flat", 2)
    alone = filters_of([(1.0, 0, 1.0, 0.0)] * 2)._replace(**{name: getattr(filters, name)})
    assert not bool((found(alone, scores) == -torch.inf).any())


def test_few_tokens_and_no_rows() -> None:
    filters = filters_of([(1.0, 1, 1.0, 0.0), (1.0, 0, 0.4, 0.0)])
    assert found(filters, torch.tensor([[3.0], [-2.0]])).tolist() == [-torch.inf, -2.0]
    assert found(filters, torch.tensor([[3.0, -0.0, 1.0], [0.0, -1.0, -0.0]])).tolist() == [3.0, 0.0]
    nothing = Filters(*(each[:0] for each in filters))
    assert found(nothing, torch.zeros(0, 4)).shape == (0,)


@pytest.mark.parametrize("asked", [each for each in ASKED if each[0]], ids=str)
def test_draws_behind_filters_are_the_samplers(asked: tuple[float, int, float, float]) -> None:
    """Of a hundred thousand draws a parameter on a GPU none differs but on the edge of what is kept."""
    num_rows, num_tokens = (6, 90) if IS_INTERPRETED else (20_000, 300)
    scores = torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(3))
    filters = filters_of([asked] * num_rows)
    tiles, rows = tiled(scores), torch.arange(num_rows)
    theirs = thresholds(tiles, RowFilters(rows, *filters), tiles.largest(rows, WINDOW)[1])
    mine = found(filters, scores)
    for seed in range(1 if IS_INTERPRETED else 5):
        columns = [torch.arange(num_rows) * 7919 + seed, torch.zeros(num_rows, dtype=torch.int64), rows]
        words = run_words(keys_of(*columns), torch.zeros(num_rows, dtype=torch.int64), num_tokens)
        sums = gumbel(words) + scores.double() / filters.temperatures.double()[:, None]
        expected = sums.masked_fill(scores < theirs[:, None], -torch.inf).argmax(dim=1)
        draws = Draws(*(each.to(KERNEL_DEVICE) for each in (filters.temperatures, mine, *columns)))
        out = torch.full((num_rows,), 99, dtype=torch.int64, device=KERNEL_DEVICE)
        kernels_for(KERNEL_DEVICE, "triton").draw_tokens(
            draws, scores.to(KERNEL_DEVICE), out, torch.empty_like(draws[1])
        )
        differs = (out.cpu() != expected).nonzero()[:, 0]
        assert bool((mine[differs] != theirs[differs]).all()), "the same is kept, and another token drawn"
        assert len(differs) <= num_rows // 1000
    require_same(*some_of(filters, scores, mine, theirs))


def some_of(
    filters: Filters, scores: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor
) -> tuple[Filters, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows whose thresholds differ, at most a hundred of them."""
    rows = (mine != theirs).nonzero()[:100, 0]
    return Filters(*(each[rows] for each in filters)), scores[rows], mine[rows], theirs[rows]
