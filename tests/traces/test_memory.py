"""A trace may be larger than the memory: reading, converting and sorting hold one row, or a bounded number."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest

pytestmark = [
    pytest.mark.plain_only,
    pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak from /proc"),
]

MIB: Final = 2**20
BOUND_MIB: Final = 24
"""What buffers and the allocator may take: about a tenth of the traces."""

# The peak of this process alone: ru_maxrss would begin with that of the process that started it.
PROGRAM = """
import sys
from pathlib import Path
from pagedkv.cli.commands.convert import Conversion, convert_trace
from pagedkv.planner.traces.merging import sorted_by_arrival
from pagedkv.planner.traces.reader import TraceReader

def peak_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

def read(path, output):
    with TraceReader(path) as trace:
        return sum(1 for _ in trace)

def convert(path, output):
    return convert_trace(path, Path(output), Conversion())[0]

def sort(path, output):
    with TraceReader(path) as trace:
        return sum(1 for _ in sorted_by_arrival(trace, max_run_nbytes=4 * 2**20))

def hold(path, output):
    with TraceReader(path) as trace:
        return len(list(trace))

work, small, large, output = sys.argv[1:]
globals()[work](small, output)
before = peak_kib()
num_requests = globals()[work](large, output)
print(num_requests, peak_kib() - before)
"""


def feed(pipe: Path, chunk: bytes, num_chunks: int) -> None:
    with pipe.open("wb") as file:
        for _ in range(num_chunks):
            file.write(chunk)


def growth_mib(work: str, folder: Path, num_mib: int) -> float:
    """Do the work on a trace of 1 MiB, then on a large one; return by how much the peak of memory grew."""
    row = {"timestamp": 0, "input_length": 2000 * 512, "output_length": 1, "hash_ids": list(range(10**6, 10**6 + 2000))}
    line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
    chunk = line * (MIB // len(line))
    feeders = []
    for name, num_chunks in (("small", 1), ("large", num_mib)):
        os.mkfifo(folder / name)
        feeders.append(threading.Thread(target=feed, args=(folder / name, chunk, num_chunks), daemon=True))
        feeders[-1].start()
    files = [folder / name for name in ("small", "large", "output.gz")]
    process = subprocess.run([sys.executable, "-c", PROGRAM, work, *files], check=True, capture_output=True, text=True)
    for feeder in feeders:
        feeder.join()
    num_requests, grown_kib = map(int, process.stdout.split())
    assert num_requests == num_mib * (MIB // len(line))
    return grown_kib / 1024


@pytest.mark.parametrize(("work", "num_mib"), [("read", 200), ("convert", 200), ("sort", 60)])
def test_memory_does_not_grow_with_the_trace(tmp_path: Path, work: str, num_mib: int) -> None:
    assert growth_mib(work, tmp_path, num_mib) < BOUND_MIB


def test_holding_all_requests_would_be_noticed(tmp_path: Path) -> None:
    assert growth_mib("hold", tmp_path, 40) > BOUND_MIB
