"""This repository: its root, its commits, and another commit's package in a temporary folder."""

import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

__all__ = ["ROOT", "UnknownCommitError", "commit_id", "extracted", "state"]

ROOT: Final = Path(__file__).parent.parent


class UnknownCommitError(ValueError):
    """A commit that this repository does not have."""


def state() -> str:
    """Name the commit that is checked out, and whether files were changed since; "unknown" outside a repository."""
    try:
        words = [_git("rev-parse", "--short", "HEAD"), b"modified" if _git("status", "--porcelain") else b""]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return " ".join(word.decode() for word in words if word)


def commit_id(name: str) -> str:
    """Find the full id of a commit named by a branch, a tag or the beginning of its id.

    Raises:
        UnknownCommitError: no such commit, or no repository.
    """
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").decode()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnknownCommitError(
            f"no commit {name!r} in {ROOT}: fetch it, name another, or measure without --against"
        ) from error


@contextmanager
def extracted(commit: str) -> Iterator[Path]:
    """Lay a commit's files out in a temporary folder, which is removed on the way out, after Ctrl-C as well.

    From an archive rather than a second worktree: nothing is noted in the repository that a killed run would leave.
    """
    with TemporaryDirectory(prefix="pagedkv-benchmarks-") as name:
        folder = Path(name) / "tree"
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit))) as archive:
            archive.extractall(folder, filter="data")
        yield folder


def _git(*arguments: str) -> bytes:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return done.stdout.strip(b"\n") if arguments[0] != "archive" else done.stdout
