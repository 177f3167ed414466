"""Reading a JSON object: everything that can be wrong with the file."""

from pathlib import Path

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.models.config import MAX_NBYTES, read_json_object

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a JSON file"),
    "cut short": (b'{"hidden_size": 40', "not a JSON file"),
    "not JSON": (b"hidden_size = 4096", "not a JSON file"),
    "not text": (b"\x89PNG\r\n\x1a\n\x00", "not a JSON file"),
    "not UTF-8": (b'{"name": "\xff"}', "not a JSON file"),
    "a list": (b"[1, 2]", "holds a JSON list, where an object"),
    "a number": (b"7", "holds a JSON int, where an object"),
    "nested without end": (b"[" * 200_000, "not a JSON file"),
    "a number of 5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "not a JSON file"),
    "huge": (b'{"a": "' + b"x" * MAX_NBYTES + b'"}', "has more than 8,388,608 bytes"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_absent_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"No such file or directory\. Name a readable file"):
        read_json_object(tmp_path / "config.json")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        read_json_object(tmp_path)


def test_an_object_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in (b'{"a": 1}', b'\xef\xbb\xbf{"a": 1}'):
        path.write_bytes(text)
        assert read_json_object(path) == {"a": 1}
