"""vLLM's own tests of its tier "fs", with ours in its place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from pagedkv.plugins.vllm import PagedKVTier
from tests.peers.borrowed_server_tests import borrowed, leave_out, their_tests

THEIRS: Final = borrowed("v1/kv_offload/tiering/test_fs_tier.py")

OWN_PARTS: Final = "is about a function of vLLM's tier that ours does not call"
LEFT_OUT: Final = {
    "test_invalid_path_raises_at_construction": "ours raises a ConfigurationError, which names the folder",
    "test_shutdown_discards_pending_tasks": "looks at the threads of vLLM's tier",
    "test_store_load_roundtrip_without_o_direct": OWN_PARTS,
    "test_mixed_job_results_emit_event_only_for_successful_job": OWN_PARTS,
    "test_partially_failed_store_emits_no_event": OWN_PARTS,
}
"""Cases that fail here, and why."""
NOT_RUN: Final = {
    "test_wait_idle_blocks_until_tasks_complete": "has no tier",
    "test_batch_lookup_c_extension": "has no tier",
    "test_failed_load_after_abort_does_not_break_newer_probe": "asks while a file is gone and its load is under way: "
    "theirs looks at the folder, ours may still list it, and the load is the miss",
}
"""Tests that say nothing of our tier, and why."""


class InPlaceOfTheirs(PagedKVTier):
    """Our tier, built and looked at as their tests do with theirs."""

    def __init__(self, *, root_dir: str, n_read_threads: int = 0, n_write_threads: int = 0, **options: Any) -> None:  # noqa: ANN401 - vLLM's
        del n_read_threads, n_write_threads
        super().__init__(root=root_dir, cap="1GiB", weights="ab" * 16, forget_on_reset=False, **options)
        self._store_job_keys: dict[int, object] = {}

    @property
    def events(self) -> dict[bytes, OffloadKey] | None:
        """None where no events are told."""
        return self._names

    @property
    def file_mapper(self) -> SimpleNamespace:
        """Where files are."""
        body: Any = self._store.body
        return SimpleNamespace(base_path=str(body._subtree), get_file_name=lambda key: str(body._path(self._key(key))))

    def drain_jobs(self) -> None:
        """Wait for deletes too, and for their events: they look whether files are gone."""
        super().drain_jobs()
        assert self._store.wait_until_quiet(timeout_s=60)
        if self._names is not None:
            self._look()


globals().update({name: test for name, test in their_tests(THEIRS).items() if name not in NOT_RUN})
fs_tier = THEIRS.fs_tier
fs_tier_with_events = THEIRS.fs_tier_with_events


@pytest.fixture(autouse=True)
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_out(request, LEFT_OUT)
    monkeypatch.setattr(THEIRS, "FileSystemTierManager", InPlaceOfTheirs)
    monkeypatch.setitem(SecondaryTierFactory._registry, "fs", lambda: InPlaceOfTheirs)
    tmp_path.chmod(0o700)


def test_what_is_left_out_is_theirs() -> None:
    assert LEFT_OUT.keys() | NOT_RUN.keys() <= their_tests(THEIRS).keys()
