"""A body in a folder: a file a frame, published by rename, of one or several processes that share the root.

::

    ROOT/usage                             bytes of all frames below ROOT and all writes, guarded by flock
    ROOT/FINGERPRINT/KK/KEY.frame          a frame; KK are the first two digits of KEY
    ROOT/FINGERPRINT/writing/KEY.PID.X.N   a write under way, locked by its writer until it is renamed
    ROOT/FINGERPRINT/quarantine/           foreign files, moved out of the way

- *Atomic.* A frame is written beside its place and renamed. A crash leaves the old state, or a file in ``writing``,
  which the next start removes if no process has it locked. Nothing is synchronised to the disk: a frame that a power
  failure tears is refused by its check.
- *Shared.* ``usage`` holds the bytes of all frames below the root, those being written included. It is raised before a
  write begins and lowered after a deletion, under an exclusive flock, so it never counts too little. At the cap, a
  writer first counts anew, then deletes the least recently used frames of any subtree. So frames and writes of all
  processes are within the cap. Other processes find such files vanished, which is a miss.
- *Locked by others for long*, as by a stopped process: calls fail in time, and a start goes on without the lock.
- *Emptied* below the store: folders are made anew by the next write.
- *Other identities* are other subtrees. They share the cap and are never read.
- *Refused:* a root or subtree that is a symbolic link, ``..`` in the root's path, and a root that other users may
  write. Names below the root are made of keys, so they cannot leave it. A link or a file in place of a folder of keys
  is moved into quarantine, and is not followed.

Large files are written and read past the page cache, through aligned buffers, where the file system can.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import HostMemory, Stored, Usage, key_of_name, name_of_key
from pagedkv.tiers.frame import Buffer

SUFFIX: Final = ".frame"
WRITING: Final = "writing"
QUARANTINE: Final = "quarantine"
COUNTER: Final = struct.Struct("<8sQ")
COUNTER_MAGIC: Final = b"pkvusage"
SLACK: Final = 64
"""An eviction leaves a 64th of the cap free."""
FEWEST_DIRECT: Final = 2**18
"""Smaller files are read through the page cache: an aligned buffer and a second open cost more than the copy."""
WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
START_LOCK_S: Final = 1.0
"""Longest wait for the lock of what can be done without it, if less well."""
SHORTEST_POLL_S: Final = 0.0002
LONGEST_POLL_S: Final = 0.001  # with 0.01 two busy processes kept a third one from the lock for a second


class FolderBody:
    """Frames below one folder.

    Args:
        root: the folder; made if it is not there, for its owner alone.
        fingerprint: of the identity (:class:`~pagedkv.tiers.Identity`); names the subtree.
        cap_nbytes: most bytes of all frames below the root, those of other subtrees included.
        direct: read and write past the page cache where the file system can.
        memory: where large frames are read to, while it has room; None: buffers of the body's own.

    Raises:
        ConfigurationError: the root is refused; the message has the reason.
        OSError: it cannot be made or opened.
    """

    medium = "folder"
    is_trusted = False
    is_immediate = False

    def __init__(
        self,
        root: str | Path,
        fingerprint: bytes,
        cap_nbytes: int,
        *,
        direct: bool = True,
        memory: HostMemory | None = None,
    ) -> None:
        self.root = _checked_root(Path(root))
        self._cap_nbytes = cap_nbytes
        self._subtree = self.root / fingerprint.hex()[:32]
        self._make_folders()
        self._direct = direct and can_be_direct(self._subtree / WRITING)
        self._writer = f"{os.getpid()}.{token_hex(4)}"
        self._serial = count()
        self._lock = Lock()
        self._buffers = AlignedBuffers()
        self._memory = memory
        self.num_quarantined = 0
        self.num_evicted = 0
        with contextlib.suppress(TimeoutError):  # another process removes it, or the next start
            self._remove_left_over()

    def scan(self) -> Iterator[Stored]:
        """List the frames of the subtree by their modification times; quarantine all other files. O(files)."""
        for first in range(256):
            for found in _listed(self._checked_folder(f"{first:02x}")):
                key = key_of_name(found.name.removesuffix(SUFFIX)) if found.name.endswith(SUFFIX) else None
                try:
                    status = found.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if key is None or key[0] != first or not stat.S_ISREG(status.st_mode):
                    self._quarantine(Path(found.path))
                else:
                    yield Stored(key, status.st_size, status.st_mtime)

    def read(self, key: bytes, nbytes: int, timeout_s: float) -> Buffer | None:
        """Read a frame and renew its modification time; None if its file is gone or gets shorter meanwhile."""
        del timeout_s
        path = self._path(key)
        try:
            self._checked_folder(path.parent.name)
            if self._direct and nbytes >= FEWEST_DIRECT:
                return read_direct(path, self._take)
            file = open(path, "rb", buffering=0, opener=_open_no_link)  # noqa: SIM115 - entered below
        except FileNotFoundError:
            return None
        with file:
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
            frame = bytearray(os.fstat(file.fileno()).st_size)
            view, at = memoryview(frame), 0
            while at < len(frame) and (num_read := file.readinto(view[at:])):
                at += num_read
        return view[:at]

    def write(self, key: bytes, pieces: Sequence[Buffer], timeout_s: float) -> None:
        """Make room and create a temporary file under the lock, write it, and rename it under the lock.

        Raises:
            OSError: ENOSPC if the cap leaves no room; whatever the file system raises. Nothing is left behind.
            TimeoutError: the lock was not free in time.
        """
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        temporary = self._subtree / WRITING / f"{name_of_key(key)}.{self._writer}.{next(self._serial)}"
        with self._locked(timeout_s) as counter:
            self._make_room(counter, nbytes)
            try:
                descriptor = _begin(temporary, nbytes, counter)
            except FileNotFoundError:  # the root was emptied
                self._make_folders()
                descriptor = _begin(temporary, nbytes, counter)
        try:
            if self._direct and nbytes >= FEWEST_DIRECT:
                write_direct(descriptor, pieces, nbytes, self._buffers.take(nbytes))
            else:
                write_all(descriptor, pieces)
            with self._locked(timeout_s) as counter:
                self._checked_folder(key.hex()[:2])
                replaced = _size_of(self._path(key))
                self._publish(temporary, key)
                counter.add(-replaced)
        except BaseException:
            try:
                with self._locked(timeout_s) as counter:
                    _end(temporary, nbytes, counter)
            except TimeoutError:  # its bytes count until the next one counts anew
                temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def delete(self, key: bytes, timeout_s: float) -> bool:
        """Delete a frame under the lock. What is no file is moved into quarantine."""
        with self._locked(timeout_s) as counter:
            self._checked_folder(key.hex()[:2])
            return self._unlink(counter, self._path(key)) is not None

    def usage(self) -> Usage:
        """Count all files below the root, and ask the file system for its free bytes. O(files)."""
        try:
            with self._locked(START_LOCK_S) as counter:
                ours = self._count()
                counter.set(ours)
        except TimeoutError:
            ours = self._count()  # while others write and delete
        free = os.statvfs(self.root)
        return Usage(ours + self._nbytes_of(QUARANTINE), free.f_bavail * free.f_frsize)

    def close(self) -> None:
        """Nothing is kept open between calls."""

    def _take(self, nbytes: int) -> memoryview:
        """Take a buffer of whole sectors."""
        view = None if self._memory is None else self._memory.take(whole_sectors(nbytes))
        return self._buffers.take(nbytes) if view is None else view

    def _path(self, key: bytes) -> Path:
        name = name_of_key(key)
        return self._subtree / name[:2] / f"{name}{SUFFIX}"

    def _make_folders(self) -> None:
        """Make the folders of the subtree, if they are not there."""
        for folder in (self._subtree, self._subtree / WRITING, self._subtree / QUARANTINE):
            _make_folder(folder)

    def _publish(self, temporary: Path, key: bytes) -> None:
        """Rename a written file to its place, in a folder of keys that is made for its first one."""
        try:
            temporary.rename(self._path(key))
        except FileNotFoundError:
            _make_folder(self._path(key).parent)
            temporary.rename(self._path(key))

    def _checked_folder(self, name: str) -> Path:
        """Return a folder of keys, which may not be there; a file or a link in its place is moved into quarantine."""
        folder = self._subtree / name
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.lstat().st_mode):
                self._quarantine(folder)
        return folder

    @contextlib.contextmanager
    def _locked(self, timeout_s: float) -> "Iterator[_Counter]":
        """Hold the root's lock, which excludes all processes and threads that share the root.

        Raises TimeoutError: another one has it for so long.
        """
        until = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError(f"the lock of {self.root} was not free within {timeout_s:g} s")
        try:
            descriptor = self._open_locked(until, timeout_s)
            try:
                yield _Counter(descriptor)
            finally:
                os.close(descriptor)
        finally:
            self._lock.release()

    def _open_locked(self, until: float, timeout_s: float) -> int:
        """Open and lock ``usage``; opened anew if it was deleted meanwhile, since others would lock another file."""
        path, poll_s = self.root / "usage", SHORTEST_POLL_S
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(descriptor, path):
                    return descriptor
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() >= until:
                raise TimeoutError(f"another process has {path} locked for {timeout_s:g} s")
            time.sleep(poll_s)
            poll_s = min(LONGEST_POLL_S, 2 * poll_s)

    def _count(self) -> int:
        """Count the bytes of all frames and of all writes under way. O(files)."""
        return sum(status.st_size for _, status in self._frames()) + self._nbytes_of(WRITING)

    def _make_room(self, counter: "_Counter", nbytes: int) -> None:
        """Delete the least recently used frames of the root until so many bytes fit. The lock is held.

        Counting all files takes long, so a little more is deleted than needed, and the next writes need no count.
        Where all of them would not make enough room, none is deleted.
        """
        used = counter.get()
        if used is not None and used + nbytes <= self._cap_nbytes:
            return
        frames = sorted(self._frames(), key=lambda each: each[1].st_mtime_ns)
        being_written = self._nbytes_of(WRITING)
        used = sum(status.st_size for _, status in frames) + being_written
        counter.set(used)
        target = max(0, self._cap_nbytes - self._cap_nbytes // SLACK - nbytes)
        is_over = used + nbytes > self._cap_nbytes and being_written + nbytes <= self._cap_nbytes
        for path, _ in frames if is_over else ():
            if used <= target:
                break
            freed = self._unlink(counter, path)
            used -= freed or 0
            self.num_evicted += 1
        if used + nbytes > self._cap_nbytes:
            raise OSError(errno.ENOSPC, f"a frame needs {nbytes} bytes of a cap of {self._cap_nbytes}", str(self.root))

    def _nbytes_of(self, name: str) -> int:
        """Bytes of all files in the folders of this name of all subtrees."""
        return sum(
            _size_of(Path(found.path))
            for subtree in _listed(self.root)
            if subtree.is_dir(follow_symlinks=False)
            for found in _listed(Path(subtree.path) / name)
        )

    def _frames(self) -> Iterator[tuple[Path, os.stat_result]]:
        """All frames below the root, of all subtrees."""
        for subtree in _listed(self.root):
            if not subtree.is_dir(follow_symlinks=False):
                continue
            for folder in _listed(Path(subtree.path)):
                if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):  # noqa: PLR2004 - two digits
                    continue
                for found in _listed(Path(folder.path)):
                    with contextlib.suppress(FileNotFoundError):
                        status = found.stat(follow_symlinks=False)
                        if found.name.endswith(SUFFIX) and stat.S_ISREG(status.st_mode):
                            yield Path(found.path), status

    def _unlink(self, counter: "_Counter", path: Path) -> int | None:
        """Delete a file and lower the counter; return its bytes, None if it is gone already. The lock is held."""
        try:
            nbytes = _size_of(path)
            path.unlink()
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            self._quarantine(path)
            return None
        counter.add(-nbytes)
        return nbytes

    def _quarantine(self, path: Path) -> None:
        """Move a foreign file, folder or link out of the way. Links are moved, not followed."""
        self.num_quarantined += 1
        with contextlib.suppress(OSError):
            path.rename(self._subtree / QUARANTINE / f"{path.name[:100]}.{self._writer}.{next(self._serial)}")

    def _remove_left_over(self) -> None:
        """Delete writes of processes that ended: files in ``writing`` that no process has locked."""
        with self._locked(START_LOCK_S) as counter:
            for found in _listed(self._subtree / WRITING):
                try:
                    descriptor = os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError as problem:
                    if problem.errno == errno.ELOOP:
                        self._quarantine(Path(found.path))
                    continue
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    with contextlib.suppress(OSError):
                        self._unlink(counter, Path(found.path))
                except BlockingIOError:
                    pass
                finally:
                    os.close(descriptor)


class _Counter:
    """The bytes of all frames, in the locked file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def get(self) -> int | None:
        """Return the bytes; None if the file is new or damaged."""
        content = os.pread(self._descriptor, COUNTER.size, 0)
        if len(content) != COUNTER.size:
            return None
        magic, nbytes = COUNTER.unpack(content)
        return int(nbytes) if magic == COUNTER_MAGIC else None

    def set(self, nbytes: int) -> None:
        """Write the bytes, and nothing behind them."""
        os.ftruncate(self._descriptor, COUNTER.size)
        os.pwrite(self._descriptor, COUNTER.pack(COUNTER_MAGIC, max(0, nbytes)), 0)

    def add(self, nbytes: int) -> None:
        """Add to the bytes; a damaged counter stays damaged, so that the next writer counts anew."""
        used = self.get()
        if used is not None:
            self.set(used + nbytes)


