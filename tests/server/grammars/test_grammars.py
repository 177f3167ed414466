"""Random answers within a grammar: they parse, they validate, the parsers read them; and what is refused."""

import json
import math
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from pagedkv.engine.sampling import BatchSampler, Place, SampledSequence, SamplingParams, TokenMatcher
from pagedkv.errors import ConfigurationError, MissingExtraError, RequestError, SamplingError
from pagedkv.server.grammars import Grammars
from pagedkv.server.parsing import FORMATS, PlainParser, ReasoningPart, TextPart, merged, parser_for
from pagedkv.server.parsing.choosing import ReasoningParser
from pagedkv.server.parsing.harmony import CONSTRAIN, ENDS, MESSAGE
from pagedkv.server.parsing.json_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_NAME_END,
    DEEPSEEK_SECTION,
    KIMI_CALL,
    KIMI_NAME_END,
    KIMI_SECTION,
)
from tests.server.grammars.drawing import END, MARKERS, VOCAB_SIZE, allowed, byte_tokenizer, draw
from tests.server.parsing.reading import calls, content, parse

jsonschema_rs = pytest.importorskip("jsonschema_rs")

TOKENIZER = byte_tokenizer(*MARKERS)
GRAMMARS = Grammars(TOKENIZER, VOCAB_SIZE, eos_token_ids=[END])
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": POINT}},
    {
        "type": "function",
        "function": {
            "name": 'say_"hé"',
            "parameters": {
                "$defs": {"word": {"enum": ["</tool_call>", "é"]}},
                "properties": {"words": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 3}},
                "required": ["words"],
                "additionalProperties": False,
            },
        },
    },
]

