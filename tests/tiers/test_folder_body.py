"""The folder: several processes at one root, a full disk, kills, foreign and hostile files."""

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import fault_of
from pagedkv.tiers.folder_body import FEWEST_DIRECT, _begin
from tests.tiers.bodies import unmount
from tests.tiers.folder_writers import (
    FINGERPRINT,
    body,
    frames_nbytes,
    hold_the_lock,
    key,
    kill_and_check,
    open_often,
    started,
    write_and_delete,
)

OTHER: Final = bytes(32)


def test_the_cap_is_of_the_root_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, other = body(root, 1000), body(root, 1000, OTHER)
    for number in range(5):
        one.write(key(number), [bytes(100)], 1.0)
        os.utime(one._path(key(number)), (number, number))
    assert one.read(key(0), 100, 1.0) is not None
    other.write(key(0), [bytes(680)], 1.0)
    assert frames_nbytes(root) <= 1000
    assert [one.read(key(number), 100, 1.0) is not None for number in range(5)] == [True, False, False, True, True]
    with pytest.raises(OSError, match="needs 1001 bytes of a cap of 1000") as full:
        one.write(key(9), [bytes(1001)], 1.0)
    assert fault_of(full.value) == "full"
    assert list((root / FINGERPRINT.hex()[:32] / "writing").iterdir()) == []


def test_a_buffer_is_used_again_only_when_no_view_of_it_is_left(tmp_path: Path) -> None:
    own = body(tmp_path / "root")
    if not own._direct:
        pytest.skip("this file system has no O_DIRECT")
    for number in range(3):
        own.write(key(number), [bytes([number + 1]) * 2**19], 1.0)
    kept = own.read(key(0), 2**19, 1.0)
    assert kept is not None
    part = np.frombuffer(kept, np.uint8)[5:9]
    del kept
    for _ in range(2):
        for number in (1, 2):
            assert bytes(own.read(key(number), 2**19, 1.0) or b"") == bytes([number + 1]) * 2**19
    assert part.tolist() == [1] * 4
    assert len(own._buffers._buffers) == 2


def test_a_damaged_or_lost_counter_is_counted_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one = body(root, 1000)
    for number in range(8):
        one.write(key(number), [bytes(100)], 1.0)
    for content in (b"", b"nonsense", b"x" * 100):
        (root / "usage").write_bytes(content)
        one.write(key(50), [bytes(300)], 1.0)
        assert frames_nbytes(root) <= 1000
    assert one.usage().nbytes == frames_nbytes(root)
    assert (root / "usage").stat().st_size == 16, "what another program wrote behind it is gone"


def test_processes_share_a_root_within_the_cap(tmp_path: Path) -> None:
    root = tmp_path / "root"
    watcher = body(root, 50_000)
    workers = [started(write_and_delete, root, seed) for seed in range(2)]
    while any(worker.is_alive() for worker, _ in workers):
        with watcher._locked(20.0):
            assert frames_nbytes(root) <= 50_000
        workers[0][0].join(0.02)
    for worker, _ in workers:
        worker.join()
    assert [worker.exitcode for worker, _ in workers] == [0, 0]
    with watcher._locked(20.0) as counter:
        counted = counter.get()
    assert counted == frames_nbytes(root), "the counter is exact while no process is killed"


def test_processes_open_one_root_at_once(tmp_path: Path) -> None:
    """What one wrote to find out about direct I/O the other deleted, and half of the opens failed."""
    openers = [started(open_often, tmp_path / "root") for _ in range(2)]
    for opener, _ in openers:
        opener.join()
    assert [opener.exitcode for opener, _ in openers] == [0, 0]


def test_a_lock_that_another_process_holds_for_ever_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.tiers.folder_body.START_LOCK_S", 0.1)
    root = tmp_path / "root"
    own = body(root, 1000)
    own.write(key(1), [bytes(100)], 5.0)
    holder, _begun = started(hold_the_lock, root)
    try:
        with pytest.raises(TimeoutError, match=r"another process has .*usage locked for 0\.05 s"):
            own.write(key(2), [bytes(100)], 0.05)
        with pytest.raises(TimeoutError):
            own.delete(key(1), 0.05)
        again = body(root, 1000)
        assert [each.key for each in again.scan()] == [key(1)]
        assert again.usage().nbytes == 100
        assert again.read(key(1), 100, 1.0) is not None
    finally:
        holder.kill()
        holder.join()
    own.write(key(2), [bytes(100)], 5.0)
    assert own.usage().nbytes == 200
    assert list((root / FINGERPRINT.hex()[:32] / "writing").iterdir()) == []