def _checked_root(root: Path) -> Path:
    """Make the root if it is not there, and refuse one that is not safe."""
    if ".." in root.parts:
        raise ConfigurationError(f"the folder of a tier must be named without '..', got {str(root)!r}")
    root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
    if root.is_symlink():
        raise ConfigurationError(f"the folder of a tier must not be a symbolic link: {root}")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"the folder of a tier is no folder: {root}")
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigurationError(
            f"the folder of a tier must belong to this user and be writable by no other: {root} has mode "
            f"{stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}. chmod 700 it, or name another"
        )
    return root


def _make_folder(folder: Path) -> None:
    """Make a folder, and refuse a link or a file in its place."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigurationError(f"{folder} must be a folder, and no symbolic link")


def _open_no_link(path: str, flags: int) -> int:
    """Open a file; ``open`` closes what turns out to be a folder."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _listed(folder: Path) -> list["os.DirEntry[str]"]:
    """List a folder; nothing if it is gone, or is no folder. A link is not followed."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return []
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size_of(path: Path) -> int:
    """Return the bytes of a file; 0 of what is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether a path still names an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _begin(path: Path, nbytes: int, counter: _Counter) -> int:
    """Create and lock a file of ``nbytes``, which count from now on. The root's lock is held.

    The file has its length at once, so that a process that counts anew counts all of it.
    """
    counter.add(nbytes)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        counter.add(-nbytes)
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        _end(path, nbytes, counter)
        raise
    return descriptor