leaves = st.one_of(
    st.builds(
        lambda least, span: {"type": "integer", "minimum": least, "maximum": least + span}, *[st.integers(0, 999)] * 2
    ),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"const": "ü\n"}, {"type": "string", "pattern": "^[a-c]{1,4}$"}]
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.builds(
        lambda words: {"enum": words},
        st.lists(st.text(max_size=4) | st.integers(-(2**53), 2**53), min_size=1, max_size=3),
    ),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of objects whose properties are of inner ones, some of them optional."""

    def build(properties: dict[str, dict[str, Any]], num_required: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(st.text(max_size=5), inner, max_size=4), st.integers(0, 4))


schemas = objects(
    st.recursive(
        leaves,
        lambda inner: (
            objects(inner)
            | st.builds(
                lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
            )
            | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
        ),
        max_leaves=6,
    )
)


@settings(max_examples=60)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_every_random_answer_parses_and_validates(schema: dict[str, Any], seed: int) -> None:
    text = draw(GRAMMARS.json_schema(schema, strict=True), TOKENIZER, seed)
    jsonschema_rs.validate(schema, json.loads(text))


def test_the_schema_is_not_vacuous() -> None:
    """Without the matcher, the same validator refuses: the test above can fail."""
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(POINT, {"x": "1", "y": "a"})


@pytest.mark.parametrize("seed", range(10))
def test_a_json_object_is_an_object(seed: int) -> None:
    assert isinstance(json.loads(draw(GRAMMARS.json_object(), TOKENIZER, seed)), dict)


@pytest.mark.parametrize("pattern", [r"[a-c]{2,3}/x\n?", r"(yes|no)", r"é+", r"\d{4}-\d\d", 'a\nb: "c" | /d/'])
def test_a_regular_expression_holds_for_the_whole_answer(pattern: str) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, draw(GRAMMARS.regex(pattern), TOKENIZER, seed))


NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["long", "short"]},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["text", "kind"],
    "additionalProperties": False,
}
QUOTED: Final = frozenset({"hermes", "llama3_json", "mistral", "granite"})
"""Formats that write names within JSON, where a name may have any sign."""
SPECIAL: Final = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", *DEEPSEEK_SECTION, *DEEPSEEK_CALL, DEEPSEEK_NAME_END, *KIMI_SECTION),
    *(*KIMI_CALL, KIMI_NAME_END, *ENDS, MESSAGE, CONSTRAIN),
)
CLOSING: Final = {
    "qwen3_coder": ("</parameter>", "\n</parameter>\n"),
    "glm45": ("</arg_value>",),
    "openai": ("<|end|>",),
}
"""Texts that end a value or thoughts, which may not stand within them, however they are spelled."""


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.rules is not None])
@pytest.mark.parametrize("named", [None, 'say_"hé"'])
def test_the_parser_reads_every_forced_call(name: str, named: str | None, *, has_tokens: bool) -> None:
    """With markers that are special tokens and with markers that are text; a name with signs; references; markers."""
    markers = SPECIAL if has_tokens and named is None else ()
    tokenizer = byte_tokenizer(*markers)
    grammars = Grammars(tokenizer, VOCAB_SIZE, eos_token_ids=[END])
    note = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
    tools = [TOOLS[0], note] if markers or name not in QUOTED else TOOLS
    named = named if named is None or name in QUOTED else "note"
    validators = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for seed in range(6):
        matcher = grammars.tool_call(tools, name, named=named, several=seed % 2 == 0)
        text = draw(matcher, tokenizer, seed, closing=CLOSING.get(name, ("",)))
        parts = parse(parser_for(name, None, tools=tools, reasoning="none", id_source=str, prompt=""), text)
        found = calls(parts)
        assert found
        assert content(parts) == ""
        assert seed % 2 == 0 or len(found) == 1
        for called, arguments in found:
            assert named in {None, called}
            jsonschema_rs.validate(validators[called], json.loads(arguments))


@pytest.mark.parametrize("markers", [(), SPECIAL])
@pytest.mark.parametrize("seed", range(6))
def test_an_answer_of_channels_is_in_the_final_one_behind_thoughts(seed: int, markers: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer(*markers)
    grammars = Grammars(tokenizer, VOCAB_SIZE, eos_token_ids=[END], call_format=FORMATS["openai"])
    text = draw(grammars.json_schema(POINT, strict=True), tokenizer, seed, closing=CLOSING["openai"])
    parts = parse(parser_for("openai", None, tools=[], reasoning="auto", id_source=str, prompt=""), text)
    jsonschema_rs.validate(POINT, json.loads(content(parts)))
    assert ("analysis" in text) == any(isinstance(part, ReasoningPart) for part in parts)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, byte_tokenizer()], ids=["token", "text"])
def test_reasoning_is_free_up_to_its_marker(tokenizer: Any) -> None:  # noqa: ANN401 - tokenizers has no types
    grammars = Grammars(tokenizer, VOCAB_SIZE, eos_token_ids=[END])
    matcher = grammars.json_schema(POINT, strict=True, after="</think>")
    thought = tokenizer.encode('so {"x": 2} </thin </think>').ids
    assert END not in allowed(matcher.fork(), thought[:5])
    first = {tokenizer.decode([token]) for token in allowed(matcher, thought)}
    assert "{" in first
    assert "s" not in first


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(RequestError) as problem:
        make()
    return str(problem.value)


def test_what_llguidance_refuses_is_refused_with_its_reason() -> None:
    told = refused(lambda: GRAMMARS.json_schema({"type": "objekt"}, strict=False))
    assert told == "the JSON schema cannot be served: Invalid type: objekt"
    assert 'Unimplemented keys: ["not"]' in refused(lambda: GRAMMARS.json_schema({"not": {}}, strict=True))
    assert "unclosed character class" in refused(lambda: GRAMMARS.regex("["))
    assert "look-around" in refused(lambda: GRAMMARS.regex("(?=a)b"))
    assert "Resource 'http://x/y'" in refused(lambda: GRAMMARS.json_schema({"$ref": "http://x/y"}, strict=False))
    assert "is not JSON" in refused(lambda: GRAMMARS.json_schema({"const": float("nan")}, strict=True))
    assert "it can with glm45, qwen3_coder, deepseek_v3" in refused(lambda: GRAMMARS.tool_call(TOOLS, "none"))
    assert "'nix' must be called, and is not offered" in refused(
        lambda: GRAMMARS.tool_call(TOOLS, "llama3_json", named="nix")
    )


@pytest.mark.parametrize("pattern", ["[a&&b]", r"a[^\s\S]"])
@pytest.mark.parametrize("after", [None, "</think>"])
def test_an_expression_that_nothing_matches_is_refused(pattern: str, after: str | None) -> None:
    with pytest.raises(RequestError, match="the regular expression cannot be served: no text matches it"):
        GRAMMARS.regex(pattern, after=after)
    GRAMMARS.regex("(?:)")


def spelled(text: str) -> list[int]:
    """Return the tokens of a text's characters."""
    return [token for each in text for token in TOKENIZER.encode(each, add_special_tokens=False).ids]


