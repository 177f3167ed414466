"""An output file is there whole or not at all, however the writing ends."""

import os
from pathlib import Path

import pytest

from pagedkv.cli.output_files import STANDARD_OUTPUT, atomic_file, is_replaced_whole, require_writable
from pagedkv.errors import OutputError


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_whatever_ends_the_writing_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    with pytest.raises(error), atomic_file(target) as file:  # noqa: PT012 - the error comes amid the writing
        file.write(b"new")
        raise error
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_target_changes_at_the_end_only(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_file(target) as file:
        file.write(b"new")
        file.flush()
        assert not target.exists()
    assert target.read_bytes() == b"new"


def test_a_folder_that_is_gone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="out: cannot be written: No such file"), atomic_file(tmp_path / "a" / "out"):
        pass
    with pytest.raises(OutputError, match="there is no folder"):
        require_writable(tmp_path / "a" / "out")


def test_only_ordinary_files_are_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    os.mkfifo(tmp_path / "pipe")
    whole = [tmp_path / "old", tmp_path / "new"]
    others = [tmp_path / "pipe", tmp_path, Path(os.devnull), STANDARD_OUTPUT]
    assert [is_replaced_whole(path) for path in whole + others] == [True, True, False, False, False, False]
