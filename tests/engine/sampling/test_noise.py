"""Noise: the published words of the hash, and samples distributed as they must be, which hang on nothing else.

The statistical tests use fixed seeds, so they pass or fail alike each time; their bounds are those of a false alarm in
a million. Each has a control that it must refuse.
"""

import math

import pytest
import torch

from pagedkv.engine.sampling import BatchSampler, Place, SampledSequence, SamplingParams
from pagedkv.engine.sampling.drawing import GREATEST_NOISE, TILE_SIZE, draw, gumbel, keys_of, run_words, tiled, words
from tests.engine.sampling.rows import VOCAB_SIZE, logits_of, sequence_of

MASK = 2**64 - 1


def plain_word(key: int, counter: int) -> int:
    """SplitMix64 in whole numbers, as its authors print it."""
    word = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def unsigned(tensor: torch.Tensor) -> list[int]:
    return [word & MASK for word in tensor.tolist()]


def test_the_words_are_those_that_others_publish_for_splitmix64() -> None:
    """Seed 1234567, as in the test vectors of other implementations."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert unsigned(words(torch.tensor(1234567), torch.arange(5))) == expected


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, -1, -(2**63), 123456789])
def test_words_wrap_around_as_64_bits_do(key: int) -> None:
    counters = [0, 1, 2, 127, 128, 151_935, 2**31 - 1]
    expected = [plain_word(key, counter) for counter in counters]
    assert unsigned(words(torch.tensor(key), torch.tensor(counters))) == expected
    run = run_words(torch.tensor([key, key]), torch.tensor([0, 128]), 3)
    assert unsigned(run.flatten()) == [plain_word(key, counter) for counter in (0, 1, 2, 128, 129, 130)]


GOLDEN = [
    0x2130748AAAC80268,
    0x826DA27DE307EFA7,
    0x1CB3B3E54F582651,
    0x88881F3DE9608F48,
    0x422ED7B40264AF4F,
    0x0887687A02E5E63F,
    0xB47BE03E408CB5D1,
    0x6BB4105018AFE7BB,
]


def test_golden_words_of_seed_sample_position_and_token() -> None:
    """Written out: whoever changes them changes the answers of every seed."""
    columns = torch.tensor([[0, 0, 0], [42, 0, 17], [42, 1, 17], [2**63 - 1, 3, 131_071]])
    keys = keys_of(*columns.T)
    for key, (seed, sample, position) in zip(unsigned(keys), columns.tolist(), strict=True):
        assert key == plain_word(plain_word(plain_word(seed, 0), sample), position)
    assert unsigned(words(keys[:, None], torch.tensor([0, 31_999])).flatten()) == GOLDEN


def test_noise_is_finite_for_every_word() -> None:
    ends = gumbel(torch.tensor([-(2**63), -(2**63) + 4095, -1, 0, 2**63 - 1]))
    assert torch.isfinite(ends).all()
    assert (ends[1:] >= ends[:-1]).all()
    assert float(ends[-1]) < GREATEST_NOISE
    assert float(ends[0]) == pytest.approx(-math.log(53 * math.log(2)))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic, and the bound that it exceeds once in a million (Wilson and Hilferty's approximation)."""
    expected = probabilities.double() * counts.sum()
    assert expected.min() >= 5
    freedom = len(counts) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), bound