@pytest.mark.parametrize("is_special", [True, False])
def test_thoughts_end_where_the_parser_reads_their_end(*, is_special: bool) -> None:
    """Whether the marker is one token or spelled by others: what follows is held."""
    grammars = Grammars(byte_tokenizer(*MARKERS if is_special else ()), VOCAB_SIZE, eos_token_ids=[END])
    free = grammars.regex("xyz", after="</think>")
    ends = [spelled("thought</think>"), spelled("</think>")]
    if is_special:
        marker = MARKERS.index("</think>") + END + 1
        ends += [[*spelled("thought"), marker], [marker], [*spelled("thought</thi"), marker]]
    for end in ends:
        matcher = free.fork()
        (only,) = allowed(matcher, end)
        assert only in spelled("x")
        with pytest.raises(SamplingError, match="does not allow"):
            matcher.allowed_tokens([*end, *spelled("a")])
    assert len(allowed(free, spelled("thought</thin"))) > 20


@pytest.mark.parametrize("seed", range(30))
def test_grammar_and_parser_agree_on_where_thoughts_end(seed: int) -> None:
    """Whatever tokens spell it, in halves of characters too: the answer behind it matches, and is what is read."""
    tokenizer = byte_tokenizer(*MARKERS, "k>x", "</th")
    matcher = Grammars(tokenizer, VOCAB_SIZE, eos_token_ids=[END]).regex("[xyz]{3}", after="</think>")
    chance = random.Random(seed)
    pieces = [tokenizer.encode(each).ids for each in ("</think>", "<", "</th", "ink>", "k>x", "é", "</thi", "so ")]
    pieces += [[token] for token in (0xC3, 0x3E, *range(END + 1, END + 6))]
    token_ids: list[int] = []
    while END not in (choices := allowed(matcher, token_ids)):
        wished = chance.choice(pieces) if len(token_ids) < 60 else pieces[0]
        token_ids.append(wished[0] if wished[0] in choices else chance.choice(choices))
        for token in wished[1:]:
            if token in allowed(matcher, token_ids):
                token_ids.append(token)
    parser = ReasoningParser(PlainParser(), starts_inside=True)
    parts = merged([*parser.feed(tokenizer.decode(token_ids, skip_special_tokens=False)), *parser.finish()])
    (text,) = [part.text for part in parts if isinstance(part, TextPart)]
    assert re.fullmatch("[xyz]{3}", text)


def test_a_token_that_ends_thoughts_and_begins_the_answer_is_not_allowed() -> None:
    tokenizer = byte_tokenizer("k>x", "</think>y", "<x></th")
    free = Grammars(tokenizer, VOCAB_SIZE, eos_token_ids=[END]).regex("xy", after="</think>")
    assert END + 1 in allowed(free, spelled("so </th"))
    assert END + 1 not in allowed(free, spelled("so </thin"))
    assert END + 2 not in allowed(free, [])
    assert END + 3 in allowed(free, spelled("so "))
    with pytest.raises(SamplingError, match="ends the thoughts and begins the answer"):
        free.allowed_tokens([*spelled("</thin"), END + 1])


def test_an_answer_of_few_tokens_goes_on_where_the_grammar_does() -> None:
    matcher = GRAMMARS.regex("x{1,3}")
    assert END in allowed(matcher, spelled("x"))
    matcher.least = 2
    for each in (matcher, matcher.fork()):
        assert END not in allowed(each, spelled("x"))
        assert END in allowed(each, spelled("xx"))
    matcher.least = math.inf
    assert allowed(matcher, spelled("xxx")) == [END]


def test_keywords_that_cannot_be_enforced_are_ignored_unless_strict() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    json.loads(draw(GRAMMARS.json_schema(schema, strict=False), TOKENIZER, 1))
    refused(lambda: GRAMMARS.json_schema(schema, strict=True))


def test_white_space_is_bounded() -> None:
    open_brace, blank = TOKENIZER.encode("{").ids, TOKENIZER.encode(" ").ids
    matcher = GRAMMARS.json_schema(POINT, strict=True)
    assert blank[0] in allowed(matcher, open_brace + blank * 31)
    assert blank[0] not in allowed(matcher, open_brace + blank * 32)


def test_a_complete_answer_allows_its_end_alone() -> None:
    token_ids = TOKENIZER.encode('{"x": 1, "y": "a"}').ids
    matcher = GRAMMARS.json_schema(POINT, strict=True)
    assert allowed(matcher, token_ids) == [END]
    assert allowed(matcher, [*token_ids, END]) == [END]
    assert allowed(matcher, [*token_ids, END, END]) == [END]
    assert END not in allowed(matcher, token_ids[:-1])
    assert allowed(matcher, token_ids) == [END]
    open_end = GRAMMARS.regex("a+")
    assert allowed(open_end, [*TOKENIZER.encode("aa").ids, END]) == [END]


