"""A batch: rows with different parameters, logits that are restored, rows that fail or wait alone."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers.generation import logits_process as theirs

from pagedkv.engine.sampling import (
    NO_TOKEN,
    NOT_READY,
    BatchSampler,
    Place,
    SampledSequence,
    SamplingParams,
    TokenMatcher,
    sampler as sampler_module,
)
from pagedkv.engine.sampling.foreign import NotReady
from pagedkv.errors import ConfigurationError, SamplingError, TensorError
from tests.engine.sampling.rows import END, VOCAB_SIZE, logits_of, processed, sequence_of

GREEDY = SamplingParams(temperature=0)


def test_greedy_rows_take_the_first_of_the_greatest_logits() -> None:
    logits = logits_of(6).round()
    answer = BatchSampler(VOCAB_SIZE).sample(logits, [Place(sequence_of(GREEDY))] * 6)
    assert answer.token_ids.dtype == torch.int32
    assert answer.token_ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_what_is_begun_ends_as_what_is_sampled_at_once() -> None:
    """Greedy rows alone, whose copy is awaited; and rows of every kind. The ids on the device are the same."""
    logits = logits_of(6).round()
    logits[1] = -torch.inf
    greedy = Place(sequence_of(GREEDY))
    drawn = Place(sequence_of(SamplingParams(temperature=1.0, seed=3, logprobs=1)))
    for places in ([greedy] * 6, [greedy, greedy, *[drawn] * 4]):
        pending = BatchSampler(VOCAB_SIZE).begin(logits, places)
        expected = BatchSampler(VOCAB_SIZE).sample(logits, places)
        found = pending.wait()
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.logprobs == expected.logprobs
        assert list(map(str, found.failures.values())) == list(map(str, expected.failures.values()))
        assert pending.token_ids.tolist()[2:] == expected.token_ids.tolist()[2:]
        assert pending.wait() is found


ASKED = {
    "repetition_penalty": st.sampled_from((1.0, 1.4)),
    "presence_penalty": st.sampled_from((0.0, 0.7)),
    "frequency_penalty": st.sampled_from((0.0, -0.5)),
    "logit_bias": st.sampled_from(({}, {3: 4.0, 9: -torch.inf})),
    "bad_words": st.sampled_from(((), ((5,), (2, 8)))),
    "min_tokens": st.sampled_from((0, 5)),
    "logprobs": st.sampled_from((None, None, 0, 3)),
}
DRAWN = {
    "temperature": st.sampled_from((0.3, 1.0, 2.5)),
    "top_k": st.sampled_from((0, 0, 1, 9, 100, 400, 999)),
    "top_p": st.sampled_from((1.0, 1.0, 0.2, 0.9)),
    "min_p": st.sampled_from((0.0, 0.0, 0.01, 0.4)),
    "seed": st.integers(0, 2**63 - 1),
}
AHEAD = st.one_of(st.builds(SamplingParams, **ASKED), *[st.builds(SamplingParams, **ASKED, **DRAWN)] * 3)


@given(st.lists(AHEAD, min_size=1, max_size=6), st.sampled_from((10, 128, 400)), st.integers(0, 999))
def test_tokens_that_the_device_chooses_alone_are_those_of_the_sampler(
    asked: list[SamplingParams], vocab_size: int, seed: int
) -> None:
    """Rows of every kind together, with drafts; a row that allows nothing, and one that is no number, fail alike."""
    logits = logits_of(2 * len(asked) + 2, seed, vocab_size)
    logits[-2], logits[-1, 1] = -torch.inf, torch.nan
    sequences = [sequence_of(params, [1, 2, 3], [4, 2], vocab_size) for params in asked]
    places = [Place(sequence, drafts) for sequence in sequences for drafts in ((), (3, 4))]
    places += [Place(sequences[0])] * 2
    before = logits.clone()
    expected = BatchSampler(vocab_size).sample(logits, places)
    pending = BatchSampler(vocab_size, draws_ahead=True).begin(logits, places)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    found = pending.wait()
    assert found.token_ids.tolist() == expected.token_ids.tolist() == pending.token_ids.tolist()
    assert found.logprobs == expected.logprobs
    assert {row: str(failure) for row, failure in found.failures.items()} == {
        row: str(failure) for row, failure in expected.failures.items()
    }
    assert {len(logits) - 2, len(logits) - 1} <= set(found.failures)


@pytest.mark.parametrize("vocab_size", [3, 288, 1024, 1025, 3000])
def test_batches_where_all_are_greedy_answer_as_in_company(vocab_size: int) -> None:
    """Ties, a row that allows nothing, and one that is no number, by the way of greedy batches and by the other one."""
    logits = logits_of(6, vocab_size=vocab_size).round()
    logits[1], logits[2, vocab_size // 2] = -torch.inf, torch.nan
    greedy = SampledSequence(GREEDY, [0], vocab_size=vocab_size)
    drawn = SampledSequence(SamplingParams(temperature=1.0, top_k=1, seed=1), [0], vocab_size=vocab_size)
    sampler = BatchSampler(vocab_size)
    alone = sampler.sample(logits, [Place(greedy)] * 6)
    beside = sampler.sample(torch.cat([logits, logits[:1]]), [*[Place(greedy)] * 6, Place(drawn)])
    first = [int((row == row.max()).nonzero()[0]) for row in logits[[0, 3, 4, 5]]]
    assert alone.token_ids.tolist() == [first[0], NO_TOKEN, NO_TOKEN, *first[1:]] == beside.token_ids.tolist()[:6]
    assert {row: str(failure) for row, failure in alone.failures.items()} == {
        row: str(failure) for row, failure in beside.failures.items()
    }
    assert set(alone.failures) == {1, 2}


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 256, 50_257])
def test_vocabularies_of_all_sizes(vocab_size: int) -> None:
    logits = logits_of(3, vocab_size=vocab_size)
    kinds = [
        GREEDY,
        SamplingParams(temperature=1.0, top_k=1, seed=1),
        SamplingParams(temperature=1.0, top_p=1e-6, seed=1),
    ]
    places = (
        [Place(sequence_of(kind, [0], vocab_size=vocab_size)) for kind in kinds]
        if vocab_size > END
        else [Place(SampledSequence(kind, [0], vocab_size=vocab_size)) for kind in kinds]
    )
    assert BatchSampler(vocab_size).sample(logits, places).token_ids.tolist() == logits.argmax(dim=1).tolist()


def test_equal_scores_beyond_the_window_are_drawn_too() -> None:
    logits = torch.full((300, VOCAB_SIZE), -5.0)
    logits[:, 100:300] = 1.0
    sequence = sequence_of(SamplingParams(temperature=1.0, top_k=10, seed=1))
    places = [Place(sequence, [5] * row) for row in range(300)]
    drawn = set(BatchSampler(VOCAB_SIZE).sample(logits, places).token_ids.tolist())
    assert drawn <= set(range(100, 300))
    assert len(drawn) > 120, "of 200, 155 are expected"


def test_logits_are_as_they_were_when_the_tokens_are_there() -> None:
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        logit_bias={3: 4.0},
        bad_words=[[3], [4]],
        min_tokens=2,
        seed=1,
    )
    logits = logits_of(4)
    before = logits.clone()
    BatchSampler(VOCAB_SIZE).sample(logits, [Place(sequence_of(params, [3, 4], [3, 5]))] * 4)
    assert torch.equal(logits, before)


def test_logits_are_as_they_were_when_sampling_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr(sampler_module, "tiled", broken)
    logits = logits_of(1)
    before = logits.clone()
    with pytest.raises(MemoryError):
        BatchSampler(VOCAB_SIZE).sample(
            logits, [Place(sequence_of(SamplingParams(temperature=1.0, logit_bias={3: 4.0}, seed=1)))]
        )
    assert torch.equal(logits, before)


def test_a_batch_without_rows_and_a_view_that_is_not_contiguous() -> None:
    sampler = BatchSampler(VOCAB_SIZE)
    assert sampler.sample(torch.zeros(0, VOCAB_SIZE), []).token_ids.shape == (0,)
    assert sampler.resume([]).token_ids.shape == (0,)
    wide = logits_of(4, vocab_size=VOCAB_SIZE + 40)
    answer = sampler.sample(wide[:, :VOCAB_SIZE], [Place(sequence_of(GREEDY))] * 4)
    assert answer.token_ids.tolist() == wide[:, :VOCAB_SIZE].argmax(dim=1).tolist()


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (torch.zeros(2, VOCAB_SIZE), r"logits of 1 rows must be float32 \[1, 400\]"),
        (torch.zeros(1, 399), r"got torch.float32 \[1, 399\]"),
        (torch.zeros(1, VOCAB_SIZE, dtype=torch.float64), "got torch.float64"),
    ],
)
def test_logits_of_another_shape_or_type_are_refused(logits: torch.Tensor, words: str) -> None:
    with pytest.raises(TensorError, match=words):
        BatchSampler(VOCAB_SIZE).sample(logits, [Place(sequence_of(GREEDY))])


def test_a_sequence_of_another_vocabulary_is_refused() -> None:
    places = [Place(sequence_of(GREEDY)), Place(sequence_of(GREEDY, vocab_size=99))]
    with pytest.raises(ConfigurationError, match="row 1 has a vocabulary of 99 tokens, and this sampler one of 400"):
        BatchSampler(VOCAB_SIZE).sample(torch.zeros(2, VOCAB_SIZE), places)


def test_rows_of_drafts_count_the_drafts_before_them() -> None:
    """What a penalty, a bad word and the least length see is what they would see once the drafts are accepted."""
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.5, bad_words=[[20, 21, 22]], min_tokens=3, temperature=0.9
    )
    drafts = [20, 21, 20]
    logits = logits_of(4)
    sequence = sequence_of(params, [3, 5], [5])
    together = processed(logits, [Place(sequence, drafts[:num]) for num in range(4)])
    for num in range(4):
        accepted = sequence_of(params, [3, 5], [5, *drafts[:num]])
        assert torch.equal(together[num], processed(logits[num : num + 1], [Place(accepted)])[0])
    assert sequence.generated_ids == [5]


def test_a_row_that_has_no_token_fails_alone() -> None:
    logits = logits_of(5)
    logits[1] = torch.nan
    logits[3, 50] = torch.inf
    forbidding = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(VOCAB_SIZE), -torch.inf), seed=1)
    rows = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, top_p=0.5),
        forbidding,
        GREEDY,
        GREEDY,
    ]
    places = [Place(sequence_of(params)) for params in rows]
    sampler = BatchSampler(VOCAB_SIZE)
    answer = sampler.sample(logits, places)
    assert sorted(answer.failures) == [1, 2, 3]
    assert answer.token_ids[[1, 2, 3]].tolist() == [NO_TOKEN] * 3
    for row in (0, 4):
        alone = sampler.sample(logits[row : row + 1], [places[row]])
        assert answer.token_ids[row] == alone.token_ids[0] != NO_TOKEN
    assert "no token is allowed" in str(answer.failures[2])
    assert "position 3 of this sequence cannot be sampled: its greatest score is nan" in str(answer.failures[1])
    assert all(isinstance(failure, SamplingError) for failure in answer.failures.values())


class Evens:
    """Allows even tokens, as flags or bits, once it is ready."""

    def __init__(self, *, as_bits: bool = False, num_asked_before_ready: int = 0) -> None:
        self.as_bits = as_bits
        self.num_left = num_asked_before_ready
        self.seen: list[list[int]] = []

    def allowed_tokens(self, generated_ids: list[int], /) -> torch.Tensor | NotReady:
        """Record the call."""
        self.seen.append(generated_ids)
        if self.num_left:
            self.num_left -= 1
            return NOT_READY
        if self.as_bits:
            return torch.full((-(-VOCAB_SIZE // 32),), 0x55555555, dtype=torch.int32)
        return torch.arange(VOCAB_SIZE) % 2 == 0

    def fork(self) -> "Evens":
        """Answer another one."""
        return Evens(as_bits=self.as_bits, num_asked_before_ready=self.num_left)


def test_a_processor_of_transformers_is_applied_behind_ours_and_before_the_temperature() -> None:
    """Its row is drawn as if all were transformers' own; other rows are drawn as without it."""
    seen = []

    def watching(token_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        seen.append((token_ids.tolist(), scores.clone()))
        return scores

    no_repeats = theirs.NoRepeatNGramLogitsProcessor(2)
    params = SamplingParams(temperature=0, logit_bias={6: 50.0}, logits_processors=[watching, no_repeats])
    logits = logits_of(3)
    logits[1, 8] = 40.0
    places = [Place(sequence_of(GREEDY)), Place(sequence_of(params, [5, 6], [9, 5])), Place(sequence_of(GREEDY))]
    answer = BatchSampler(VOCAB_SIZE).sample(logits, places)
    assert seen[0][0] == [[5, 6, 9, 5]]
    assert seen[0][1][0, 6] == logits[1, 6] + 50.0
    assert answer.token_ids.tolist() == [int(logits[0].argmax()), 8, int(logits[2].argmax())]


@pytest.mark.parametrize("as_bits", [True, False])
def test_a_matcher_allows_tokens(*, as_bits: bool) -> None:
    logits = logits_of(20)
    params = SamplingParams(seed=1, temperature=2.0, logits_processors=[Evens(as_bits=as_bits)])
    answer = BatchSampler(VOCAB_SIZE).sample(
        logits, [Place(sequence_of(params, [1, 2], [5]), [9] * row) for row in range(20)]
    )
    assert (answer.token_ids % 2 == 0).all()
    masked = logits.clone()
    masked[:, 1::2] = -torch.inf
    plain = SamplingParams(seed=1, temperature=2.0)
    expected = BatchSampler(VOCAB_SIZE).sample(
        masked, [Place(sequence_of(plain, [1, 2], [5]), [9] * row) for row in range(20)]
    )
    assert torch.equal(answer.token_ids, expected.token_ids)


def test_a_matcher_is_asked_with_the_answer_and_drafts_and_each_sequence_has_its_own() -> None:
    matcher = Evens()
    params = SamplingParams(temperature=1.0, seed=1, logits_processors=[matcher])
    sequence = sequence_of(params, [1, 2], [4])
    fork = sequence.fork(1)
    BatchSampler(VOCAB_SIZE).sample(logits_of(2), [Place(sequence, [6]), Place(fork)])
    (own,), (of_fork,) = sequence.processors, fork.processors
    assert isinstance(own, Evens)
    assert isinstance(of_fork, Evens)
    assert (matcher.seen, own.seen, of_fork.seen) == ([], [[4, 6]], [[4]])


def test_a_row_that_is_not_ready_waits_and_no_other_does() -> None:
    slow = SamplingParams(temperature=1.0, seed=1, logprobs=2, logits_processors=[Evens(num_asked_before_ready=2)])
    rows = [SamplingParams(temperature=1.0, seed=1), slow, SamplingParams(temperature=1.0, seed=2)]
    places = [Place(sequence_of(params)) for params in rows]
    sampler = BatchSampler(VOCAB_SIZE)
    logits = logits_of(3)
    answer = sampler.sample(logits, places)
    assert (answer.token_ids != NO_TOKEN).tolist() == [True, False, True]
    assert [(each.row, each.place) for each in answer.waiting] == [(1, places[1])]
    logits.zero_()  # the step is over: what waits has its own copy
    again = sampler.resume(answer.waiting)
    assert again.waiting == answer.waiting
    assert again.token_ids.tolist() == [NO_TOKEN]
    ready = sampler.resume(again.waiting)
    at_once = SamplingParams(temperature=1.0, seed=1, logprobs=2, logits_processors=[Evens()])
    expected = sampler.sample(logits_of(3)[1:2], [Place(sequence_of(at_once))])
    assert ready.waiting == ()
    assert torch.equal(ready.token_ids, expected.token_ids)
    assert ready.logprobs == expected.logprobs
    assert ready.logprobs[0].token_id == int(ready.token_ids)


class Broken:
    """Is no matcher that anybody can use."""

    def __init__(self, answer: Any) -> None:  # noqa: ANN401 - that is the point
        self.answer = answer

    def __call__(self, _: torch.LongTensor, scores: torch.FloatTensor, /) -> torch.Tensor:
        """Raise, or answer, whatever the scores were."""
        if isinstance(self.answer, Exception):
            raise self.answer
        scores.zero_()
        answer: torch.Tensor = self.answer
        return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ZeroDivisionError("my fault"), "my fault"),
        (torch.zeros(1, 3), r"logits processor 0 \(Broken\) must answer scores of the shape \(1, 400\)"),
        (None, "or NOT_READY, got NoneType"),
        (torch.full((1, VOCAB_SIZE), -torch.inf), "no token is allowed"),
        (torch.full((1, VOCAB_SIZE), torch.nan), "its greatest score is nan"),
    ],
)
def test_a_processor_that_fails_fails_its_own_row(answer: object, words: str) -> None:
    places = [
        Place(sequence_of(params))
        for params in (
            GREEDY,
            SamplingParams(temperature=1.0, seed=1, logprobs=1, logits_processors=[Broken(answer)]),
            GREEDY,
        )
    ]
    logits = logits_of(3)
    sampled = BatchSampler(VOCAB_SIZE).sample(logits, places)
    assert list(sampled.failures) == [1]
    assert sampled.token_ids.tolist() == [int(logits[0].argmax()), NO_TOKEN, int(logits[2].argmax())]
    assert not sampled.logprobs
    with pytest.raises(type(sampled.failures[1]), match=words):
        raise sampled.failures[1]