def drawn(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Draw as many tokens as keys, all from one row of logits."""
    num = len(seeds)
    tiles = tiled(logits.expand(num, -1).contiguous())
    least = torch.full((num,), -torch.inf)
    return draw(tiles, torch.arange(num), torch.ones(num), least, keys_of(seeds, samples, positions))


VARIED = {
    "positions": lambda count: (torch.full((count,), 5), torch.arange(count), torch.zeros(count, dtype=torch.int64)),
    "seeds": lambda count: (torch.arange(count), torch.full((count,), 9), torch.zeros(count, dtype=torch.int64)),
    "samples": lambda count: (torch.full((count,), 5), torch.full((count,), 9), torch.arange(count)),
}


@pytest.mark.parametrize("varied", VARIED)
def test_tokens_come_as_often_as_the_softmax_says(varied: str) -> None:
    """Whichever of the three numbers grows. A temperature of 1.5 instead of 1 is noticed."""
    logits = torch.linspace(0, 3, 30)[None]
    count = 2_500
    tokens = drawn(logits, *VARIED[varied](count))
    counts = torch.bincount(tokens, minlength=30).double()
    statistic, bound = chi_square(counts, logits[0].softmax(0))
    assert statistic < bound
    wrong, bound = chi_square(counts, (logits[0] / 1.5).softmax(0))
    assert wrong > bound


def test_tokens_of_neighbouring_positions_are_independent() -> None:
    """Counted in pairs. A stream in which each token repeats the one before is noticed."""
    logits = torch.linspace(0, 1.5, 8)[None]
    tokens = drawn(logits, *VARIED["positions"](2_500))
    probabilities = logits[0].softmax(0)
    both = (probabilities[:, None] * probabilities).flatten()
    for distance in (1, 2, 64):
        pairs = tokens[:-distance] * 8 + tokens[distance:]
        statistic, bound = chi_square(torch.bincount(pairs, minlength=64).double(), both)
        assert statistic < bound
    repeated = tokens[:1_250].repeat_interleave(2)
    wrong, bound = chi_square(torch.bincount(repeated[:-1] * 8 + repeated[1:], minlength=64).double(), both)
    assert wrong > bound


def test_samples_of_one_request_are_independent() -> None:
    logits = torch.linspace(0, 1.5, 8)[None]
    seeds, positions, _ = VARIED["positions"](2_500)
    first, second = (drawn(logits, seeds, positions, torch.full_like(seeds, sample)) for sample in (0, 1))
    probabilities = logits[0].softmax(0)
    both = (probabilities[:, None] * probabilities).flatten()
    statistic, bound = chi_square(torch.bincount(first * 8 + second, minlength=64).double(), both)
    assert statistic < bound


@pytest.mark.parametrize("vocab_size", [5, TILE_SIZE, TILE_SIZE + 1, 1000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_leaving_tiles_out_changes_no_token(vocab_size: int, spread: float) -> None:
    """Against the definition: every token perturbed."""
    num = 40
    logits = logits_of(num, vocab_size=vocab_size, spread=spread)
    temperatures = torch.linspace(0.2, 3, num)
    keys = keys_of(torch.arange(num), torch.zeros(num, dtype=torch.int64), torch.arange(num))
    least = logits.median(dim=1).values
    least[::2] = -torch.inf
    ours = draw(tiled(logits), torch.arange(num), temperatures, least, keys)
    sums = logits.double() / temperatures[:, None].double() + gumbel(words(keys[:, None], torch.arange(vocab_size)))
    assert torch.equal(ours, sums.masked_fill(logits < least[:, None], -torch.inf).argmax(dim=1))


def mixed_places() -> list[Place]:
    kinds = [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=4, top_k=20, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, seed=5, top_p=0.8, bad_words=[[4], [2, 9]]),
        SamplingParams(seed=6, min_p=0.05, logit_bias={8: 2.0}, temperature=0.7),
        SamplingParams(temperature=1.0, seed=7, top_p=0.99, top_k=150, presence_penalty=1.0),
    ]
    return [Place(sequence_of(kind, [1, 2, 3 + index])) for index, kind in enumerate(kinds * 3)]


def test_a_row_draws_the_same_token_alone_and_among_others_in_any_order() -> None:
    places = mixed_places()
    sampler = BatchSampler(VOCAB_SIZE)
    logits = logits_of(len(places))
    together = sampler.sample(logits, places).token_ids
    alone = [int(sampler.sample(logits[row : row + 1], [place]).token_ids) for row, place in enumerate(places)]
    assert together.tolist() == alone
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(1))
    permuted = sampler.sample(logits[order], [places[row] for row in order.tolist()]).token_ids
    assert torch.equal(permuted, together[order])
    assert len(set(alone)) > 6


TOLERANCE = 1e-3
"""Logits that differ by less than this draw the same token unless the two greatest sums are that close."""


def test_logits_that_round_otherwise_draw_the_same_token_unless_two_sums_are_close() -> None:
    """As in another batch, or on another device; and close sums are about as rare as the tolerance implies."""
    num = 600
    logits = logits_of(num, vocab_size=200)
    other = logits + (torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) - 0.5) * TOLERANCE
    keys = keys_of(torch.arange(num), torch.zeros(num, dtype=torch.int64), torch.arange(num))
    noise = gumbel(words(keys[:, None], torch.arange(200)))
    first, second = ((each.double() + noise).argmax(dim=1) for each in (logits, other))
    everything = torch.full((num,), -torch.inf)
    for each, expected in ((logits, first), (other, second)):
        drawn_tokens = draw(tiled(each), torch.arange(num), torch.ones(num), everything, keys)
        assert torch.equal(drawn_tokens, expected)
    sums = (logits.double() + noise).topk(2, dim=1).values
    gaps = sums[:, 0] - sums[:, 1]
    assert torch.equal(first[gaps > TOLERANCE], second[gaps > TOLERANCE])
    assert (gaps <= TOLERANCE).sum() < 5


def test_each_sample_and_each_position_has_noise_of_its_own() -> None:
    sampler = BatchSampler(VOCAB_SIZE)
    params = SamplingParams(temperature=1.0, seed=1, n=40)
    logits = torch.zeros(40, VOCAB_SIZE)
    first = SampledSequence(params, [1, 2], vocab_size=VOCAB_SIZE)
    forks = [Place(first.fork(sample)) for sample in range(40)]
    assert len(set(sampler.sample(logits, forks).token_ids.tolist())) > 30
    drafted = [Place(first, [5] * num) for num in range(40)]
    tokens = sampler.sample(logits, drafted).token_ids.tolist()
    assert len(set(tokens)) > 30
    first.append([5] * 3)
    assert int(sampler.sample(logits[:1], [Place(first)]).token_ids) == tokens[3], "drafted or accepted, the same"


def test_a_request_without_a_seed_takes_the_engines() -> None:
    sampler = BatchSampler(VOCAB_SIZE)
    logits = torch.zeros(1, VOCAB_SIZE)

    def token(params: SamplingParams, seed: int) -> int:
        sequence = SampledSequence(params, [1], vocab_size=VOCAB_SIZE, seed=seed)
        return int(sampler.sample(logits, [Place(sequence)]).token_ids)

    assert token(SamplingParams(temperature=1.0), 8) == token(SamplingParams(temperature=1.0, seed=8), 9)
    assert token(SamplingParams(temperature=1.0), 8) != token(SamplingParams(temperature=1.0), 9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_the_same_words_and_draws_the_same_tokens() -> None:
    keys, counters = torch.arange(-50, 50) * 987654321987, torch.arange(4096)
    assert torch.equal(words(keys[:, None], counters), words(keys[:, None].cuda(), counters.cuda()).cpu())
    places = mixed_places()
    sampler = BatchSampler(VOCAB_SIZE)
    logits = logits_of(len(places))
    assert torch.equal(sampler.sample(logits, places).token_ids, sampler.sample(logits.cuda(), places).token_ids.cpu())
