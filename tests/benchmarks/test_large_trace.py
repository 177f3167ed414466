"""The trace in ``examples`` is what the generator of large ones writes, and commands take it."""

import gzip
import io
from pathlib import Path

from benchmarks.large_trace import GIB, write
from tests.cli.command import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "conversations.jsonl.gz"


def test_the_example_is_what_the_generator_writes() -> None:
    """The same on every machine: whoever reads README has the figures that others have."""
    written = io.BytesIO()
    num_requests = write(written, int(0.0004 * GIB))
    assert num_requests == 2_382
    assert gzip.decompress(EXAMPLE.read_bytes()) == written.getvalue()


def test_commands_take_the_example() -> None:
    curve = run("curve", EXAMPLE, "--capacities", "1000", "--eviction", "lru")
    replay = run("replay", EXAMPLE, "--limit", "100", "--model", "llama-3.1-8b", "--gpu", "h100")
    assert (curve.exit_code, replay.exit_code) == (0, 0), curve.stderr + replay.stderr
    assert "2,382" in curve.stdout
    assert "hit ratio by block" in replay.stdout