def test_a_root_that_is_emptied_is_written_to_again(tmp_path: Path) -> None:
    """Nothing was stored ever again: the folders were thought to be there."""
    root = tmp_path / "root"
    own, large = body(root, 10**7), bytes(2**19)
    own.write(key(1), [b"content"], 1.0)
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert own.read(key(1), 7, 1.0) is None
    assert own.delete(key(1), 1.0) is False
    for number, content in ((1, b"content"), (1, large), (2, large)):
        own.write(key(number), [content], 1.0)
        assert own.read(key(number), len(content), 1.0) == content
    with own._locked(1.0) as counter:
        assert counter.get() == frames_nbytes(root) == 2 * len(large)


def test_a_lock_is_of_the_file_that_is_there(tmp_path: Path) -> None:
    """Who had locked a file that was deleted meanwhile would share the root with who locked the next one."""
    own, other = body(tmp_path / "root"), body(tmp_path / "root")
    with own._locked(1.0):
        (tmp_path / "root" / "usage").unlink()
        waiting = ThreadPoolExecutor(1).submit(other.write, key(1), [b"content"], 20.0)
        waiting.result(20.0)
    with own._locked(1.0), pytest.raises(TimeoutError):
        other.delete(key(1), 0.0)


def test_files_and_links_in_place_of_folders_are_quarantined_and_not_followed(tmp_path: Path) -> None:
    """A file of that name prevented every start, and a link was followed out of the root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    own = body(root)
    own.write(key(1), [b"mine"], 1.0)
    folder, subtree = own._path(key(1)).parent, root / FINGERPRINT.hex()[:32]
    folder.rename(outside)
    folder.symlink_to(outside)
    other = next(name for name in ("00", "11") if name != folder.name)
    (subtree / other).write_bytes(b"a file")
    (root / "a file").write_bytes(b"a file")
    (root / OTHER.hex()[:32]).mkdir()
    (root / OTHER.hex()[:32] / "writing").write_bytes(b"a file")
    again = body(root)
    assert again.read(key(1), 4, 1.0) is None
    assert (list(again.scan()), again.usage().nbytes, again.num_quarantined) == ([], len("a file"), 2)
    own.write(key(1), [b"again"], 1.0)
    assert own.read(key(1), 5, 1.0) == b"again"
    assert [path.read_bytes() for path in outside.iterdir()] == [b"mine"]


def test_a_folder_in_place_of_a_frame_is_deleted_into_quarantine(tmp_path: Path) -> None:
    own = body(tmp_path / "root")
    own._path(key(1)).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        own.read(key(1), 1, 1.0)
    own.delete(key(1), 1.0)
    own.write(key(1), [b"mine"], 1.0)
    assert own.read(key(1), 4, 1.0) == b"mine"


def test_what_can_never_fit_deletes_nothing(tmp_path: Path) -> None:
    own = body(tmp_path / "root", 1000)
    for number in range(5):
        own.write(key(number), [bytes(100)], 1.0)
    with own._locked(1.0) as counter:
        descriptor = _begin(own._subtree / "writing" / "under-way", 450, counter)
    for nbytes in (1001, 600):
        with pytest.raises(OSError, match=f"needs {nbytes} bytes of a cap of 1000"):
            own.write(key(9), [bytes(nbytes)], 1.0)
    os.close(descriptor)
    assert len(list(own.scan())) == 5


def test_killed_writers_leave_whole_frames_and_nothing_that_lasts(tmp_path: Path) -> None:
    """`python -m tests.tiers.folder_writers --kills 1000` kills more."""
    rng = random.Random(0)
    for _ in range(5):
        kill_and_check(tmp_path / "root", rng)


def test_a_write_of_another_process_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    body(root)
    path = root / FINGERPRINT.hex()[:32] / "writing" / "being-written"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        body(root)
        assert path.exists()
    body(root)
    assert not path.exists()


def test_a_write_is_made_and_locked_in_one_step_for_processes_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that started could delete it between its making and its lock: starts take the root's lock as well."""
    root = tmp_path / "root"
    own = body(root)
    opened = os.open
    made: list[object] = []

    def opens_under_the_lock(path: str | Path, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags, mode)
        if flags & os.O_EXCL and "writing" in str(path):
            made.append(path)
            with (root / "usage").open("rb") as usage, pytest.raises(BlockingIOError):
                fcntl.flock(usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    monkeypatch.setattr(os, "open", opens_under_the_lock)
    own.write(key(1), [b"content"], 1.0)
    assert len(made) == 1
    assert own.read(key(1), 7, 1.0) == b"content"


def test_writes_under_way_count_against_the_cap_and_those_of_the_killed_until_the_next_start(tmp_path: Path) -> None:
    """The cap held for frames alone: each write under way came on top of it."""
    root = tmp_path / "root"
    one = body(root, 1000)
    with one._locked(20.0) as counter:
        descriptor = _begin(root / FINGERPRINT.hex()[:32] / "writing" / "under-way", 600, counter)
    assert one.usage().nbytes == 600
    other = body(root, 1000)
    with pytest.raises(OSError, match="needs 500 bytes of a cap of 1000"):
        other.write(key(1), [bytes(500)], 1.0)
    os.close(descriptor)  # as if its process was killed
    other = body(root, 1000)
    other.write(key(1), [bytes(500)], 1.0)
    assert other.usage().nbytes == 500
    with other._locked(20.0) as counter:
        assert counter.get() == 500


def test_foreign_files_links_and_folders_are_quarantined_and_links_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.write_bytes(b"secret")
    own = body(root)
    own.write(key(1), [b"mine"], 1.0)
    folder = own._path(key(1)).parent
    (folder / "notes.txt").write_bytes(b"foreign")
    (folder / f"{key(2).hex()}.frame").write_bytes(b"in the folder of other digits") if key(2)[0] != key(1)[0] else None
    (folder / f"{folder.name}{'0' * 62}.frame").symlink_to(outside)
    (folder / f"{folder.name}{'1' * 62}.frame").mkdir()
    assert [each.key for each in own.scan()] == [key(1)]
    assert own.num_quarantined == 4
    assert {path.name for path in folder.iterdir()} == {f"{key(1).hex()}.frame"}
    assert outside.read_bytes() == b"secret"
    assert [each.key for each in own.scan()] == [key(1)]


def test_a_link_in_place_of_a_frame_is_not_read(tmp_path: Path) -> None:
    own = body(tmp_path / "root")
    own.write(key(1), [b"mine"], 1.0)
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    own._path(key(1)).unlink()
    own._path(key(1)).symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links") as problem:
        own.read(key(1), 4, 1.0)
    assert problem.value.errno == errno.ELOOP
    own.write(key(1), [b"again"], 1.0)
    assert (own.read(key(1), 5, 1.0), outside.read_bytes()) == (b"again", b"secret")


def test_roots_that_are_not_safe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "inner").mkdir(mode=0o700)
    (tmp_path / "inner" / FINGERPRINT.hex()[:32]).symlink_to(tmp_path / "folder")
    with pytest.raises(ConfigurationError, match=r"without '\.\.'"):
        body(tmp_path / "folder" / ".." / "elsewhere")
    with pytest.raises(ConfigurationError, match="must not be a symbolic link"):
        body(tmp_path / "link")
    with pytest.raises(ConfigurationError, match="writable by no other"):
        body(tmp_path / "open")
    with pytest.raises(ConfigurationError, match="must be a folder, and no symbolic link"):
        body(tmp_path / "inner")
    with pytest.raises((ConfigurationError, FileExistsError)):
        body(tmp_path / "file")


