"""A JSON file is there whole or not at all."""

import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagedkv.cli.output_files import write_json
from pagedkv.errors import OutputError


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the system refuse to write files beyond ``nbytes``, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    write_json(target, {"b": 1, "a": [0.5, None]})
    assert target.read_text() == '{\n  "b": 1,\n  "a": [\n    0.5,\n    null\n  ]\n}\n'
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    with largest_file(1000), pytest.raises(OutputError, match=r"result.json: cannot be written: File too large"):
        write_json(target, {"text": "x" * 10_000})
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_goes_on_pointing_to_the_written_file(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "result.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 1}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join()
    assert json.loads(received[0]) == {"a": 1}
    assert pipe.is_fifo()
