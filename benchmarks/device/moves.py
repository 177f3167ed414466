"""Figures of memory: swaps against one long copy, beside attention; copies on write; keys and values written."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch

from benchmarks.device.timing import ASLEEP_CYCLES, Figure, by_graph, elapsed_us, figure
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import KeyValueShape, KVStorage, Transfers
from pagedkv.tiers.entry_blocks import CopyEnd

__all__ = ["move_figures"]

MIB = 2**20
SWAPPED_NBYTES = 512 * MIB
NUM_RUNS = 20


def storage_of(block_nbytes: int, num_blocks: int, num_host_blocks: int) -> KVStorage:
    """A block-major pool whose blocks have so many bytes: 16 tokens of bf16 keys and values."""
    num_layers, heads, dim = 32, max(1, block_nbytes // (32 * 2 * 16 * 128 * 2)), 128
    shape = KeyValueShape(num_layers, heads, dim, dtype=torch.bfloat16)
    config = SpaceConfig((FullAttention(16),), num_blocks, num_host_blocks, max_tokens=4096)
    storage = KVStorage(config, [shape], "cuda")
    assert storage.pools["device"].block_nbytes == block_nbytes
    return storage


def move_figures() -> Iterator[Figure]:
    """Measure them all."""
    yield from swap_figures(2 * MIB, "2 MiB", 0.96)
    yield from swap_figures(MIB // 4, "256 KiB", 0.87)
    yield from beside_attention()
    yield from copy_on_write()
    yield from write_figures()


def swap_figures(block_nbytes: int, name: str, bar: float) -> Iterator[Figure]:
    """Swap 512 MiB of scattered blocks each way; the yardstick is one contiguous pinned copy in the same run."""
    count = SWAPPED_NBYTES // block_nbytes
    storage = storage_of(block_nbytes, 4 * count, 2 * count)
    pool, transfers = storage.pools["device"], Transfers(storage)
    rng = np.random.default_rng(1)
    blocks = (1 + rng.permutation(4 * count - 1)[:count]).astype(np.int32)
    hosts = (1 + rng.permutation(2 * count - 1)[:count]).astype(np.int32)
    pool.device_bytes.random_(0, 256)
    before = pool.device_bytes.clone()
    transfers.swap_out("device", blocks, hosts).wait()
    pool.device_bytes.zero_()
    transfers.swap_in("device", hosts, blocks).wait()
    rows = torch.from_numpy(blocks).long().cuda()
    content, expected = (memory.view(-1, block_nbytes)[rows] for memory in (pool.device_bytes, before))
    assert torch.equal(content, expected), "what was swapped out did not come back"
    del before, content, expected
    line = torch.empty(SWAPPED_NBYTES, dtype=torch.uint8, pin_memory=True)
    there = pool.device_bytes[:SWAPPED_NBYTES]
    for way, swap, copy in (
        ("out", lambda: transfers.swap_out("device", blocks, hosts), lambda: line.copy_(there, non_blocking=True)),
        ("in", lambda: transfers.swap_in("device", hosts, blocks), lambda: there.copy_(line, non_blocking=True)),
    ):
        copied = [elapsed_us(copy) for _ in range(NUM_RUNS)]
        swapped = [elapsed_us(swap, transfers.stream) for _ in range(NUM_RUNS)]
        yield figure(
            f"one contiguous copy of 512 MiB {way}",
            [SWAPPED_NBYTES / each / 1e3 for each in copied],
            "GB/s",
            is_least=True,
        )
        yield figure(
            f"swap {way} of 512 MiB in {name} blocks",
            [SWAPPED_NBYTES / each / 1e3 for each in swapped],
            "GB/s",
            is_least=True,
        )
        ratios = [median(copied) / each for each in swapped]
        yield figure(f"swap {way} in {name} blocks / one copy", ratios, "", bar=bar, is_least=True)
    storage.close()


def beside_attention() -> Iterator[Figure]:
    """Slow-down of decode attention while 512 MiB are swapped each way, again and again."""
    storage = storage_of(2 * MIB, 1024, 512)
    transfers = Transfers(storage)
    blocks, hosts = np.arange(1, 257, dtype=np.int32)[::-1], np.arange(1, 257, dtype=np.int32)
    yield from slowed_by("a swap out", lambda: transfers.swap_out("device", blocks, hosts), 8.0)
    yield from slowed_by("a swap in", lambda: transfers.swap_in("device", hosts, blocks), 8.0)
    storage.close()


def slowed_by(name: str, swap: Callable[[], CopyEnd], bar: float) -> Iterator[Figure]:
    """Slow-down, in percent, of some 10 ms of decode attention by copies that take longer."""
    keys, values = (torch.randn(64, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(64, 8, 8, 128, device="cuda", dtype=torch.bfloat16)

    def attend() -> None:
        for _ in range(8):
            torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    attend()
    alone = [elapsed_us(attend) for _ in range(NUM_RUNS)]
    beside = [_beside(attend, swap) for _ in range(NUM_RUNS)]
    nbytes = 8 * 2 * keys.numel() * 2
    yield figure("decode attention alone", [nbytes / each / 1e6 for each in alone], "TB/s", is_least=True)
    slower = [100 * (each / median(alone) - 1) for each in beside]
    yield figure(f"decode attention slowed by {name}", slower, "%", bar=bar)


def _beside(run: Callable[[], object], swap: Callable[[], CopyEnd]) -> float:
    """Time work in microseconds while a swap, which begins with it, takes longer than it does."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * ASLEEP_CYCLES)  # while the host begins the copies
    ticket = swap()
    begin.record()
    run()
    end.record()
    end.synchronize()
    assert not ticket.is_done(), "the swap was over before: nothing ran beside it"
    ticket.wait()
    return 1000 * float(begin.elapsed_time(end))


