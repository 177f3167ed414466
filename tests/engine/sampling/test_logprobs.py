"""Log-probabilities: those of float64 arithmetic, of the logits as the model gave them, in bounded memory."""

import pytest
import torch

from pagedkv.engine.sampling import (
    BatchSampler,
    Place,
    SamplingParams,
    SlicedLogprobs,
    TokenLogprobs,
    prompt_logprobs,
)
from pagedkv.errors import TensorError
from tests.engine.sampling.rows import VOCAB_SIZE, logits_of, sequence_of


def expected_of(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    logprobs = logits.double().log_softmax(0)
    top = logprobs.topk(count)
    rank = int((logits >= logits[token_id]).sum())
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), rank, pairs)


def assert_close(ours: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert (ours.token_id, ours.rank) == (expected.token_id, expected.rank)
    assert [token for token, _ in ours.top] == [token for token, _ in expected.top]
    numbers = [ours.logprob, *(number for _, number in ours.top)]
    assert numbers == pytest.approx([expected.logprob, *(number for _, number in expected.top)], abs=1e-5)


def test_they_are_of_the_logits_as_the_model_gave_them() -> None:
    rows = [
        SamplingParams(seed=1, logprobs=3, temperature=0.3, logit_bias={5: 9.0}, top_k=4),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, logprobs=0, repetition_penalty=3.0),
        SamplingParams(temperature=0, logprobs=VOCAB_SIZE),
        SamplingParams(temperature=1.0, seed=1, logprobs=2, logits_processors=[lambda _, scores: -scores]),
    ]
    logits = logits_of(5)
    answer = BatchSampler(VOCAB_SIZE).sample(logits, [Place(sequence_of(params)) for params in rows])
    assert sorted(answer.logprobs) == [0, 2, 3, 4]
    for row, by_row in answer.logprobs.items():
        count = rows[row].logprobs
        assert count is not None
        assert_close(by_row, expected_of(logits[row], int(answer.token_ids[row]), count))


def test_of_a_greedy_row_the_token_is_the_first() -> None:
    answer = BatchSampler(VOCAB_SIZE).sample(
        logits_of(1), [Place(sequence_of(SamplingParams(temperature=0, logprobs=1)))]
    )
    by_row = answer.logprobs[0]
    assert by_row.rank == 1
    assert by_row.top == ((by_row.token_id, by_row.logprob),)


@pytest.mark.parametrize("elements", [1, 3 * VOCAB_SIZE, 2**22])
def test_of_a_prompt_few_logits_exist_at_once(elements: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(10, 16, generator=generator), torch.randn(VOCAB_SIZE, 16, generator=generator)
    most = 0

    def head(some: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(some))
        return some @ weight.T

    next_ids = list(range(5, 15))
    by_row = prompt_logprobs(hidden, head, next_ids, 4, elements=elements)
    for row, (ours, token) in enumerate(zip(by_row, next_ids, strict=True)):
        assert_close(ours, expected_of(hidden[row] @ weight.T, token, 4))
    assert most <= max(1, elements // VOCAB_SIZE)
    assert len(by_row) == 10
    assert prompt_logprobs(hidden[:0], head, [], 4) == []
    with pytest.raises(TensorError, match="10 positions need as many next tokens, got 9"):
        prompt_logprobs(hidden, head, next_ids[1:], 4)


@pytest.mark.parametrize("size", [1, 7, 128, VOCAB_SIZE])
def test_a_vocabulary_that_comes_in_slices(size: int) -> None:
    logits = logits_of(4)
    token_ids = [0, 100, 399, 7]
    sliced = SlicedLogprobs(token_ids, logits[torch.arange(4), torch.tensor(token_ids)], 5)
    for start in range(0, VOCAB_SIZE, size):
        sliced.add(logits[:, start : start + size])
    for row, ours in enumerate(sliced.by_row()):
        assert_close(ours, expected_of(logits[row], token_ids[row], 5))
    with pytest.raises(TensorError, match="a slice of 4 rows"):
        sliced.add(logits[:3])
