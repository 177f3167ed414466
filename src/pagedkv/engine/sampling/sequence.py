"""One sequence, as sampling sees it: its request's parameters, its tokens, their counts, its text, and when it ends.

It belongs to the sequence and to no row of a batch: rows may move, and sequences may be preempted, swapped and resumed,
without a change here. The engine appends accepted tokens (:meth:`SampledSequence.append`), removes tokens that were
taken back, and forks it with the sequence. It has no tensors.

A penalty concerns the different tokens of a row, which are few beside a vocabulary. So each sequence keeps a list of
them, with counts, that costs O(1) a token and is copied by a fork; a dense count of the vocabulary for each of 256 rows
would be 128 MB, and a pass over it each step. Entries stand in the order in which tokens first came, so taking back the
last tokens takes entries from the end.

A tokenizer joins tokens in its own ways (spaces, characters of several tokens), so text is never put together from
tokens decoded alone. A window is decoded each time, the last tokens whose text is known and the new ones: what is
behind the known text is what these add. A window that has grown long begins anew at tokens whose text is known. A text
that ends in U+FFFD is a character that is not whole yet, and adds nothing.

An answer ends by a token, by a text, or by length. Tokens are looked at one by one, so that an answer is the same
whether they come one a step or several. A stop text counts at the token with which it is complete; where several are
complete at once, the one that began first. What has been streamed is never taken back: text that may be the beginning
of a stop text is held until that is known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import TokenIds, as_count, as_token_array
from pagedkv.contract.arrays import Int32Array
from pagedkv.engine.sampling.foreign import TokenMatcher
from pagedkv.engine.sampling.parameters import LARGEST_SEED, BadWords, SamplingParams
from pagedkv.errors import RequestError, TokenError

FIRST_ROOM: Final = 64


class TokenCounts(NamedTuple):
    """Different tokens, and how often the answer has them.

    Args:
        token_ids: int64 ``[n]``, each once.
        counts: float32 ``[n]``, 0 for tokens that only the prompt has.
    """

    token_ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.float32]


@final
class TokenHistory:
    """Counts of the tokens of one answer, and which tokens its prompt has.

    Args:
        prompt_ids: int32; empty where only the answer counts. Cost: O(n log n).
    """

    def __init__(self, prompt_ids: Int32Array) -> None:
        different = np.unique(prompt_ids)
        self._num_of_prompt = self._num = len(different)
        self._token_ids = np.zeros(self._num + FIRST_ROOM, np.int64)
        self._token_ids[: self._num] = different
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._places = {int(token): place for place, token in enumerate(different)}

    def __len__(self) -> int:
        """Count the different tokens."""
        return self._num

    @property
    def counts(self) -> TokenCounts:
        """The entries as they are now: views that the next change overwrites."""
        return TokenCounts(self._token_ids[: self._num], self._counts[: self._num])

    def counts_with(self, token_ids: Iterable[int]) -> TokenCounts:
        """Return the entries with more tokens of the answer; changes nothing."""
        tokens = list(token_ids)
        self.append(tokens)
        counts = TokenCounts(self.counts.token_ids.copy(), self.counts.counts.copy())
        self.remove(tokens)
        return counts

    def append(self, token_ids: Iterable[int]) -> None:
        """Count tokens that the answer grows by. Cost: O(1) each."""
        for token in token_ids:
            place = self._places.get(token)
            if place is None:
                place = self._enter(token)
            self._counts[place] += 1

    def remove(self, token_ids: Iterable[int]) -> None:
        """Take back the last tokens of the answer, given in its order. Cost: O(1) each."""
        for token in reversed(list(token_ids)):
            place = self._places[token]
            self._counts[place] -= 1
            if self._counts[place] == 0 and place >= self._num_of_prompt:
                assert place == self._num - 1, "tokens are taken back in another order than they came"
                del self._places[token]
                self._num -= 1

    def fork(self) -> "TokenHistory":
        """Copy it. Cost: O(different tokens)."""
        copy = object.__new__(TokenHistory)
        copy._num_of_prompt, copy._num = self._num_of_prompt, self._num
        copy._token_ids, copy._counts = self._token_ids.copy(), self._counts.copy()
        copy._places = self._places.copy()
        return copy

    def check(self) -> None:
        """Prove that list and places agree."""
        ids = self._token_ids[: self._num].tolist()
        assert self._places == {token: place for place, token in enumerate(ids)}
        assert (self._counts[self._num_of_prompt : self._num] > 0).all()

    def _enter(self, token: int) -> int:
        if self._num == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        place = self._num
        self._token_ids[place], self._counts[place] = token, 0
        self._places[token] = place
        self._num += 1
        return place


class Feature:
    """The features of sampling that a sequence uses, as bits; a batch skips features that none of its rows uses.

    Plain numbers instead of an IntFlag, whose operations take ten times as long: several are tested for each row and
    step.
    """

    NONE: Final = 0
    NOISE: Final = 1
    FILTERS: Final = 2
    BIAS: Final = 4
    PENALTIES: Final = 8
    BANS: Final = 16
    FOREIGN: Final = 32
    LOGPROBS: Final = 64


@final
class SampledSequence:
    """What sampling keeps of one sequence.

    Args:
        params: of its request; bad words as token ids.
        prompt_ids: the prompt.
        vocab_size: of the logits; token ids of the parameters must lie below it.
        end_token_ids: the model's own end tokens.
        sample: which sample of the request it is, from 0.
        seed: where the noise comes from when the parameters name none.
        generated_ids: tokens of the answer that are known already, of a sequence that is taken up again.

    Attributes:
        generated_ids: the answer so far: the list itself, not to be changed.

    Raises:
        RequestError: bad words as text, or parameters that name tokens which the vocabulary does not have.
        TokenError: a token outside of the vocabulary, or an empty prompt.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: TokenIds,
        *,
        vocab_size: int,
        end_token_ids: Iterable[int] = (),
        sample: int = 0,
        seed: int = 0,
        generated_ids: TokenIds = (),
    ) -> None:
        self.params = params
        self.sample = as_count(sample, "sample")
        self.seed = params.seed if params.seed is not None else as_count(seed, "seed", most=LARGEST_SEED)
        self.vocab_size = vocab_size
        self._prompt_ids = _checked_ids(prompt_ids, vocab_size, "the prompt")
        if not len(self._prompt_ids):
            raise TokenError("a prompt needs at least one token, got none")
        # Until it may end, what would end it is forbidden; the model's end tokens too where they end nothing.
        ends = tuple(dict.fromkeys((*end_token_ids, *params.stop_token_ids)))
        self._early_bans = ends if params.min_tokens else ()
        _check_inside(vocab_size, params, self._early_bans)
        self._bad_words = BadWords(_words_of(params))
        self.bias_ids = np.array(list(params.logit_bias), np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), np.float32)
        self.processors = tuple(
            processor.fork() if isinstance(processor, TokenMatcher) else processor
            for processor in params.logits_processors
        )
        self.generated_ids: list[int] = []
        self._history = self._new_history()
        self.features = self._features()
        self.append(generated_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.generated_ids)

    def append(self, token_ids: TokenIds) -> None:
        """Grow the answer by accepted tokens. Cost: O(1) each.

        Raises:
            TokenError: a token outside of the vocabulary; nothing is appended then.
        """
        tokens = _checked_ids(token_ids, self.vocab_size, "the answer").tolist()
        self.generated_ids += tokens
        if self._history is not None:
            self._history.append(tokens)

    def append_sampled(self, token_id: int) -> None:
        """Grow the answer by a token that was sampled for it, and so needs no check: a step's hot path. O(1)."""
        self.generated_ids.append(token_id)
        if self._history is not None:
            self._history.append((token_id,))

    def truncate(self, num_generated: int) -> None:
        """Take back the answer's last tokens, down to ``num_generated`` of them.

        Raises:
            TokenError: the answer is shorter.
        """
        kept = as_count(num_generated, "num_generated", most=len(self.generated_ids), error=TokenError)
        if self._history is not None:
            self._history.remove(self.generated_ids[kept:])
        del self.generated_ids[kept:]

    def fork(self, sample: int) -> "SampledSequence":
        """Return an independent sequence with the same tokens. Cost: O(tokens of the answer)."""
        copy = object.__new__(SampledSequence)
        copy.__dict__.update(self.__dict__)
        copy.sample = as_count(sample, "sample")
        copy.generated_ids = self.generated_ids.copy()
        copy._history = None if self._history is None else self._history.fork()
        copy.processors = tuple(
            processor.fork() if isinstance(processor, TokenMatcher) else processor for processor in self.processors
        )
        return copy

    def position(self, drafts: Sequence[int] = ()) -> int:
        """Return the position, from 0, of the token that is sampled after the answer and these drafts."""
        return len(self._prompt_ids) + len(self.generated_ids) + len(drafts)

    def token_ids(self, drafts: Sequence[int] = ()) -> list[int]:
        """List prompt, answer and drafts. Cost: O(n)."""
        ids: list[int] = self._prompt_ids.tolist()
        return [*ids, *self.generated_ids, *drafts]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt_ids)

    def counts(self, drafts: Sequence[int] = ()) -> TokenCounts:
        """Return the penalised tokens, with their counts in the answer and these drafts."""
        assert self._history is not None, "called only where the parameters have a penalty"
        return self._history.counts_with(drafts) if drafts else self._history.counts

    def banned(self, drafts: Sequence[int] = ()) -> Sequence[int]:
        """Return the tokens that are forbidden next; some may occur twice."""
        banned = list(self._bad_words.always)
        if self._bad_words.num_before:
            banned += self._bad_words.after(self._last(self._bad_words.num_before, drafts))
        if len(self.generated_ids) + len(drafts) < self.params.min_tokens:
            banned += self._early_bans
        return banned

    def _last(self, count: int, drafts: Sequence[int]) -> list[int]:
        """List the last tokens, of the prompt as well where the answer has fewer."""
        ids = [*self.generated_ids[-count:], *drafts]
        missing = count - len(ids)
        return [*self._prompt_ids[-missing:].tolist(), *ids] if missing > 0 else ids[-count:]

    def _new_history(self) -> TokenHistory | None:
        params = self.params
        if params.repetition_penalty != 1:
            return TokenHistory(self._prompt_ids)
        if params.presence_penalty or params.frequency_penalty:
            return TokenHistory(self._prompt_ids[:0])
        return None

    def _features(self) -> int:
        params = self.params
        requested = {
            Feature.NOISE: not params.is_greedy,
            Feature.FILTERS: not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
            Feature.BIAS: len(self.bias_ids) > 0,
            Feature.PENALTIES: self._history is not None,
            Feature.BANS: bool(self._bad_words.always or self._bad_words.num_before or self._early_bans),
            Feature.FOREIGN: bool(self.processors),
            Feature.LOGPROBS: params.logprobs is not None,
        }
        features: int = Feature.NONE
        for feature, is_requested in requested.items():
            features |= feature if is_requested else Feature.NONE
        return features


