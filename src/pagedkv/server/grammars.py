"""Formats of answers as token matchers: JSON of a schema, a regular expression, forced tool calls.

Grammars compiles the format that a request demands of its answer, for one tokenizer, and keeps it. All formats are
written in llguidance's Lark dialect, so that they share one way to compile, cache and refuse them. A forced call is a
rule of that dialect, which the format of :mod:`pagedkv.server.parsing` writes that also reads the answer: the name is
fixed, and the arguments follow the tool's schema. A GrammarMatcher is one sequence's state in a grammar; behind
thoughts it begins where the parser reads their end (:class:`.parsing.EndOfThoughts`).

Needs the extra ``grammar`` (llguidance).
"""

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, Final, final

import torch

from pagedkv.contract.arguments import as_count
from pagedkv.contract.extras import needing
from pagedkv.engine.sampling import AnswerText
from pagedkv.errors import ConfigurationError, RequestError, SamplingError
from pagedkv.server.parsing import FORMATS, CallFormat, EndOfThoughts
from pagedkv.server.parsing.call_parser import as_literal

with needing("grammar", "pagedkv.server.grammars"):
    from llguidance import LLMatcher, LLTokenizer, regex_to_lark
    from tokenizers import Tokenizer
BLANKS: Final = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between two elements of JSON. Its length is bounded, since some models would otherwise write blanks until
the answer's limit."""
PLACE: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


@final
class Grammars:
    """Makes matchers for :class:`~pagedkv.engine.SamplingParams`'s ``logits_processors``.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``, or one of transformers that has one (``backend_tokenizer``).
        vocab_size: columns of the logits.
        eos_token_ids: tokens that end an answer; None: the tokenizer's ``eos_token_id``.
        max_cached: compiled grammars that are kept, the least recently used ones dropped first.
        call_format: the model's format of calls, for what stands before an answer in it; None: nothing does.

    Raises:
        ConfigurationError: llguidance cannot read the tokenizer, or the tokenizer has no token that ends an answer.
        MissingExtraError: llguidance is not installed (raised on import).

    Building takes about a second for 100,000 tokens. All methods are thread-safe. Methods that return a matcher take
    ``after``: a marker, such as ``</think>``, up to which the answer is unconstrained; None: the grammar applies from
    the first token.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - of tokenizers or transformers
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int] | None = None,
        max_cached: int = 256,
        call_format: CallFormat | None = None,
    ) -> None:
        self._max_cached = as_count(max_cached, "max_cached", least=1)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._tokenizer = _read_tokenizer(tokenizer, as_count(vocab_size, "vocab_size", least=1), eos_token_ids)
        preamble = None if call_format is None else call_format.preamble
        self._preamble = "" if preamble is None else preamble(self._marker)
        self._texts = VocabularyTexts(tokenizer, self._tokenizer.vocab_size, frozenset(self._tokenizer.eos_tokens))

    def json_schema(
        self, schema: Mapping[str, Any], *, strict: bool, after: str | None = None
    ) -> "GrammarMatcher | ThoughtsMatcher":
        """Return a matcher of JSON texts that a schema allows.

        Args:
            schema: a JSON schema. llguidance rounds its numbers to 64-bit floats: integers are exact up to ``2**53``.
            strict: whether a keyword that cannot be enforced is refused; else it is ignored.
            after: a marker up to which the answer is unconstrained.

        Raises:
            RequestError: llguidance refuses the schema; the message has its reason.
        """
        return self._answer(_json(schema, strict=strict), after, "the JSON schema")

    def json_object(self, *, after: str | None = None) -> "GrammarMatcher | ThoughtsMatcher":
        """Return a matcher of all JSON objects."""
        return self.json_schema({"type": "object"}, strict=True, after=after)

    def regex(self, pattern: str, *, after: str | None = None) -> "GrammarMatcher | ThoughtsMatcher":
        """Return a matcher of texts that match a regular expression as a whole.

        Args:
            pattern: in the syntax of Rust's regex crate: no look-around, no back-references.
            after: a marker up to which the answer is unconstrained.

        Raises:
            RequestError: llguidance refuses the pattern; the message has its reason.
        """
        return self._answer(f"/{regex_to_lark(pattern, '')}/", after, "the regular expression")

    def tool_call(  # noqa: PLR0913 - the fields of a request about calls
        self,
        tools: Sequence[Mapping[str, Any]],
        parser_name: str,
        *,
        named: str | None = None,
        several: bool = False,
        strict: bool = False,
        after: str | None = None,
    ) -> "GrammarMatcher | ThoughtsMatcher":
        """Return a matcher of answers that call tools, in the format that a parser reads.

        Args:
            tools: offered functions, as OpenAI's requests have them.
            parser_name: a format of calls, one of :data:`~pagedkv.server.parsing.FORMATS` that has rules.
            named: the tool that must be called; None: any of them.
            several: whether the answer may have more than one call.
            strict: whether a keyword of the parameters' schemas that cannot be enforced is refused; else it is ignored.
            after: a marker up to which the answer is unconstrained.

        Raises:
            RequestError: there is no such tool or format, or llguidance refuses the parameters' schemas.
        """
        chosen = [tool for tool in tools if named is None or tool["function"]["name"] == named]
        if not chosen:
            offered = ", ".join(repr(tool["function"]["name"]) for tool in tools) or "none"
            raise RequestError(f"tool {named!r} must be called, and is not offered; offered: {offered}")
        rules = None if (known := FORMATS.get(parser_name)) is None else known.rules
        if rules is None:
            forced = ", ".join(name for name, each in FORMATS.items() if each.rules is not None)
            raise RequestError(
                f"a tool call cannot be forced with the tool parser {parser_name!r}; it can with {forced}"
            )
        functions = [tool["function"] for tool in chosen]
        written = rules(functions, self._marker, lambda schema: _json(schema, strict=strict), several=several)
        return self._matcher(f"start: answer\n{written}", after, "the schema of the tools")

    def _marker(self, text: str) -> str:
        """Write a marker as a terminal: as a token id if the tokenizer has it as one special token, else as text."""
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        if len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0]):
            return f"<[{token_ids[0]}]>"
        return as_literal(text)

    def _answer(self, terminal: str, after: str | None, what: str) -> "GrammarMatcher | ThoughtsMatcher":
        start = "preamble answer" if self._preamble else "answer"
        return self._matcher(f"start: {start}\nanswer: {terminal}\n{self._preamble}", after, what)

    def _matcher(self, grammar: str, after: str | None, what: str) -> "GrammarMatcher | ThoughtsMatcher":
        compiled = self._compile(grammar, what)
        matcher = GrammarMatcher(
            compiled.deep_copy(), self._tokenizer.vocab_size, frozenset(self._tokenizer.eos_tokens)
        )
        return matcher if after is None else ThoughtsMatcher(matcher, after, self._texts)

    def _compile(self, grammar: str, what: str) -> LLMatcher:
        """Return the compiled grammar. Callers copy it and never advance it.

        Raises RequestError for a grammar that is refused, or that allows no token to begin with.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise RequestError(f"{what} cannot be served: {_reason(matcher.get_error())}")
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise RequestError(f"{what} cannot be served: no text matches it")
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
        return matcher


