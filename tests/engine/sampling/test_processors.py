"""Row by row what transformers' own processors give: each alone, all in their order, rows of every kind mixed."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig
from transformers.generation import logits_process as theirs

from pagedkv.engine.sampling import Place, SamplingParams
from tests.engine.sampling.rows import END, VOCAB_SIZE, logits_of, processed, sequence_of

PROMPT = [3, 5, 5, 9, 11]
ANSWER = [5, 12, 12, 12, 3]
SIZES = (VOCAB_SIZE, 50, 128, 1000)
"""Shorter than a tile, one tile, several with and without a shorter last one."""


def theirs_of(processor: theirs.LogitsProcessor, logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    scores: torch.Tensor = processor(torch.tensor([token_ids] * len(logits)), logits.clone())
    return scores


def ours_of(params: SamplingParams, logits: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
    sequence = sequence_of(params, prompt, answer, logits.shape[1])
    return processed(logits, [Place(sequence)] * len(logits))


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_temperature(temperature: float) -> None:
    logits = logits_of(3)
    ours = ours_of(SamplingParams(temperature=temperature), logits, PROMPT, [])
    assert torch.equal(ours, theirs_of(theirs.TemperatureLogitsWarper(temperature), logits, PROMPT))


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("top_k", [1, 2, 49, 63, 64, 65, 200, 10_000])
def test_top_k(top_k: int, vocab_size: int) -> None:
    logits = logits_of(8, vocab_size=vocab_size)
    ours = ours_of(SamplingParams(temperature=1.0, top_k=top_k), logits, PROMPT, [])
    assert torch.equal(ours, theirs_of(theirs.TopKLogitsWarper(top_k), logits, PROMPT))


def test_top_k_keeps_what_equals_the_last_one() -> None:
    logits = logits_of(4).round()
    ours = ours_of(SamplingParams(temperature=1.0, top_k=20), logits, PROMPT, [])
    assert torch.equal(ours, theirs_of(theirs.TopKLogitsWarper(20), logits, PROMPT))
    assert ((ours > -torch.inf).sum(dim=1) > 20).any()


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("spread", [0.3, 3.0, 20.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p(top_p: float, spread: float, vocab_size: int) -> None:
    logits = logits_of(8, vocab_size=vocab_size, spread=spread)
    ours = ours_of(SamplingParams(temperature=1.0, top_p=top_p), logits, PROMPT, [])
    assert_equal_but_at_the_edge(ours, theirs_of(theirs.TopPLogitsWarper(top_p), logits, PROMPT), logits, top_p)


def assert_equal_but_at_the_edge(
    ours: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor, top_p: float, within: float = 2e-6
) -> None:
    """Compare what is kept, but for tokens where the mass before them is top_p up to how float32 sums round."""
    values, order = logits.double().sort(dim=1, descending=True)
    probabilities = values.softmax(dim=1)
    before = torch.empty_like(values).scatter(1, order, probabilities.cumsum(dim=1) - probabilities)
    is_clear = (before - top_p).abs() > within
    assert is_clear.float().mean() > 0.98
    assert torch.equal(ours[is_clear], expected[is_clear])


def test_top_p_keeps_all_that_equal_the_last_one() -> None:
    """Which of equal ones transformers keeps is its sort's choice; here they share a fate."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = ours_of(SamplingParams(temperature=1.0, top_p=0.5), logits, [1], []) > -torch.inf
    assert kept.tolist() == [[True, True, True, True, False]]
    assert int((theirs_of(theirs.TopPLogitsWarper(0.5), logits, [1]) > -torch.inf).sum()) == 2


def test_equal_scores_that_go_on_beyond_the_window_are_all_kept_and_all_weighed() -> None:
    """The likeliest has 3.6 % of what top-k leaves, but 10.5 % of what the window shows of it."""
    logits = torch.full((1, VOCAB_SIZE), -5.0)
    logits[0, 100:300] = 1.0
    logits[0, 7] = 3.0
    for params in (SamplingParams(temperature=1.0, top_k=10), SamplingParams(temperature=1.0, top_k=10, top_p=0.05)):
        assert int((ours_of(params, logits, [1], []) > -torch.inf).sum()) == 201
    narrow = ours_of(SamplingParams(temperature=1.0, top_k=10, top_p=0.03), logits, [1], [])
    assert (narrow[0] > -torch.inf).nonzero().tolist() == [[7]]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("min_p", [1e-6, 0.05, 0.7, 1.0])
def test_min_p(min_p: float, vocab_size: int) -> None:
    logits = logits_of(8, vocab_size=vocab_size)
    ours = ours_of(SamplingParams(temperature=1.0, min_p=min_p), logits, PROMPT, [])
    assert torch.equal(ours, theirs_of(theirs.MinPLogitsWarper(min_p), logits, PROMPT))


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty(penalty: float) -> None:
    logits = logits_of(3)
    ours = ours_of(SamplingParams(repetition_penalty=penalty), logits, PROMPT, ANSWER)
    expected = theirs_of(theirs.RepetitionPenaltyLogitsProcessor(penalty), logits, PROMPT + ANSWER)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, logits)