def _words_of(params: SamplingParams) -> list[Sequence[int]]:
    words = []
    for word in params.bad_words:
        if isinstance(word, str):
            raise RequestError(
                f"the bad word {word!r} is text: turn bad words into token ids first, by bad_words_as_ids"
            )
        words.append(word)
    return words


def _checked_ids(token_ids: TokenIds, vocab_size: int, what: str) -> Int32Array:
    ids = as_token_array(token_ids)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise TokenError(f"token ids of {what} must lie between 0 and {vocab_size - 1}, got {ids.min()} to {ids.max()}")
    return ids


def _check_inside(vocab_size: int, params: SamplingParams, bans: Sequence[int]) -> None:
    named = {
        "logit_bias": list(params.logit_bias),
        "bad_words": [token for word in _words_of(params) for token in word],
        "stop_token_ids": list(params.stop_token_ids),
        "logprob_token_ids": list(params.logprob_token_ids),
        "end_token_ids": list(bans),
    }
    for name, ids in named.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RequestError(
                f"{name} names tokens {min(ids)} to {max(ids)}, but the vocabulary of {vocab_size} has 0 to "
                f"{vocab_size - 1}"
            )


REPLACEMENT: Final = "�"
LONGEST_WINDOW: Final = 4
"""Tokens of known text in a window."""
MOST_UNFINISHED: Final = 8
"""Tokens after which a replacement character is taken for one that the answer has: UTF-8 has four bytes."""


