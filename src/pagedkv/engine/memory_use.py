"""MemoryUse: the bytes of device memory that an engine takes, and the errors where they do not fit.

::

    | weights | blocks | tables, lists, logits of graphs | activations of the largest step | graphs | free |
      the model  pools   torch's, and small                 measured by one pass             measured

Blocks are allocated first. Then a pass over padding measures the activations, so that a step that would not fit is
refused when the engine is built, and not while requests run.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import torch

from pagedkv.contract.space_config import GIB
from pagedkv.errors import ConfigurationError
from pagedkv.probe import compat

CGROUP: Final = Path("/sys/fs/cgroup")


class MemoryUse(NamedTuple):
    """Bytes on an engine's device.

    Args:
        weights_nbytes: parameters and buffers of the model, and of a draft model; shared memory counts once.
        kv_nbytes: blocks of all pools.
        activations_nbytes: peak of the temporary memory of a step of ``max_batched_tokens``; None if not measured: on a
            CPU, and for models whose steps have tensors of varying shapes.
        graphs_nbytes: reserved by torch for graphs; 0: none were captured.
        free_nbytes: free when the engine was built; None on a CPU.
    """

    weights_nbytes: int
    kv_nbytes: int
    activations_nbytes: int | None
    graphs_nbytes: int
    free_nbytes: int | None

    def beside(self, other: "MemoryUse", *models: compat.Model) -> "MemoryUse":
        """Add the bytes of a model over the same blocks, measured later. The models' passes never overlap."""
        steps = [each.activations_nbytes for each in (self, other)]
        activations = None if steps[0] is None or steps[1] is None else max(steps[0], steps[1])
        return MemoryUse(
            weights_nbytes(*models),
            self.kv_nbytes,
            activations,
            self.graphs_nbytes + other.graphs_nbytes,
            other.free_nbytes,
        )


def weights_nbytes(*models: compat.Model) -> int:
    """Count the bytes of models' parameters and buffers, shared ones once. O(weights)."""
    parts = (part for model in models for part in (model.parameters(), model.buffers()))
    storages = (each.untyped_storage() for part in parts for each in part)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def free_nbytes(device: torch.device) -> int:
    """Return the bytes that are free on a device: of a GPU, or of what Linux says a process can have, else of all."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a container's limit, if there is one
        limit, used = (int((CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return free


def require_room(kv_nbytes: int, model: compat.Model) -> None:
    """Raise ConfigurationError, with the numbers, if a GPU has too little free memory for blocks."""
    if model.device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(model.device)
    if kv_nbytes > free:  # torch can free the memory that it has cached
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
    if kv_nbytes > free:
        raise ConfigurationError(
            f"blocks of {as_gib(kv_nbytes)} do not fit: of {as_gib(total)} on {model.device}, {as_gib(free)} are free "
            f"beside weights of {as_gib(weights_nbytes(model))}: lower kv_nbytes or num_blocks"
        )


@contextmanager
def refusing(what: str, device: torch.device) -> Iterator[None]:
    """Raise ConfigurationError, with the numbers, if memory runs out within this context."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigurationError(
            f"{what} does not fit beside weights and blocks: of {as_gib(total)} on {device}, {as_gib(free)} were free "
            f"when it failed: lower max_batched_tokens, kv_nbytes or num_blocks ({str(problem).splitlines()[0]})"
        ) from problem


def measured(run: Callable[[], object], num_tokens: int, device: torch.device) -> int:
    """Run a step of so many tokens on a GPU, and return the peak of the bytes that it allocated.

    Raises ConfigurationError, with the numbers, if memory runs out.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with refusing(f"a step of {num_tokens} tokens", device):
        run()
        torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def as_gib(nbytes: int) -> str:
    """Write bytes as GiB."""
    return f"{nbytes / GIB:.2f} GiB"
