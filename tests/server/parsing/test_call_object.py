"""The scanner accepts what Python's JSON parser accepts, and the beginnings of it."""

import json

from hypothesis import given, strategies as st

from pagedkv.server.parsing.call_parser import JsonScanner, as_json_character

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=4) | st.lists(values, max_size=4)
pieces = st.sampled_from(
    [
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        " ",
        "\n",
        "0",
        "1",
        "-",
        ".",
        "e",
        "E",
        "+",
        "true",
        "null",
        "fals",
        "\\",
        "u00e9",
        "a",
    ]
)


def scan(text: str) -> tuple[int, bool]:
    """Push a text: how many characters are accepted, and whether it is complete then."""
    scanner = JsonScanner()
    for place, char in enumerate(text):
        if not scanner.push(char):
            return place, scanner.is_done
    return len(text), scanner.is_done


@given(value=objects, indent=st.sampled_from([None, 1]), is_ascii=st.booleans())
def test_every_json_object_and_array_is_accepted_and_complete_at_its_end(
    value: object, indent: int | None, *, is_ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert scan(text) == (len(text), True)
    assert not scan(text[:-1])[1]


@given(text=st.lists(pieces, max_size=12).map(lambda found: "[" + "".join(found)))
def test_a_text_is_complete_where_python_parses_it(text: str) -> None:
    taken, is_done = scan(text)
    try:
        json.loads(text, strict=False)
    except ValueError:
        assert not (is_done and taken == len(text))
    else:
        assert is_done
        assert text[taken:].strip() == ""


@given(text=st.lists(pieces, max_size=12).map(lambda found: "[" + "".join(found)))
def test_a_refused_character_changes_nothing(text: str) -> None:
    scanner, clean = JsonScanner(), JsonScanner()
    for char in text:
        if scanner.push(char):
            assert clean.push(char)
        assert (scanner.depth, scanner.is_done, scanner.in_string) == (clean.depth, clean.is_done, clean.in_string)


@given(value=objects)
def test_runs_of_plain_characters_lead_where_single_ones_do(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    scanner = JsonScanner()
    place = 0
    while place < len(text):
        end = scanner.plain_end(text, place)
        if end == place:
            assert scanner.push(text[place])
            end += 1
        else:
            assert scanner.in_string
        place = end
    assert scanner.is_done


def test_a_control_character_of_a_string_is_written_as_an_escape() -> None:
    assert json.loads(f'"{as_json_character(chr(10))}{as_json_character("é")}"') == "\né"