def copy_on_write() -> Iterator[Figure]:
    """Copy 16 blocks of 2 MiB, other ones in each run."""
    storage = storage_of(2 * MIB, 2048, 0)
    pool, transfers = storage.pools["device"], Transfers(storage)
    pool.device_bytes.random_(0, 256)
    order = (1 + torch.randperm(2047, generator=torch.Generator().manual_seed(1))).int().cuda()
    pairs = [(order[at : at + 16].clone(), order[at + 16 : at + 32].clone()) for at in range(0, 1024, 32)]
    runs = [partial(transfers.copy, "device", *pair) for pair in pairs]
    times = by_graph(runs, NUM_RUNS)
    rows = pool.device_bytes.view(-1, 2 * MIB)
    assert all(torch.equal(rows[source.long()], rows[target.long()]) for source, target in pairs)
    yield figure("copy on write of 16 blocks of 2 MiB", times, bar=20.0)
    storage.close()


def write_figures() -> Iterator[Figure]:
    """Write 1,024 tokens of 8 heads x 128 to scattered slots, other ones in each run."""
    for dtype, bar in ((torch.bfloat16, 3.0), (torch.float8_e4m3fn, None)):
        shape = KeyValueShape(32, 8, 128, dtype=dtype)
        storage = KVStorage(SpaceConfig((FullAttention(16),), 2048, max_tokens=4096), [shape], "cuda")
        transfers = Transfers(storage)
        generator = torch.Generator(device="cuda").manual_seed(1)
        runs = []
        for layer in range(32):
            content = [torch.randn(1024, 8, 128, device="cuda", generator=generator).bfloat16() for _ in range(2)]
            slots = 16 + torch.randperm(2047 * 16, device="cuda", generator=generator)[:1024]
            runs.append(partial(transfers.reshape_and_cache, 0, layer, content[0], content[1], slots))
            if layer == 0:
                runs[0]()
                stored = storage.keys(0, 0)[slots // 16, slots % 16].float()
                assert torch.allclose(stored, content[0].float(), rtol=0.07, atol=0.01)
        yield figure(
            f"keys and values of 1,024 tokens, 8 x 128, written as {str(dtype)[6:]}", by_graph(runs, NUM_RUNS), bar=bar
        )
        storage.close()
