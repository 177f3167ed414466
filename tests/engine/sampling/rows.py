"""Sequences and scores for the tests of sampling, and what a batch makes of scores before a token is drawn."""

from collections.abc import Sequence

import torch

from pagedkv.engine.sampling import Place, SampledSequence, SamplingParams
from pagedkv.engine.sampling.drawing import tiled
from pagedkv.engine.sampling.sampler import Adjustment, features_of, kept_least

VOCAB_SIZE = 400
END = 7


def sequence_of(
    params: SamplingParams,
    prompt_ids: Sequence[int] = (1, 2, 3),
    generated_ids: Sequence[int] = (),
    vocab_size: int = VOCAB_SIZE,
) -> SampledSequence:
    return SampledSequence(
        params, list(prompt_ids), vocab_size=vocab_size, end_token_ids=[END], generated_ids=list(generated_ids)
    )


def logits_of(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE, spread: float = 3.0) -> torch.Tensor:
    """Draw random logits, no two of a row alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def processed(logits: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """Give the scores that tokens are drawn from: changed, divided by the temperature, -inf where they are not kept."""
    scores = logits.clone()
    Adjustment(scores, places).apply(features_of(places))
    params = [place.sequence.params for place in places]
    temperatures = torch.tensor([each.temperature or 1.0 for each in params])
    least = kept_least(tiled(scores), torch.arange(len(places)), places)
    return (scores / temperatures[:, None]).masked_fill(scores < least[:, None], -torch.inf)
