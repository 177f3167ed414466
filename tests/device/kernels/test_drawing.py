"""Noise and draws: words bit by bit those of the sampler, tokens those of perturbing every score in the open."""

import pytest
import torch

from pagedkv.device.kernels import reference
from pagedkv.device.kernels.inputs import FACTORS, GAMMA, NO_TOKEN, SHIFTS, Draws
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.engine.sampling.drawing import gumbel, keys_of, run_words
from tests.device.kernels.suite import IS_INTERPRETED, KERNEL_DEVICE, needs_kernels

pytestmark = needs_kernels

EXTREMES = [0, 1, -1, 2**31, 2**63 - 1, -(2**63), 12345678901234567]
SIZES = [1, 1023, 4097] if IS_INTERPRETED else [1, 2, 1023, 4097, 130_000]
MANY = 40 if IS_INTERPRETED else 10_000
"""Rows: with 100 of them drawn from a hundred times, a million draws on a GPU."""
NEAR = 1e-9
"""Two sums so near may change places where logarithms are another library's."""


def draws_of(num_rows: int, *, temperature: float = 1.0, least: float = float("-inf"), seed: int = 0) -> Draws:
    """Draws of rows with seeds, samples and positions of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    seeds[: len(EXTREMES)] = torch.tensor(EXTREMES)[:num_rows]
    samples = torch.randint(0, 4, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**20, (num_rows,), generator=generator)
    column = torch.full((num_rows,), 1.0)
    return on_device(Draws(column * temperature, column * least, seeds, samples, positions))


def on_device(draws: Draws) -> Draws:
    return Draws(*(each.to(KERNEL_DEVICE) for each in draws))


def drawn(draws: Draws, scores: torch.Tensor) -> torch.Tensor:
    """Draw by Triton's kernels, over poison."""
    out = torch.full((len(scores),), 99, dtype=torch.int64, device=KERNEL_DEVICE)
    greatest = torch.full((len(scores),), torch.nan, device=KERNEL_DEVICE)
    kernels_for(KERNEL_DEVICE, "triton").draw_tokens(draws, scores.to(KERNEL_DEVICE), out, greatest)
    assert torch.equal(greatest.cpu().view(torch.int32), scores.cpu().amax(dim=1).float().view(torch.int32))
    return out.cpu()


def plainly(draws: Draws, scores: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(scores),), 99, dtype=torch.int64)
    reference.draw_tokens(Draws(*(each.cpu() for each in draws)), scores, out, torch.empty(len(scores)))
    return out


def perturbed(draws: Draws, scores: torch.Tensor) -> torch.Tensor:
    """The sums, by the sampler's own functions."""
    temperatures, least, *columns = (each.cpu() for each in draws)
    words = run_words(keys_of(*columns), torch.zeros(len(scores), dtype=torch.int64), scores.shape[1])
    sums = gumbel(words) + scores.double() / temperatures.double()[:, None]
    return sums.masked_fill(scores < least[:, None], -torch.inf)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("first", [0, 1, 127_999, 2**31 + 5])
def test_words_are_the_samplers(kernels: str, first: int) -> None:
    """Bit by bit: two million of them on a GPU."""
    num_rows, num_words = (9, 1100) if IS_INTERPRETED else (200, 10_000)
    draws = draws_of(num_rows)
    out = torch.zeros(num_rows, num_words, dtype=torch.int64, device=KERNEL_DEVICE)
    kernels_for(KERNEL_DEVICE, kernels).noise_words(draws, first, out)  # type: ignore[arg-type]
    keys = keys_of(*(each.cpu() for each in draws[2:]))
    assert torch.equal(out.cpu(), run_words(keys, torch.full((num_rows,), first), num_words))


def test_every_number_of_a_word_counts() -> None:
    """Negative control: another seed, sample or position is another stream."""
    draws = draws_of(4)
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    out = torch.zeros(4, 64, dtype=torch.int64, device=KERNEL_DEVICE)
    kernels.noise_words(draws, 0, out)
    for name in ("seeds", "samples", "positions"):
        other = torch.zeros_like(out)
        kernels.noise_words(draws._replace(**{name: getattr(draws, name) + 1}), 0, other)
        assert not bool((other == out).any()), name


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tokens_are_those_of_perturbing_every_score(num_tokens: int, dtype: torch.dtype) -> None:
    draws = draws_of(8, temperature=0.7)
    scores = (3 * torch.randn(8, num_tokens, generator=torch.Generator().manual_seed(1))).to(dtype)
    expected = perturbed(draws, scores.float()).argmax(dim=1)
    assert torch.equal(drawn(draws, scores), expected)
    assert torch.equal(plainly(draws, scores), expected)