@final
class AnswerText:
    """The text of one answer.

    Args:
        decode: gives the text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._first = 0  # window: tokens from here on are decoded
        self._known = 0  # text of the tokens before this one is in `text`
        self._before = ""  # text of the window's tokens before `_known`
        self.text = ""

    def append(self, token_id: int) -> str:
        """Append a token; return the text that it adds, if any. Cost: decoding a few tokens, once or twice."""
        self._token_ids.append(token_id)
        added = self._added(is_over=len(self._token_ids) - self._known >= MOST_UNFINISHED)
        self.text += added
        return added

    def extend(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that they add, if any. Cost: decoding them and a few more, once or twice."""
        if len(token_ids) > 1 and (added := self._added_by(token_ids)):
            self.text += added
            return added
        return "".join(map(self.append, token_ids))

    def finish(self) -> str:
        """Return the text of an unfinished character, after the last token."""
        added = self._added(is_over=True)
        self.text += added
        return added

    def fork(self) -> "AnswerText":
        """Copy it."""
        copy = AnswerText(self._decode)
        copy._token_ids, copy.text = self._token_ids.copy(), self.text
        copy._first, copy._known, copy._before = self._first, self._known, self._before
        return copy

    def _added_by(self, token_ids: Sequence[int]) -> str:
        """Append tokens whose last one ends a character; return their text. Else nothing is appended: empty."""
        before = len(self._token_ids)
        self._token_ids += token_ids
        added = self._added(is_over=False)
        if not added:
            del self._token_ids[before:]
        return added

    def _added(self, *, is_over: bool) -> str:
        after = self._decode(self._token_ids[self._first :])
        if len(after) <= len(self._before) or (after.endswith(REPLACEMENT) and not is_over):
            return ""
        added = after[len(self._before) :]
        if len(self._token_ids) - self._first > LONGEST_WINDOW:
            self._first, after = self._known, self._decode(self._token_ids[self._known :])
        self._known, self._before = len(self._token_ids), after
        return added