def _json(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Write a schema as a terminal, with its reading options. Raises RequestError."""
    reading = {"whitespace_pattern": BLANKS, "lenient": not strict}
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': reading}, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(f"the JSON schema is not JSON: {problem}") from problem


def _reason(error: str) -> str:
    """Return llguidance's reason, without the place in the grammar and the quoted lines."""
    lines = PLACE.sub("", error.strip()).splitlines() or ["no reason is known"]
    return " ".join([lines[0], *(line.strip() for line in lines[1:] if line.startswith("error:"))])


def _read_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int] | None) -> LLTokenizer:  # noqa: ANN401
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise ConfigurationError(
            f"grammars need a fast tokenizer, of tokenizers or transformers, got {type(tokenizer).__name__}"
        )
    if eos_token_ids is None:
        eos = getattr(tokenizer, "eos_token_id", None)
        eos_token_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if not eos_token_ids:
        raise ConfigurationError("grammars need the tokens that end an answer: give eos_token_ids")
    plain = Tokenizer.from_str(backend.to_str())
    plain.no_padding()
    plain.no_truncation()
    try:
        return LLTokenizer(plain.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as problem:
        raise ConfigurationError(f"llguidance cannot read the tokenizer: {problem}") from problem


@final
class VocabularyTexts:
    """What tokens write into an answer, and which of them may stand within thoughts.

    Args:
        tokenizer: of tokenizers or transformers.
        vocab_size: columns of the logits.
        eos_token_ids: tokens that end an answer, which none of the thoughts may.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:  # noqa: ANN401 - as above
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._free: dict[tuple[str, str], torch.Tensor] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def _of_each(self) -> list[str]:
        return [self.decode([token]) for token in range(self._vocab_size)]

    def free(self, marker: str, held: str) -> torch.Tensor:
        """Return the tokens that may follow within thoughts: all but those that end more than the thoughts.

        Args:
            marker: that ends the thoughts.
            held: the beginning of it that they end with.

        Returns:
            bool ``[vocabulary]``.

        Cost: O(vocabulary) once for each beginning; for the first one the text of each token.
        """
        known = self._free.get((marker, held))
        if known is None:
            known = torch.ones(self._vocab_size, dtype=torch.bool)
            for token, text in enumerate(self._of_each):
                place = (held + text).find(marker) if marker[-1] in text else -1
                known[token] = place < 0 or place + len(marker) == len(held) + len(text)
            known[self._eos_token_ids] = False
            self._free[marker, held] = known
        return known.clone()


@final
class GrammarMatcher:
    """Constrains one sequence to a grammar: a :class:`~pagedkv.engine.sampling.TokenMatcher`.

    Args:
        matcher: a matcher of llguidance at the grammar's beginning, owned by this object.
        vocab_size: columns of the logits.
        eos_token_ids: tokens that end an answer; after a complete answer several of them may follow each other.

    Attributes:
        least: before so many tokens the answer ends only where nothing else may follow.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.least = 0.0
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._accepted: list[int] = []

    def allowed_tokens(self, generated_ids: list[int], /) -> torch.Tensor:
        """Set the matcher's state to these tokens of the answer, and return the tokens that may follow.

        After a complete answer that nothing can extend, only the tokens that end an answer are allowed.

        Returns:
            int32 ``[ceil(vocabulary / 32)]`` with the bit of each allowed token set, lowest bit first; after the
            answer's end bool ``[vocabulary]``.

        Raises:
            SamplingError: the grammar does not allow the tokens, or llguidance's limits of work are exceeded.

        Cost: one mask of the vocabulary, and one step of the grammar for each token that the last call did not have.
        """
        num_ends = 0
        while num_ends < len(generated_ids) and generated_ids[-1 - num_ends] in self._eos_token_ids:
            num_ends += 1
        self._move_to(generated_ids[: len(generated_ids) - num_ends])
        if num_ends:  # never passed to llguidance, whose rollback counts end tokens differently
            return self._ended()
        mask = self._matcher.compute_bitmask()
        self._require_sound()
        if len(generated_ids) < self.least:
            mask = self._going_on(mask)
        return torch.frombuffer(bytearray(mask), dtype=torch.int32)

    def _going_on(self, mask: bytes) -> bytes:
        """Return a mask without the tokens that end an answer; as it is if it has no other tokens."""
        others = bytearray(mask)
        for token in self._eos_token_ids:
            others[token // 8] &= ~(1 << token % 8)
        return bytes(others) if any(others) else mask

    def fork(self) -> "GrammarMatcher":
        """Return an independent matcher at the same place of the same grammar."""
        copy = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        copy.least = self.least
        copy._accepted = self._accepted.copy()
        return copy

    def _move_to(self, token_ids: Sequence[int]) -> None:
        accepted = self._accepted
        common = len(accepted)
        if token_ids[:common] != accepted:
            common = next(
                (at for at, (have, want) in enumerate(zip(accepted, token_ids, strict=False)) if have != want),
                min(common, len(token_ids)),
            )
            if not self._matcher.rollback(len(accepted) - common):
                self._require_sound()
            del accepted[common:]
        for token in token_ids[common:]:
            if token in self._eos_token_ids or not self._matcher.try_consume_tokens([token]):
                self._require_sound()
                raise SamplingError(f"the grammar does not allow token {token} as number {len(accepted)} of the answer")
            accepted.append(token)

    def _ended(self) -> torch.Tensor:
        if not self._matcher.is_accepting():
            raise SamplingError(f"the grammar does not allow that the answer ends after {len(self._accepted)} tokens")
        flags = torch.zeros(self._vocab_size, dtype=torch.bool)
        flags[list(self._eos_token_ids)] = True
        return flags

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise SamplingError(f"the grammar cannot continue: {self._matcher.get_error()}")


@final
class ThoughtsMatcher:
    """Leaves an answer free up to the end of its thoughts, and then constrains it.

    Args:
        inner: constrains what follows.
        marker: that ends the thoughts.
        texts: of tokens.

    Attributes:
        least: as of :class:`GrammarMatcher`.
    """

    def __init__(self, inner: GrammarMatcher, marker: str, texts: VocabularyTexts) -> None:
        self.least = 0.0
        self._inner = inner
        self._marker = marker
        self._texts = texts
        self._begin_again()

    def _begin_again(self) -> None:
        self._read: list[int] = []
        self._text = AnswerText(self._texts.decode)
        self._thoughts = EndOfThoughts(self._marker)

    def allowed_tokens(self, generated_ids: list[int], /) -> torch.Tensor:
        """Return the tokens that may follow; arguments, answer and errors as of :class:`GrammarMatcher`.

        Cost: within thoughts a copy of a mask and some decoding; all of it anew where earlier tokens were others.
        """
        if generated_ids[: len(self._read)] != self._read:
            self._begin_again()
        while not self._thoughts.is_over and len(self._read) < len(generated_ids):
            self._take(generated_ids[len(self._read)])
        if not self._thoughts.is_over:
            return self._texts.free(self._marker, self._thoughts.held)
        num_read = len(self._read)
        self._inner.least = self.least - num_read
        return self._inner.allowed_tokens(generated_ids[num_read:])

    def _take(self, token: int) -> None:
        _, rest = self._thoughts.feed(self._text.append(token))
        if rest:
            raise SamplingError(
                f"token {token} ends the thoughts and begins the answer, number {len(self._read)} of it"
            )
        self._read.append(token)

    def fork(self) -> "ThoughtsMatcher":
        """Return an independent matcher at the same place."""
        copy = ThoughtsMatcher(self._inner.fork(), self._marker, self._texts)
        copy.least = self.least
        return copy