@pytest.mark.parametrize(
    ("temperature", "least"), [(1.0, -torch.inf), (0.3, -torch.inf), (2.5, 0.5), (1e-3, -torch.inf), (1.0, 2.0)]
)
def test_many_draws_are_the_samplers(temperature: float, least: float) -> None:
    """A row differs only where the two greatest sums are as near as two libraries' logarithms."""
    num_tokens = 257
    scores = 2 * torch.randn(MANY, num_tokens, generator=torch.Generator().manual_seed(2))
    scores[:, 7] = 2.5  # so that something is kept everywhere
    for seed in range(1 if IS_INTERPRETED else 20):
        draws = draws_of(MANY, temperature=temperature, least=least, seed=seed)
        sums = perturbed(draws, scores)
        found = drawn(draws, scores)
        differs = found != sums.argmax(dim=1)
        best = sums.topk(2, dim=1).values
        assert bool(((best[:, 0] - best[:, 1])[differs] < NEAR).all())
        assert int(differs.sum()) <= MANY // 1000


def unmixed(word: int) -> int:
    """Return the number that a hash mixes into this word."""
    for shift, factor in reversed(list(zip(SHIFTS, (*FACTORS, 1), strict=True))):
        word = word * pow(factor, -1, 2**64) % 2**64
        found = word
        for _ in range(64 // shift):
            found = word ^ (found >> shift)
        word = found
    return word


def seed_of_word(word: int, token: int) -> int:
    """Return the seed with which a token's word is this one, at sample and position 0."""
    for counter in (token, 0, 0, 0):
        word = (unmixed(word % 2**64) - (counter + 1) * GAMMA) % 2**64
    return word - 2**64 if word >= 2**63 else word


@pytest.mark.parametrize("below", [0, 1, 15, 16, 17, 2**27, 2**31, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize("rest", [0, 2**32 - 1])
def test_the_greatest_and_the_least_words_have_their_noise(below: int, rest: int) -> None:
    """One token's word is chosen; its score is such that its sum is just above, or just below, that of the others."""
    token, signed = 1500, ((2**31 - 1 - below) * 2**32 + rest)
    seed = torch.tensor([seed_of_word(signed, token)])
    zeros = torch.zeros_like(seed)
    words = run_words(keys_of(seed, zeros, zeros), zeros, 4000)
    assert int(words[0, token]) >> 32 == 2**31 - 1 - below
    noise = gumbel(words)[0]
    others = torch.cat([noise[:token], noise[token + 1 :]]).max()
    for margin in (1e-3, -1e-3):
        scores = torch.zeros(1, 4000)
        scores[0, token] = others - noise[token] + margin
        draws = on_device(Draws(torch.ones(1), torch.full((1,), -torch.inf), seed, zeros, zeros))
        assert (int(drawn(draws, scores)) == token) == (margin > 0)


def test_greedy_rows_take_the_first_of_the_greatest() -> None:
    scores = torch.randint(0, 5, (6, 9000 if not IS_INTERPRETED else 4500)).float()
    draws = draws_of(6, temperature=0.0)
    expected = (scores == scores.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    assert torch.equal(drawn(draws, scores), expected)
    assert torch.equal(plainly(draws, scores), expected)


def test_rows_without_a_finite_greatest_score_have_no_token() -> None:
    """And take nothing from the others."""
    scores = torch.randn(6, 4500)
    scores[0, 4400] = torch.nan
    scores[1, 3] = torch.inf
    scores[2] = -torch.inf
    scores[3, 5:] = -torch.inf
    scores[5, 0] = torch.nan
    draws = draws_of(6)
    draws.least[4] = 1e6
    found = drawn(draws, scores)
    assert found[[0, 1, 2, 4, 5]].tolist() == [NO_TOKEN] * 5
    assert torch.equal(found, plainly(draws, scores))
    assert 0 <= int(found[3]) < 5


def test_no_rows_are_drawn_from() -> None:
    assert drawn(draws_of(0), torch.zeros(0, 10)).shape == (0,)


def test_a_rows_token_does_not_depend_on_the_others() -> None:
    draws, scores = draws_of(5), torch.randn(5, 4500)
    together = drawn(draws, scores)
    for row in range(5):
        only = slice(row, row + 1)
        alone = Draws(*(each[only] for each in draws))
        assert drawn(alone, scores[only]) == together[row]


if KERNEL_DEVICE.type == "cuda":

    def test_one_graph_draws_for_any_step() -> None:
        """Positions, temperatures and scores are read when it is replayed."""
        draws, scores = draws_of(16), torch.randn(16, 32_000, device=KERNEL_DEVICE)
        out = torch.zeros(16, dtype=torch.int64, device=KERNEL_DEVICE)
        greatest = torch.zeros(16, device=KERNEL_DEVICE)
        kernels = kernels_for(KERNEL_DEVICE, "triton")
        kernels.draw_tokens(draws, scores, out, greatest)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.draw_tokens(draws, scores, out, greatest)
        for step in range(3):
            draws.positions.add_(1)
            draws.temperatures[step] = 0.0
            scores.copy_(torch.randn(16, 32_000))
            graph.replay()
            assert torch.equal(out.cpu(), drawn(draws, scores))
