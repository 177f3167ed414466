"""Another commit's files: there while they are measured, gone afterwards."""

import pytest

from benchmarks.repository import UnknownCommitError, commit_id, extracted, state


@pytest.mark.skipif(state() == "unknown", reason="needs the repository's history")
def test_an_interrupt_removes_the_other_commits_files() -> None:
    commit = commit_id("HEAD")
    folders = []

    def measure() -> None:
        with extracted(commit) as folder:
            folders.append(folder)
            assert (folder / "src" / "pagedkv" / "__init__.py").is_file()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    (folder,) = folders
    assert not folder.parent.exists()


def test_an_unknown_commit_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnknownCommitError, match=r"no commit 'no-such-branch' .* measure without --against"):
        commit_id("no-such-branch")
