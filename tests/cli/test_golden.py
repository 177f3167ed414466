"""Golden results of a tiny trace: every figure of ``--json``, as it was checked when it was written down.

Where a change of the rules changes a figure on purpose, write the files anew and read what the diff says:
``python -m tests.cli.test_golden``.
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.blocks.eviction.registry import POLICIES
from tests.cli.command import run
from tests.compiling import TESTED_POLICIES

FOLDER: Final = Path(__file__).with_name("golden")
TRACE: Final = FOLDER / "trace.jsonl"
POOL: Final = (
    "--load",
    "100",
    "--block-size",
    "4",
    "--num-blocks",
    "12",
    "--max-sequences",
    "6",
    "--max-batched-tokens",
    "16",
    "--cost-model",
    "per-token",
)
TURNS: Final = FOLDER / "turns.jsonl"
"""Prompts of whole blocks of 512 tokens, 128 MiB each, that return."""
TIERS: Final = (
    "--block-size",
    "512",
    "--num-blocks",
    "8",
    "--cost-model",
    "per-token",
    "--host-memory",
    "1.25GiB",
    "--host-bandwidth",
    "10GB",
    "--disk",
    "2GiB",
    "--disk-bandwidth",
    "500MB",
    "--disk-latency",
    "0.01",
)
COMMANDS: Final = {
    "replay-recompute": ("replay", TRACE, *POOL, "--eviction", "lru"),
    "replay-swap": ("replay", TRACE, *POOL, "--eviction", "lru", "--preemption", "swap", "--host-blocks", "20"),
    "replay-beams": ("replay", TRACE, *POOL, "--eviction", "adaptive", "--beams", "2"),
    "replay-tiers": ("replay", TURNS, *TIERS),
    "curve": ("curve", TRACE, "--capacities", "2,5,9,200"),
}

NEEDED: Final = {"replay-beams": {"adaptive"}, "curve": {*POLICIES}}
"""Policies of a command, if not the default alone."""

ADDED: Final = frozenset({"misses", "warnings", "gains", "need", "read_as", "seconds"})
"""Sections that replays have had since the golden files were written; golden in a file of their own."""

PINNED: Final = ("lru", "adaptive", "optimal")
"""Policies whose curves are golden. A further one changes no figure of these, and has tests of its own."""


def result_of(name: str) -> dict[str, Any]:
    """Run a command; what depends on where it runs is left out."""
    result = run(*COMMANDS[name], "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    document: dict[str, Any] = json.loads(result.stdout)
    gains = [gain["by_policy"] for gain in document.get("gains", [])]
    for by_policy in (document.get("policies", {}), document.get("gaps", {}).get("policy_gap", {}), *gains):
        for further in by_policy.keys() - set(PINNED):
            del by_policy[further]
    return {key: value for key, value in document.items() if key not in {"trace", "command"}}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", COMMANDS)
def test_a_tiny_trace_gives_the_golden_figures(name: str) -> None:
    if not NEEDED.get(name, set()) <= {*TESTED_POLICIES}:
        pytest.skip("not all of its policies are compiled: the run with plain loops has it")
    result = result_of(name)
    added = {key: result.pop(key) for key in ADDED & result.keys()}
    assert result == json.loads((FOLDER / f"{name}.json").read_text())
    assert added == json.loads((FOLDER / "added.json").read_text()).get(name, {})


def write() -> None:
    """Write all golden files anew."""
    added: dict[str, dict[str, Any]] = {}
    for name in COMMANDS:
        result = result_of(name)
        added[name] = {key: result.pop(key) for key in ADDED & result.keys()}
        (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (FOLDER / "added.json").write_text(json.dumps(added, indent=1) + "\n")


if __name__ == "__main__":
    write()
