"""The parameters of a request's sampling, and its bad words, independent of logits and batches.

Everything is checked here that needs no model; whether token ids lie inside the vocabulary is checked where a sequence
begins (:mod:`.sequence`).

A bad word must not be generated. One of one token is always forbidden. A longer one forbids its last token where its
others stand right before; they are found by the token that stands last, so a step costs the words that end in it, not
all words.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, cast, final, get_args

import numpy as np

from pagedkv.contract.arguments import as_count, as_flag, as_number
from pagedkv.engine.sampling.foreign import LogitsProcessor, TokenMatcher
from pagedkv.errors import RequestError


@final
class BadWords:
    """The bad words of one request; shared by its sequences, since nothing in it changes.

    Args:
        words: token ids of each.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        different = dict.fromkeys(tuple(word) for word in words)
        self.always = tuple(word[0] for word in different if len(word) == 1)
        self._by_last: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in different:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append((word[:-1], word[-1]))
        self.num_before = max((len(word) - 1 for word in different), default=0)

    def after(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that longer words forbid after these; the last ``num_before`` are enough."""
        if not token_ids:
            return []
        found = self._by_last.get(token_ids[-1], ())
        return [token for before, token in found if tuple(token_ids[-len(before) :]) == before]


def bad_words_as_ids(
    words: Iterable[str | Sequence[int]], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Turn bad words into token ids: text as it begins a text, and as it follows a space. Ids stay as they are.

    Args:
        words: of :class:`~pagedkv.engine.sampling.parameters.SamplingParams`.
        encode: gives a text's token ids without special tokens.

    Returns:
        Token ids of each spelling, each once. The spelling after a space counts where it is another one of as many
        tokens: a space that is a token of its own would forbid the word's pieces elsewhere.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        found[plain] = None
        if len(spaced) == len(plain):
            found[spaced] = None
    found.pop((), None)
    return tuple(found)


LARGEST_SEED: Final = 2**63 - 1
LEAST_TEMPERATURE: Final = 1e-4
"""float32 cannot resolve logits divided by less than this; 0 is for the greatest logit."""
MOST_LOGPROBS: Final = 1024
"""Most likeliest tokens of one position with log-probabilities."""
Pooling: TypeAlias = Literal["mean", "last"]
POOLINGS: Final[tuple[str, ...]] = get_args(Pooling)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are chosen, and when it ends.

    Args:
        n: samples of one prompt; with temperature 0 they are all the same.
        temperature: divisor of the logits; 0 takes the greatest logit (greedy), the default of transformers'
            ``generate``.
        top_k: keep the k greatest logits, and what equals the least of them; 0 or -1 keeps all.
        top_p: keep the most probable tokens until their probabilities reach this sum; 1 keeps all.
        min_p: keep tokens at least this times as probable as the most probable one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or answer have; 1 is
            none.
        presence_penalty: subtracted from logits of tokens that the answer has.
        frequency_penalty: subtracted from them as often as the answer has them.
        bad_words: what must not be generated, each as text or as token ids; text becomes ids in
            :func:`~pagedkv.engine.sampling.parameters.bad_words_as_ids`.
        logit_bias: added to the logits of these token ids; -inf forbids one.
        min_tokens: tokens of the answer before it may end by itself.
        max_tokens: tokens of the answer at which it ends; None: as many as the context has room for.
        stop: texts that end the answer, which is cut before them.
        stop_token_ids: tokens that end the answer, beside the model's own.
        ignore_eos: the model's own end tokens do not end the answer.
        seed: where the noise comes from, 0 to 2**63 - 1; None: the engine draws one.
        logprobs: log-probabilities of each token of the answer: None for none, 0 for the token's own, n for the n
            greatest beside it. Of the model's logits as they are, before penalties and temperature.
        prompt_logprobs: the same of the prompt's tokens.
        logprob_token_ids: with ``logprobs``, tell these tokens at each place in place of the greatest.
        pooling: tell the mean of the prompt's hidden states, or that of its last token; None: tell none.
        logits_processors: foreign ones, in order: called as transformers calls its own, or matchers of a grammar.
        num_beams: beams of a beam search, which is greedy; 1 is none. Its n best answers are told, the best first.
        length_penalty: of a beam search: exponent of the length that scores are divided by; above 0 favours long ones.
        early_stopping: of a beam search: True ends it with as many answers as beams; False when none is likely to
            become better; "never" when none can.

    Raises:
        RequestError: a value that is absurd, or contradicts another.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[str | Sequence[int]] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    pooling: Pooling | None = None
    logits_processors: Sequence[LogitsProcessor | TokenMatcher] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_filters()
        self._check_penalties()
        self._set("bad_words", tuple(_as_bad_word(word) for word in _as_list(self.bad_words, "bad_words")))
        self._set("logit_bias", _as_bias(self.logit_bias))
        self._set("stop", _as_stops(self.stop))
        ids = _as_list(self.stop_token_ids, "stop_token_ids")
        self._set(
            "stop_token_ids",
            tuple(as_count(token, "a token id of stop_token_ids", error=RequestError) for token in ids),
        )
        named = [
            as_count(token, "a token id of logprob_token_ids", error=RequestError)
            for token in _as_list(self.logprob_token_ids, "logprob_token_ids")
        ]
        self._set("logprob_token_ids", tuple(dict.fromkeys(named)))
        if self.pooling is not None and not (isinstance(self.pooling, str) and self.pooling in POOLINGS):
            raise RequestError(f"pooling must be one of {POOLINGS}, got {self.pooling!r}")
        self._set("ignore_eos", as_flag(self.ignore_eos, "ignore_eos", RequestError))
        self._set("logits_processors", _as_processors(self.logits_processors))
        self._check_together()
        self._check_beams()

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], "SamplingParams"], tuple[dict[str, Any]]]:
        """Let it be copied and pickled, which a read-only mapping cannot be."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _made_of, (values | {"logit_bias": dict(self.logit_bias)},)

    @property
    def is_greedy(self) -> bool:
        """Whether the greatest logit is taken, without noise."""
        return self.temperature == 0.0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        self._set("n", as_count(self.n, "n", least=1, error=RequestError))
        self._set("top_k", max(as_count(self.top_k, "top_k", least=-1, error=RequestError), 0))
        self._set("min_tokens", as_count(self.min_tokens, "min_tokens", error=RequestError))
        if self.max_tokens is not None:
            self._set("max_tokens", as_count(self.max_tokens, "max_tokens", least=1, error=RequestError))
        if self.seed is not None:
            self._set("seed", as_count(self.seed, "seed", most=LARGEST_SEED, error=RequestError))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, as_count(getattr(self, name), name, most=MOST_LOGPROBS, error=RequestError))

    def _check_filters(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            self._set(name, as_number(getattr(self, name), name, RequestError))
        if self.temperature < 0 or 0 < self.temperature < LEAST_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 for greedy sampling or at least {LEAST_TEMPERATURE:g}, got {self.temperature:g}"
            )
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must lie above 0 and be at most 1, got {self.top_p:g}")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must lie between 0 and 1, got {self.min_p:g}")

    def _check_penalties(self) -> None:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            self._set(name, as_number(getattr(self, name), name, RequestError))
        if self.repetition_penalty <= 0:
            raise RequestError(
                f"repetition_penalty must be above 0, got {self.repetition_penalty:g}: 1 is none, 1.1 a mild one"
            )

    def _check_together(self) -> None:
        for name, nothing in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if self.is_greedy and getattr(self, name) != nothing:
                raise RequestError(
                    f"{name}={getattr(self, name):g} with temperature=0 would change nothing: set a temperature above "
                    f"0, or leave {name} out"
                )
        if len(self.logprob_token_ids) > MOST_LOGPROBS:
            raise RequestError(
                f"logprob_token_ids has {len(self.logprob_token_ids):,} tokens; at most {MOST_LOGPROBS:,} may be told"
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError("logprob_token_ids need logprobs: set it to 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")

    def _check_beams(self) -> None:
        self._set("num_beams", as_count(self.num_beams, "num_beams", least=1, error=RequestError))
        self._set("length_penalty", as_number(self.length_penalty, "length_penalty", RequestError))
        is_word = isinstance(self.early_stopping, str) and self.early_stopping == "never"
        if not is_word and not isinstance(self.early_stopping, bool):
            raise RequestError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
        if self.num_beams == 1:
            if self.length_penalty != 1 or self.early_stopping:
                raise RequestError("length_penalty and early_stopping are of a beam search: set num_beams above 1")
            return
        if self.n > self.num_beams:
            raise RequestError(f"n={self.n} answers are more than num_beams={self.num_beams} can find")
        others = {"temperature": self.temperature, "stop": self.stop, "logits_processors": self.logits_processors}
        for name in [name for name, value in others.items() if value]:
            raise RequestError(f"{name} is not served together with num_beams={self.num_beams}: leave one of them out")
        if self.logprobs is not None:
            raise RequestError(f"logprobs are not served together with num_beams={self.num_beams}: beams have scores")


def _made_of(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _as_list(values: object, what: str) -> list[object]:
    """Take a sequence apart; a lone text or number is no sequence of them."""
    is_list = isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim == 1)
    if isinstance(values, str | bytes | np.ma.MaskedArray) or not is_list:
        raise RequestError(f"{what} must be a list, got {values!r}")
    return list(cast("Sequence[object]", values))


def _as_bad_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str):
        if not word.strip():
            raise RequestError(f"a bad word must have a character that is no space, got {word!r}")
        return word
    ids = tuple(
        as_count(token, "a token id of bad_words", error=RequestError) for token in _as_list(word, "a bad word")
    )
    if not ids:
        raise RequestError("a bad word must have at least one token id, got an empty list")
    return ids


def _as_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r}")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        token_id = as_count(token, "a token id of logit_bias", error=RequestError)
        is_ban = isinstance(value, float | np.floating) and value == -inf
        try:
            checked[token_id] = -inf if is_ban else as_number(value, "a bias", RequestError)
        except RequestError as problem:
            raise RequestError(f"logit_bias[{token_id}] must be a finite number or -inf, got {value!r}") from problem
    return MappingProxyType(checked)


def _as_stops(stop: object) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else _as_list(stop, "stop")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"a stop text must be a text with at least one character, got {text!r}")
    return tuple(dict.fromkeys(str(text) for text in texts))


def _as_processors(processors: object) -> tuple[LogitsProcessor | TokenMatcher, ...]:
    checked: list[LogitsProcessor | TokenMatcher] = []
    for processor in _as_list(processors, "logits_processors"):
        if not isinstance(processor, TokenMatcher) and not callable(processor):
            raise RequestError(
                "a logits processor must be callable as (token_ids, scores), or have allowed_tokens and fork, got "
                f"{processor!r}"
            )
        checked.append(processor)
    return tuple(checked)
