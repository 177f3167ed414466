"""Copies between a GPU's blocks and the pinned memory of tiers, against one long copy, and beside attention.

    python -m benchmarks.engine.tier_copies

1 GiB in entries of eight blocks of 2 MiB, the shape of an 8B Llama: what a load of 8,192 tokens brings.
"""

from collections.abc import Iterator
from statistics import median
from typing import Final

import numpy as np
import torch

from benchmarks.device.moves import MIB, NUM_RUNS, slowed_by, storage_of
from benchmarks.device.timing import Figure, elapsed_us, figure
from pagedkv.device.memory import PinnedArena
from pagedkv.engine.content import GpuBlockBytes
from pagedkv.tiers.entry_blocks import CopyEnd, fill

NUM_ENTRIES: Final = 64
BLOCKS_PER_ENTRY: Final = 8
NUM_BLOCKS: Final = NUM_ENTRIES * BLOCKS_PER_ENTRY
NBYTES: Final = NUM_BLOCKS * 2 * MIB


def copy_figures() -> Iterator[Figure]:
    """Check that blocks come back, then measure both directions."""
    storage = storage_of(2 * MIB, 4 * NUM_BLOCKS, 0)
    arena = PinnedArena(2 * NBYTES, "a host tier")
    block_bytes = GpuBlockBytes(storage, [arena], PinnedArena(2 * NBYTES, "staging"))
    memory = storage.pools["device"].device_bytes
    memory.random_(0, 256)
    rng = np.random.default_rng(1)
    blocks = (1 + rng.permutation(4 * NUM_BLOCKS - 1)[:NUM_BLOCKS]).astype(np.int32)
    entries = [arena.take(BLOCKS_PER_ENTRY * 2 * MIB) for _ in range(NUM_ENTRIES)]
    content = torch.from_numpy(blocks).long().cuda()
    before = memory.view(-1, 2 * MIB)[content].clone()
    copied = block_bytes.read(0, blocks)
    assert copied is not None
    copied.ticket.wait()
    parts: list[tuple[memoryview]] = []
    for place in rng.permutation(NUM_ENTRIES).tolist():
        entry = entries[place]
        assert entry is not None
        begin = len(parts) * BLOCKS_PER_ENTRY
        np.asarray(entry)[:] = copied.rows[begin : begin + BLOCKS_PER_ENTRY].reshape(-1)
        parts.append((entry,))
    del copied
    split = [[each] for each in blocks.reshape(NUM_ENTRIES, BLOCKS_PER_ENTRY)]
    memory.zero_()

    def load() -> CopyEnd:
        tickets = fill(block_bytes, list(zip(split, parts, strict=True)))
        assert tickets is not None
        return tickets[-1]

    def store() -> CopyEnd:
        stored = block_bytes.read(0, blocks)
        assert stored is not None
        return stored.ticket

    load().wait()
    assert torch.equal(memory.view(-1, 2 * MIB)[content], before), "what was stored did not come back"
    del before
    line = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    there = memory[:NBYTES]
    for way, run, stream, copy in (
        ("load", load, block_bytes.in_stream, lambda: there.copy_(line, non_blocking=True)),
        ("store", store, block_bytes.out_stream, lambda: line.copy_(there, non_blocking=True)),
    ):
        whole = [elapsed_us(copy) for _ in range(NUM_RUNS)]
        mine = [elapsed_us(run, stream) for _ in range(NUM_RUNS)]
        yield figure(f"one contiguous copy of 1 GiB, as a {way}", [NBYTES / us / 1e3 for us in whole], "GB/s")
        yield figure(f"{way} of 1 GiB in {NUM_ENTRIES} entries", [NBYTES / us / 1e3 for us in mine], "GB/s")
        yield figure(f"{way} / one copy", [median(whole) / us for us in mine], "", bar=0.96, is_least=True)
        yield from slowed_by(f"a {way} of a tier", run, 9.0)
    block_bytes.close()
    storage.close()


if __name__ == "__main__":
    for each in copy_figures():
        print(each.line, flush=True)