def _end(path: Path, nbytes: int, counter: _Counter) -> None:
    """Delete a file whose write failed, and subtract its bytes. The root's lock is held."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        counter.add(-nbytes)


SECTOR: Final = 4096
MOST_BUFFERS: Final = 32
NUM_REFERENCES_OF_A_FREE_BUFFER: Final = 2  # the list's, and the argument of the question itself


def write_all(descriptor: int, pieces: Sequence[Buffer]) -> None:
    """Write all pieces, up to 64 of them a call."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    while views:
        num_written = os.writev(descriptor, views[:64])
        while views and num_written >= views[0].nbytes:
            num_written -= views.pop(0).nbytes
        if num_written:
            views[0] = views[0][num_written:]


def can_be_direct(folder: Path) -> bool:
    """Whether the file system of a folder has direct I/O. Writes a small file there, which other processes may delete.

    Its name is used once: a process in another container may have this one's number.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    probe = folder / f"direct.{os.getpid()}.{token_hex(4)}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        probe.unlink(missing_ok=True)
        with mmap.mmap(-1, SECTOR) as page:
            return os.write(descriptor, page) == SECTOR
    except OSError:
        return False
    finally:
        os.close(descriptor)


def whole_sectors(nbytes: int) -> int:
    """Round a number of bytes up to whole sectors, at least one."""
    return max(SECTOR, -(-nbytes // SECTOR) * SECTOR)


class AlignedBuffers:
    """Buffers of whole sectors, which are used again when no view of them is left.

    A new buffer of 2 MiB costs 512 page faults, which take longer than a read of 2 MiB from a fast disk. A view refers
    to its buffer, so a buffer that only this list refers to is free.
    """

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap] = []
        self._lock = Lock()

    def take(self, nbytes: int) -> memoryview:
        """Return a view of whole sectors, at least ``nbytes``; its buffer stays in use while any view of it exists."""
        padded = whole_sectors(nbytes)
        with self._lock:
            for place in range(len(self._buffers)):
                is_free = sys.getrefcount(self._buffers[place]) == NUM_REFERENCES_OF_A_FREE_BUFFER
                if is_free and len(self._buffers[place]) == padded:
                    self._buffers.append(self._buffers.pop(place))
                    return memoryview(self._buffers[-1])
            buffer = mmap.mmap(-1, padded)
            self._buffers.append(buffer)
            del self._buffers[:-MOST_BUFFERS]
            return memoryview(buffer)


def write_direct(descriptor: int, pieces: Sequence[Buffer], nbytes: int, aligned: memoryview) -> None:
    """Write pieces by direct I/O, through an aligned buffer of whole sectors; then cut the file to ``nbytes``."""
    end = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        aligned[end : end + view.nbytes] = view
        end += view.nbytes
    aligned[end:] = bytes(aligned.nbytes - end)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    at = 0
    while at < aligned.nbytes:
        at += os.write(descriptor, aligned[at:])
        at -= at % SECTOR if at < aligned.nbytes else 0
    os.ftruncate(descriptor, nbytes)


def read_direct(path: Path, take: Callable[[int], memoryview]) -> Buffer:
    """Read a file by direct I/O into an aligned buffer from ``take``, and renew its modification time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT)
    try:
        with contextlib.suppress(OSError):
            os.utime(descriptor)
        nbytes = os.fstat(descriptor).st_size
        view, at = take(nbytes), 0
        while at < nbytes and (num_read := os.preadv(descriptor, [view[at:]], at)):
            at += num_read
        return view[: min(at, nbytes)]
    finally:
        os.close(descriptor)