def test_repetition_penalty_does_not_punish_the_pad_token() -> None:
    """Theirs sees padded ids, and punishes the pad token of every row that is shorter than the longest."""
    logits = logits_of(2)
    pad = 0
    short, long = [4, 5], [4, 5, 6]
    padded = torch.tensor([[pad, *short], long])
    both = theirs.RepetitionPenaltyLogitsProcessor(2.0)(padded, logits.clone())
    places = [Place(sequence_of(SamplingParams(repetition_penalty=2.0), ids)) for ids in (short, long)]
    ours = processed(logits, places)
    assert ours[0, pad] == logits[0, pad]
    assert both[0, pad] != logits[0, pad]
    both[0, pad] = logits[0, pad]
    assert torch.equal(ours, both)


def test_presence_and_frequency_penalties() -> None:
    """By their definition: counts of the answer, whatever the prompt has. Transformers has neither."""
    logits = logits_of(1)
    ours = ours_of(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), logits, PROMPT, ANSWER)
    expected = logits.clone()
    for token, count in ((5, 1), (12, 3), (3, 1)):
        expected[0, token] -= 0.25 * count
        expected[0, token] -= 0.5
    assert torch.equal(ours, expected)


def test_bias() -> None:
    logits = logits_of(2)
    bias = {4: 1.5, 9: -2.25, 100: -float("inf")}
    ours = ours_of(SamplingParams(logit_bias=bias), logits, PROMPT, [])
    sequences = {(token,): value for token, value in bias.items()}
    assert torch.equal(ours, theirs_of(theirs.SequenceBiasLogitsProcessor(sequences), logits, PROMPT))


@pytest.mark.parametrize("answer", [[], [20], [21, 20], [20, 21], [5, 20, 21], [11, 20]])
def test_bad_words(answer: list[int]) -> None:
    """Of one token and of several, whose beginning may lie in the prompt."""
    words = [[8], [20, 21], [20, 21, 22], [5, 20, 21, 23], [9, 11, 24], [11, 20, 25]]
    logits = logits_of(2)
    ours = ours_of(SamplingParams(bad_words=words), logits, PROMPT, answer)
    expected = theirs_of(theirs.NoBadWordsLogitsProcessor(words), logits, PROMPT + answer)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("num_generated", [0, 2, 3, 5])
def test_min_tokens(num_generated: int) -> None:
    logits = logits_of(2)
    answer = [5] * num_generated
    ours = ours_of(SamplingParams(temperature=1.0, min_tokens=3, stop_token_ids=[30, 31]), logits, PROMPT, answer)
    processor = theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [END, 30, 31])
    assert torch.equal(ours, theirs_of(processor, logits, PROMPT + answer))


class _Generating(GenerationMixin):  # type: ignore[misc] # transformers has no types to go by
    """As much of a model as transformers needs to choose its processors, and their order."""

    def __init__(self) -> None:
        self.config = PretrainedConfig(vocab_size=VOCAB_SIZE)


def in_their_order(params: SamplingParams, num_prompt_tokens: int) -> theirs.LogitsProcessorList:
    """List the processors that ``generate`` would apply, in its order."""
    config = GenerationConfig(
        do_sample=not params.is_greedy,
        temperature=params.temperature if not params.is_greedy else None,
        top_k=params.top_k or None,
        top_p=params.top_p,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        sequence_bias={(token,): value for token, value in params.logit_bias.items()} or None,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        min_new_tokens=params.min_tokens or None,
        num_beams=1,
    )
    config._eos_token_tensor = torch.tensor([END])
    return _Generating()._get_logits_processor(
        config,
        input_ids_seq_length=num_prompt_tokens,
        logits_processor=theirs.LogitsProcessorList(list(params.logits_processors)),
        device="cpu",
    )


tokens = st.integers(0, 40)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 10, 70]),
    top_p=st.sampled_from([1.0, 0.2, 0.8, 0.97]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.4]),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-3.0, 2.0]), max_size=3),
    min_tokens=st.sampled_from([0, 4]),
)
row_strategy = st.tuples(
    params_strategy,
    st.lists(tokens, min_size=3, max_size=8),
    st.lists(tokens, max_size=6),
    st.lists(tokens, max_size=3),
)


@given(st.lists(row_strategy, min_size=1, max_size=5), st.integers(0, 2**16))
@settings(max_examples=40)
def test_all_together_in_their_order_and_rows_of_all_kinds_in_one_batch(
    rows: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int
) -> None:
    logits = logits_of(len(rows), seed)
    places = [Place(sequence_of(params, prompt, answer), drafts) for params, prompt, answer, drafts in rows]
    ours = processed(logits, places)
    for row, (params, prompt, answer, drafts) in enumerate(rows):
        ids = torch.tensor([prompt + answer + drafts])
        expected = in_their_order(params, len(prompt))(ids, logits[row : row + 1].clone())[0]
        is_kept, is_expected = ours[row] > -torch.inf, expected > -torch.inf
        both = is_kept & is_expected
        assert torch.equal(ours[row][both], expected[both])
        differing = (is_kept != is_expected).nonzero()[:, 0]
        assert len(differing) <= (params.top_p < 1), "at most one token, whose mass rounds either way"


def test_the_order_matters_and_is_theirs() -> None:
    """A bias that turns a logit's sign decides what the penalty does; the filters see what both left."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = 1.0
    params = SamplingParams(logit_bias={5: -3.0}, repetition_penalty=2.0, temperature=2.0)
    ours = ours_of(params, logits, [5], [])
    assert float(ours[0, 5]) == (1.0 - 3.0) * 2.0 / 2.0
    assert torch.equal(ours, in_their_order(params, 1)(torch.tensor([[5]]), logits.clone()))