@pytest.mark.parametrize("size", [100, FEWEST_DIRECT])
def test_reading_what_is_no_file_leaves_nothing_open(tmp_path: Path, size: int) -> None:
    own = body(tmp_path / "root")
    own.write(key(0), [bytes(size)], 1.0)
    (frame,) = tmp_path.rglob("*.frame")
    frame.unlink()
    frame.mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match=r"directory|Invalid argument"):  # the latter: O_DIRECT of a folder
            own.read(key(0), size, 1.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_full_disk_is_an_answer_and_leaves_nothing(tmp_path: Path) -> None:
    """A small file system where one can be mounted; else files are limited to 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(disk)],  # noqa: S607
        check=False,
        capture_output=True,
    )
    is_mounted = mounted.returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        own = body(disk / "root")
        own.write(key(0), [bytes(50_000)], 1.0)
        if not is_mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
        with pytest.raises(OSError, match=r"large|space") as full:
            own.write(key(1), [os.urandom(3 * 2**20)], 1.0)
        assert fault_of(full.value) == "full"
        assert [each.key for each in own.scan()] == [key(0)]
        assert own.usage().nbytes == 50_000
        own.write(key(2), [b"small"], 1.0)
        assert own.read(key(2), 5, 1.0) == b"small"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        if is_mounted:
            unmount(disk)