class FinishReason(Enum):
    """Why an answer ended, in the words of the field's interfaces."""

    STOP = "stop"
    LENGTH = "length"

    value: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended.

    Args:
        reason: by itself, or by length.
        num_tokens: tokens that the answer has, the one that ended it included.
        stop: the token id or the text that ended it; None where it ended by length.
    """

    reason: FinishReason
    num_tokens: int
    stop: int | str | None


@final
class StopDetector:
    """Follows one answer until it ends.

    Args:
        params: of its request.
        stop_ids: tokens that end it; the model's end tokens are among them unless the request ignores them.
        decode: maps token ids to text; None: no text is kept.
        max_tokens: tokens that the context has room for; the parameters may have a lower limit.

    Raises:
        RequestError: stop texts without ``decode``, or no limit at all.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if params.stop and decode is None:
            raise RequestError(f"the stop texts {list(params.stop)} need a tokenizer that can decode: give decode")
        limits = [limit for limit in (params.max_tokens, max_tokens) if limit is not None]
        if not limits:
            raise RequestError("an answer needs a limit: max_tokens of its parameters, or of the context")
        self._max_tokens = min(limits)
        self._min_tokens = params.min_tokens
        self._stop_ids = stop_ids
        self._stops = params.stop
        self._text = None if decode is None else AnswerText(decode)
        self._num_tokens = 0
        self._cut: int | None = None
        self.ending: Ending | None = None

    @property
    def text(self) -> str:
        """The answer's text, cut before the stop text that ended it. Without the token that ended it."""
        text = "" if self._text is None else self._text.text
        return text if self._cut is None else text[: self._cut]

    def append(self, token_ids: Sequence[int]) -> Ending | None:
        """Look at tokens of the answer, in order, until one ends it; those behind that one are not the answer's.

        Returns:
            How it ended, or None. What follows an ending changes nothing.
        """
        for token in token_ids:
            if self.ending is not None:
                break
            self._num_tokens += 1
            self.ending = self._end_at(int(token))
            if self.ending is not None and self._text is not None and self._cut is None:
                self._text.finish()
        return self.ending

    def fork(self) -> "StopDetector":
        """Copy it, for a sequence that goes its own way from here on."""
        copy = object.__new__(StopDetector)
        copy.__dict__.update(self.__dict__)
        copy._text = None if self._text is None else self._text.fork()
        return copy

    def _end_at(self, token: int) -> Ending | None:
        may_end = self._num_tokens >= self._min_tokens
        if token in self._stop_ids and may_end:
            return Ending(FinishReason.STOP, self._num_tokens, token)
        if self._text is not None:
            added = self._text.append(token)
            found = self._found(len(added)) if may_end and added else None
            if found is not None:
                self._cut, stop = found
                return Ending(FinishReason.STOP, self._num_tokens, stop)
        if self._num_tokens >= self._max_tokens:
            return Ending(FinishReason.LENGTH, self._num_tokens, None)
        return None

    def _found(self, num_added: int) -> tuple[int, str] | None:
        """Find the stop text that the last characters completed first: where it begins, and which it is."""
        assert self._text is not None
        text = self._text.text
        ends: list[tuple[int, int, str]] = []
        for stop in self._stops:
            begin = text.find(stop, max(0, len(text) - num_added - len(stop) + 1))
            if begin >= 0:
                ends.append((begin + len(stop), begin, stop))
        if not ends:
            return None
        _, begin, stop = min(ends)
        return begin, stop
