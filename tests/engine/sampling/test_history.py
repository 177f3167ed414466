"""Counts of tokens that are kept up: they are those of counting anew, whatever came, went and forked."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedkv.engine.sampling import SamplingParams
from pagedkv.engine.sampling.parameters import BadWords, bad_words_as_ids
from pagedkv.engine.sampling.sequence import TokenHistory
from tests.engine.sampling.rows import sequence_of

tokens = st.lists(st.integers(0, 30), max_size=12)


class Histories(RuleBasedStateMachine):
    """A history, and its forks, beside plain lists."""

    @initialize(prompt=tokens)
    def begin(self, prompt: list[int]) -> None:
        """Begin with a prompt."""
        self.prompt = prompt
        self.pairs = [(TokenHistory(np.array(prompt, np.int32)), list[int]())]

    @rule(which=st.integers(0, 9), more=tokens)
    def append(self, which: int, more: list[int]) -> None:
        """Grow."""
        history, answer = self.pairs[which % len(self.pairs)]
        history.append(more)
        answer += more

    @rule(which=st.integers(0, 9), count=st.integers(0, 12))
    def remove(self, which: int, count: int) -> None:
        """Take the last tokens back."""
        history, answer = self.pairs[which % len(self.pairs)]
        kept = max(0, len(answer) - count)
        history.remove(answer[kept:])
        del answer[kept:]

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        """Go two ways."""
        history, answer = self.pairs[which % len(self.pairs)]
        self.pairs.append((history.fork(), answer.copy()))

    @rule(which=st.integers(0, 9), drafts=tokens)
    def ask_with_drafts(self, which: int, drafts: list[int]) -> None:
        """Count with drafts that are not accepted; nothing changes."""
        history, answer = self.pairs[which % len(self.pairs)]
        assert as_dict(history.counts_with(drafts)) == self.expected(answer + drafts)

    @invariant()
    def counts_are_those_of_counting_anew(self) -> None:
        """Compare every history with its list."""
        for history, answer in self.pairs:
            history.check()
            assert len(history) == len(self.expected(answer))
            assert as_dict(history.counts) == self.expected(answer)

    def expected(self, answer: list[int]) -> dict[int, int]:
        """Count anew."""
        return dict.fromkeys(self.prompt, 0) | Counter(answer)


def as_dict(counts: tuple[np.ndarray, np.ndarray]) -> dict[int, int]:
    return dict(zip(counts[0].tolist(), counts[1].tolist(), strict=True))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=25, stateful_step_count=20)


def test_a_history_has_room_for_many_tokens() -> None:
    history = TokenHistory(np.array([3], np.int32))
    history.append(range(5000))
    assert len(history) == 5000
    history.remove(range(5000))
    history.check()
    assert as_dict(history.counts) == {3: 0}


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=6), st.lists(st.integers(0, 4), max_size=8)
)
def test_a_word_is_forbidden_where_its_beginning_stands(words: list[list[int]], context: list[int]) -> None:
    bad_words = BadWords(words)
    longer = [word for word in words if len(word) > 1]
    expected = {word[-1] for word in longer if context[-len(word) + 1 :] == word[:-1]}
    assert set(bad_words.after(context)) == expected
    assert set(bad_words.after(context[-bad_words.num_before :] if bad_words.num_before else [])) == expected
    assert set(bad_words.always) == {word[0] for word in words if len(word) == 1}


def test_words_are_forbidden_as_they_begin_a_text_and_as_they_follow_a_space() -> None:
    ids = {"bad": [4], " bad": [5], "ill": [6, 7], " ill": [2, 6, 7]}
    assert bad_words_as_ids(["bad", (8, 9), " ill"], lambda text: ids[text]) == ((4,), (5,), (8, 9), (6, 7))


def test_bad_words_reach_back_over_drafts_answer_and_prompt() -> None:
    sequence = sequence_of(SamplingParams(bad_words=[[1, 2, 3, 4]]), [9, 1], [2])
    assert sequence.banned() == []
    assert sequence.banned([3]) == [4]
    sequence.append([3])
    assert sequence.banned() == [4]
    sequence.truncate(1)
    assert sequence.banned() == []


def test_a_fork_goes_its_own_way() -> None:
    sequence = sequence_of(SamplingParams(repetition_penalty=2.0), [1], [2])
    fork = sequence.fork(sample=1)
    fork.append([3])
    sequence.append([4])
    assert (sequence.generated_ids, fork.generated_ids) == ([2, 4], [2, 3])
    assert sequence.counts().token_ids.tolist() == [1, 2, 4]
    assert fork.counts().token_ids.tolist() == [1, 2, 3]
    assert (sequence.sample, fork.sample) == (0, 1)


def test_a_sequence_that_is_taken_up_again_is_the_same() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    grown = sequence_of(params, [1, 2])
    for token in (5, 5, 2):
        grown.append([token])
    again = sequence_of(params, [1, 2], [5, 5, 2])
    assert as_dict(grown.counts()) == as_dict(again.counts()) == {1: 0, 2: 1, 5: 2}
    assert grown.position() == again.position() == 5
