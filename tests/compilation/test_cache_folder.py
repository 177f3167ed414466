"""Folders of machine code: whole entries or none, bounded, and never another user's."""

import os
import sys
from pathlib import Path

import pytest

from pagedkv.compilation.loop_cache import CacheFolder

NOT_ROOT = sys.platform == "win32" or os.getuid() != 0


def test_an_entry_is_read_as_it_was_last_written(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new" / "folder")
    assert folder.read("loop") is None
    folder.write("loop", b"old")
    folder.write("loop", b"")
    assert folder.read("loop") == b""
    assert folder.read("another") is None


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_damaged_entry_is_none(tmp_path: Path, damage: bytes) -> None:
    folder = CacheFolder(tmp_path)
    folder.write("loop", b"machine code" * 10)
    [file] = tmp_path.iterdir()
    file.write_bytes(damage)
    assert folder.read("loop") is None


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    folder.write("loop", b"machine code")
    [file] = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert folder.read("loop") is None


def test_removing_by_prefix_leaves_the_others(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    for name in ("pop-1", "pop-2", "popleft-1"):
        folder.write(name, b"code")
    folder.remove("pop-")
    assert [folder.read(name) for name in ("pop-1", "pop-2", "popleft-1")] == [None, None, b"code"]


def test_room_is_made_by_what_was_not_used_for_longest(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    for age, name in enumerate(("new", "read lately", "old", "oldest")):
        folder.write(name, bytes(68))
        last_read = 1000 if name == "read lately" else -age
        os.utime(tmp_path / f"{name}.nbc", (1_000_000_000 + last_read, 1_000_000_000 - age))
    entries = {file.stem for file in tmp_path.iterdir()}
    for max_nbytes, kept in ((400, entries), (399, entries - {"oldest"}), (200, {"new", "read lately"}), (0, set())):
        folder.make_room(max_nbytes)
        assert {file.stem for file in tmp_path.iterdir()} == kept


@pytest.mark.skipif(sys.platform == "win32", reason="temporary folders are the user's own there")
def test_a_private_folder_that_others_may_write_is_neither_read_nor_written(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "private", is_private=True)
    folder.write("loop", b"code")
    assert folder.read("loop") == b"code"
    folder.path.chmod(0o770)
    assert folder.read("loop") is None
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .*private: it is open to other users"):
        folder.write("loop", b"other code")
    folder.path.chmod(0o700)
    assert folder.read("loop") == b"code"


@pytest.mark.skipif(sys.platform == "win32", reason="temporary folders are the user's own there")
def test_a_private_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="open to other users"):
        CacheFolder(tmp_path / "link", is_private=True).make()


@pytest.mark.skipif(NOT_ROOT, reason="only root can give a folder away")
def test_another_users_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    os.chown(tmp_path / "private", 12345, 12345)
    with pytest.raises(PermissionError, match="open to other users"):
        CacheFolder(tmp_path / "private", is_private=True).make()