def test_a_matcher_of_another_vocabulary_fails_its_row() -> None:
    class Short(Evens):
        def allowed_tokens(self, generated_ids: list[int], /) -> torch.Tensor:
            del generated_ids
            return torch.ones(3, dtype=torch.bool)

        def fork(self) -> "Short":
            return Short()

    assert isinstance(Short(), TokenMatcher)
    place = Place(sequence_of(SamplingParams(temperature=1.0, seed=1, logits_processors=[Short()])))
    failures = BatchSampler(VOCAB_SIZE).sample(logits_of(1), [place]).failures
    assert r"must answer bool [400] or int32 [13], got torch.bool [3]" in str(failures[0])


def test_a_grammar_of_xgrammar() -> None:
    """Every token is drawn within the grammar, forks are rolled back, a token outside of it is reported."""
    xgrammar = pytest.importorskip("xgrammar")
    from pagedkv.engine.sampling import XGrammarMatcher  # noqa: PLC0415 - where it can work

    vocabulary = ["<end>", *"abc0123456789,[]"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary), stop_token_ids=[0])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar('root ::= "[" [0-9] ("," [0-9])* "]"')
    matcher = XGrammarMatcher(compiled, len(vocabulary))
    params = SamplingParams(temperature=1.0, seed=5, logits_processors=[matcher])
    sampler = BatchSampler(len(vocabulary))
    first = SampledSequence(params, [1], vocab_size=len(vocabulary), end_token_ids=[0])
    sequences = [first, *(first.fork(sample) for sample in range(1, 4))]
    running = sequences
    for _ in range(12):
        running = [each for each in running if each.generated_ids[-1:] != [0]]
        places = [Place(each) for each in running]
        tokens = sampler.sample(torch.zeros(len(running), len(vocabulary)), places).token_ids
        for each, token in zip(running, tokens.tolist(), strict=True):
            each.append([token])
    texts = ["".join(vocabulary[token] for token in each.generated_ids) for each in sequences]
    assert len(set(texts)) == 4
    assert all(re.fullmatch(r"\[\d(,\d)*(\](<end>)?|,?)", text) for text in texts)
    wrong = sampler.sample(torch.zeros(1, len(vocabulary)), [Place(first.fork(9), [1])])
    assert "the grammar does not allow token 1" in str(wrong.failures[0])
    first.truncate(2)
    back = sampler.sample(torch.zeros(1, len(vocabulary)), [Place(first)]).token_ids
    assert vocabulary[int(back)] in ",]"
