"""Writes the tables of docs/findings.md: ``python -m benchmarks.findings [--traces FOLDER] [TABLE ...]``.

On the page each table stands between two comments that name it. What a table shows is measured by the command that the
page names beside it, and written here into the page; the prose around the tables is the page's own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import eviction_capacities, sharing
from benchmarks.markdown import table, table_of, with_table
from pagedkv import BlockPool
from pagedkv.blocks.eviction.registry import POLICIES

__all__ = ["BY_OTHERS", "TABLES", "bookkeeping_table", "curve_table", "main", "table_of", "with_table"]

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "findings.md"
TRACES: Final = ROOT.parent / "shared" / "traces"
NEAR_IDEAL: Final = 0.001
"""Capacities where LRU comes as near to the ideal hit ratio are left out."""
SHOWN: Final = ("lru", "adaptive")
"""Policies that the page shows, beside the optimum; adding a policy changes no table."""
BOOKKEEPING_SIZES: Final = MappingProxyType({1_000_000: "", 700_000: "", 2**20 + 2: ", just above a power of two"})

Result: TypeAlias = Mapping[str, Any]
"""What a command writes with ``--json``."""


def curve_table(title: str, curve: Result) -> str:
    """Show hit ratios by block of the policies and the optimum, in percent, where LRU is not near the ideal."""
    num_refs = curve["num_block_refs"]
    hits_of = {name: hits for name, hits in curve["policies"].items() if name in {*SHOWN, "optimal"}}
    lru = hits_of["lru"]
    capacities = [
        capacity for capacity, hits in lru.items() if hits / num_refs < curve["ideal_block_ratio"] - NEAR_IDEAL
    ]
    return table(
        [f"{title} (ideal {100 * curve['ideal_block_ratio']:.2f})", *("" for _ in capacities)],
        [f"blocks of {curve['block_size']}", *(f"{int(capacity):,}" for capacity in capacities)],
        *(
            [name, *(f"{100 * hits[at] / num_refs:.2f}" for at in capacities)]
            for name, hits in curve["policies"].items()
            if name in {*SHOWN, "optimal"}
        ),
    )


def gap_table(curve: Result) -> str:
    """Show how far each policy stays behind the optimum at most."""
    gaps = curve["gaps"]["policy_gap"]
    return table(
        ["coding agents, one session after another", "points behind the optimum, at most"],
        *([name, f"{100 * max(gaps[name].values()):.2f}"] for name in SHOWN),
    )


def replay_table(replay: Result) -> str:
    """Show what a run on the virtual clock came to."""
    steps, hits = replay["steps"], replay["hits"]
    preemptions = replay["preemptions"]
    return table(
        ["Mooncake conversation", ""],
        ["requests", f"{replay['requests']['num_requests']:,}"],
        ["prompt tokens", f"{replay['requests']['num_prompt_tokens']:,}"],
        ["of which hit", f"{100 * hits['token_hit_ratio']:.2f} %"],
        ["steps", f"{steps['num_steps']:,}"],
        ["preemptions", f"{preemptions['num_recompute'] + preemptions['num_swap']:,}"],
        ["median wait before the first step", f"{replay['latency']['queueing_s']['p50']:.1f} s"],
    )


def waste_table(replay: Result) -> str:
    """Show the share of slots without a token, for each way to reserve them."""
    waste, steps = replay["waste"], replay["steps"]
    by_block_size, contiguous = waste["by_block_size"], waste["contiguous"]
    return table(
        [f"{replay['requests']['num_requests']:,} requests, {steps['num_decode_steps']:,} decode steps", "waste"],
        *([f"blocks of {size}", f"{100 * by_block_size[size]:.2f} %"] for size in by_block_size if size != "1"),
        ["contiguous, exactly the final length", f"{100 * contiguous['exact']:.2f} %"],
        ["contiguous, the power of two that holds it", f"{100 * contiguous['power_of_two']:.2f} %"],
        [f"contiguous, the model's context of {waste['max_length']:,}", f"{100 * contiguous['maximum']:.2f} %"],
    )


def sharing_table() -> str:
    """Show the memory that samples and beams save, beside the published figures."""
    rows = ([name, f"{published} %", f"{here:.1f} %"] for name, published, here in sharing.savings())
    return table(["", "published", "here"], *rows)


def bookkeeping_table() -> str:
    """Show the bytes that a pool keeps for each block."""
    rows = (
        [f"{num_blocks:,} blocks{remark}", *(f"{bytes_a_block(name, num_blocks):.1f}" for name in SHOWN)]
        for num_blocks, remark in BOOKKEEPING_SIZES.items()
    )
    return table(["bytes a block", *SHOWN], *rows)


def bytes_a_block(policy: str, num_blocks: int) -> float:
    """Build a pool of blocks of 16 tokens, and see what it takes."""
    return BlockPool("pool", num_blocks, 16, policy=POLICIES[policy]).nbytes / num_blocks


def of_command(show: Callable[[Result], str], trace: str, *command: str) -> Callable[[Path], str]:
    """Make a table of what ``pagedkv COMMAND TRACE OPTIONS`` finds."""
    return lambda traces: show(_run(command[0], str(traces / trace), *command[1:]))


def of_curve(title: str, trace: str) -> Callable[[Path], str]:
    """Make the table of a trace's curve."""
    return of_command(partial(curve_table, title), trace, "curve")


TABLES: Final[Mapping[str, Callable[[Path], str]]] = MappingProxyType(
    {
        "mooncake conversation": of_curve("Mooncake conversation", "mooncake_conversation.jsonl.gz"),
        "mooncake synthetic": of_curve("Mooncake synthetic", "mooncake_synthetic.jsonl.gz"),
        "agent benchmarks": of_curve("agent benchmarks", "agent_text_blk16.jsonl.gz"),
        "coding agents": of_curve("coding agents, interleaved", "agentic_coding_interleaved.jsonl.gz"),
        "coding sessions": of_command(gap_table, "agentic_coding_sessions.jsonl.gz", "curve"),
        "against lru": lambda traces: eviction_capacities.against_lru(eviction_capacities.sources_of([traces])),
        "replay": of_command(replay_table, "mooncake_conversation.jsonl.gz", "replay"),
        "waste": of_command(
            waste_table, "azure_llm_2023_conv.csv.gz", "replay", "--model", "llama-3.1-8b", "--gpu", "h100"
        ),
        "sharing": lambda _: sharing_table(),
        "bookkeeping": lambda _: bookkeeping_table(),
    }
)
"""By the name that the page calls them; each is given the folder of the traces."""
BY_OTHERS: Final = ("rules of tiers", "sessions of agents", "tails and thoughts")
"""Tables that the commands above them print, which take hours."""


def main() -> int:
    """Measure what the tables show, one after the other, and write each as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.findings", description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: %(default)s")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"default: all of them: {', '.join(TABLES)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - TABLES.keys():
        parser.error(f"no such table: {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    if not arguments.traces.is_dir():
        parser.error(f"there are no traces in {arguments.traces}: name their folder with --traces")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        names = arguments.tables or list(TABLES)
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            text = TABLES[name](arguments.traces)
            arguments.page.write_text(with_table(arguments.page.read_text("utf-8"), name, text), "utf-8")
            progress.advance(task)
    return 0


def _run(*command: str) -> Result:
    """Run ``pagedkv`` with these arguments; give what it writes as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        program = [sys.executable, "-c", "from pagedkv.cli import main; main()", *command, "--json", str(answer)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"pagedkv {' '.join(command)}: {done.stderr}")
        result: Result = json.loads(answer.read_text())
        return result


if __name__ == "__main__":
    sys.exit(main())