def test_questions_go_back_and_forth_and_forks_are_independent() -> None:
    token_ids, other_ids = (TOKENIZER.encode(text).ids for text in ('{"x": 1, "y": "a"}', '{"x": -23,'))
    expected = [allowed(GRAMMARS.json_schema(POINT, strict=True), token_ids[:count]) for count in range(len(token_ids))]
    matcher = GRAMMARS.json_schema(POINT, strict=True)
    for count in (5, 0, len(token_ids) - 1, 3, 9, 9):
        assert allowed(matcher, token_ids[:count]) == expected[count]
        fork = matcher.fork()
        allowed(fork, other_ids)
        assert allowed(matcher, token_ids[:count]) == expected[count]
    fresh = GRAMMARS.json_schema(POINT, strict=True)
    assert allowed(fresh, other_ids) == allowed(matcher, other_ids)


def test_a_token_that_is_not_allowed_is_refused_and_nothing_else_is_lost() -> None:
    matcher = GRAMMARS.json_schema(POINT, strict=True)
    good, bad = TOKENIZER.encode('{"x"').ids, TOKENIZER.encode("?").ids
    with pytest.raises(SamplingError, match="as number 4 of the answer"):
        matcher.allowed_tokens(good + bad)
    assert allowed(matcher, good) == allowed(GRAMMARS.json_schema(POINT, strict=True), good)


def test_the_engines_sampler_draws_within_the_grammar() -> None:
    sampler = BatchSampler(VOCAB_SIZE)
    matchers = [
        GRAMMARS.json_schema(POINT, strict=True),
        GRAMMARS.regex("[0-9]{3}"),
        GRAMMARS.tool_call(TOOLS, "hermes"),
    ]
    rows = [
        SampledSequence(
            SamplingParams(temperature=1.0, seed=row, logits_processors=[matcher]),
            [1],
            vocab_size=VOCAB_SIZE,
            end_token_ids=[END],
        )
        for row, matcher in enumerate(matchers)
    ]
    generator = torch.Generator().manual_seed(3)
    answers: dict[int, str] = {}
    for _ in range(400):
        open_rows = [row for row in range(len(rows)) if row not in answers]
        if not open_rows:
            break
        logits = torch.randn(len(open_rows), VOCAB_SIZE, generator=generator)
        drawn = sampler.sample(logits, [Place(rows[row]) for row in open_rows])
        assert not drawn.failures
        for row, token in zip(open_rows, drawn.token_ids.tolist(), strict=True):
            if token == END:
                answers[row] = TOKENIZER.decode(rows[row].generated_ids, skip_special_tokens=False)
            else:
                rows[row].append_sampled(token)
    jsonschema_rs.validate(POINT, json.loads(answers[0]))
    assert re.fullmatch("[0-9]{3}", answers[1])
    parser = parser_for("hermes", None, tools=TOOLS, reasoning="none", id_source=str, prompt="")
    assert len(calls(parse(parser, answers[2]))) == 1


def test_compiled_grammars_are_kept_by_their_text_and_the_oldest_go() -> None:
    grammars = Grammars(TOKENIZER, VOCAB_SIZE, eos_token_ids=[END], max_cached=2)
    for pattern in ("a", "b", "a", "c"):
        grammars.regex(pattern)
    assert [re.findall("/(.)/", grammar) for grammar in grammars._compiled] == [["a"], ["c"]]


def test_threads_may_compile_and_draw_at_once() -> None:
    def answer(seed: int) -> str:
        matcher: TokenMatcher = GRAMMARS.json_schema({**POINT, "title": str(seed % 3)}, strict=True)
        return draw(matcher, TOKENIZER, seed)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, range(24)))
    assert together == [answer(seed) for seed in range(24)]


def test_a_tokenizer_of_transformers_is_read_as_its_backend_is() -> None:
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # of transformers
        tokenizer_object=TOKENIZER,
        eos_token="<eos>",  # noqa: S106 - a token of text
    )
    grammars = Grammars(wrapped, VOCAB_SIZE)
    assert draw(grammars.json_object(), TOKENIZER, 5) == draw(GRAMMARS.json_object(), TOKENIZER, 5)


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fast tokenizer, of tokenizers or transformers, got object"):
        Grammars(object(), VOCAB_SIZE)
    with pytest.raises(ConfigurationError, match="give eos_token_ids"):
        Grammars(TOKENIZER, VOCAB_SIZE)
    with pytest.raises(ConfigurationError, match="vocab size too small"):
        Grammars(TOKENIZER, 100, eos_token_ids=[END])


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pagedkv.server.grammars")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install '.[grammar]'")):
        __import__("pagedkv.server.grammars")
