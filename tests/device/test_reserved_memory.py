"""Memory that is given back and taken again at the same addresses: on a CPU always, on a GPU where there is one."""

import gc
from pathlib import Path

import pytest
import torch

from pagedkv.device.memory import ReservedMemory, reserve
from pagedkv.errors import ConfigurationError

NBYTES = 5 * 2**20 + 3
MIB = 2**20
IS_ON_LINUX = Path("/proc/self/statm").exists()


def used_nbytes(device: torch.device) -> int:
    """Memory that is taken on the device, or by this process."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def written(memory: ReservedMemory) -> torch.Tensor:
    """View the bytes, each of them written."""
    view = memory.tensor()
    view.fill_(1)
    return view


def test_bytes_are_as_many_as_were_asked_for(device: torch.device) -> None:
    memory = reserve(NBYTES, "a pool", device)
    view = memory.tensor()
    assert (view.dtype, view.shape, view.device.type) == (torch.uint8, (NBYTES,), device.type)
    assert view.data_ptr() == memory.address
    view.copy_(torch.arange(NBYTES, device=device) % 251)
    assert torch.equal(view.cpu(), (torch.arange(NBYTES) % 251).byte())


def test_views_are_valid_again_where_they_were(device: torch.device) -> None:
    memory = reserve(NBYTES, "a pool", device)
    view = written(memory)
    for value in range(3):
        memory.unmap()
        assert not memory.is_mapped
        memory.map()
        assert memory.is_mapped
        assert memory.tensor().data_ptr() == view.data_ptr() == memory.address
        view.fill_(value)
        assert torch.equal(memory.tensor(), torch.full_like(view, value))


@pytest.mark.skipif(not IS_ON_LINUX, reason="what a process has is asked of /proc")
def test_what_is_unmapped_is_given_back(device: torch.device) -> None:
    memory = reserve(256 * MIB, "a pool", device)
    written(memory)
    before = used_nbytes(device)
    memory.unmap()
    assert before - used_nbytes(device) > 200 * MIB
    memory.map()
    written(memory)
    assert abs(used_nbytes(device) - before) < 56 * MIB


@pytest.mark.skipif(not IS_ON_LINUX, reason="as above")
def test_addresses_live_as_long_as_a_view(device: torch.device) -> None:
    before = used_nbytes(device)
    memory = reserve(256 * MIB, "a pool", device)
    view = written(memory)
    del memory
    gc.collect()
    assert int(view[-1]) == 1
    del view
    gc.collect()
    assert used_nbytes(device) - before < 56 * MIB


def test_too_much_is_refused_with_the_numbers(device: torch.device) -> None:
    before = used_nbytes(device) if IS_ON_LINUX else 0
    nbytes = 2**40 if device.type == "cuda" else 2**50
    with pytest.raises(ConfigurationError, match=f"a pool needs {nbytes:,} bytes on"):
        reserve(nbytes, "a pool", device)
    if IS_ON_LINUX:
        assert used_nbytes(device) - before < 56 * MIB, "what had been taken was given back"


if torch.cuda.is_available():

    def test_a_graph_survives() -> None:
        """It reads and writes where it did, whoever had the memory meanwhile."""
        device = torch.device("cuda", 0)
        memory = reserve(4 * MIB, "a pool", device)
        view, out = memory.tensor(), torch.zeros(4 * MIB, dtype=torch.uint8, device=device)
        view.fill_(1)
        torch.add(view, 1, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.add(view, 1, out=out)
        memory.unmap()
        other = torch.full((64 * MIB,), 9, dtype=torch.uint8, device=device)
        memory.map()
        view.fill_(5)
        graph.replay()
        assert bool((out == 6).all())
        assert bool((other == 9).all())

    def test_what_torch_keeps_without_need_is_taken() -> None:
        device = torch.device("cuda", 0)
        free, _ = torch.cuda.mem_get_info(device)
        nbytes = free * 3 // 4
        kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
        del kept
        memory = reserve(nbytes, "a pool", device)
        assert int(memory.tensor()[-1:].fill_(3)) == 3
