"""MemoryUse: what an engine takes of its device's memory, and the refusal where that is more than there is.

::

    | weights | blocks | tables, lists, logits of graphs | activations of the largest step | graphs | free |
      the model  pools   torch's, and small                 measured by one pass             measured

Blocks are allocated first. Then a pass over padding measures the activations, so that a step that would not fit is
refused when the engine is built, and not while requests run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.serving.engine import compat

__all__ = ["MemoryUse", "measured", "refusing", "require_room", "weights_nbytes"]

GIB: Final = 2**30


class MemoryUse(NamedTuple):
    """Bytes on an engine's device.

    Args:
        weights_nbytes: parameters and buffers of the model, and of a draft model, each memory once.
        kv_nbytes: blocks of all pools.
        activations_nbytes: the most that a step of ``max_batched_tokens`` allocates and frees; None: not measured, on a
            CPU, and for models whose steps have tensors of other shapes.
        graphs_nbytes: what torch reserved for graphs; 0: none were captured.
        free_nbytes: free when the engine was built; None on a CPU.
    """

    weights_nbytes: int
    kv_nbytes: int
    activations_nbytes: int | None
    graphs_nbytes: int
    free_nbytes: int | None

    def beside(self, other: "MemoryUse", *models: compat.Model) -> "MemoryUse":
        """Add what another model takes over the same blocks, measured later; the two run one after the other."""
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


def require_room(kv_nbytes: int, model: compat.Model) -> None:
    """Refuse blocks that a GPU has no free memory for. Raises ConfigurationError, with the numbers."""
    if model.device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(model.device)
    if kv_nbytes > free:  # what torch holds and does not use can be given back
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
    if kv_nbytes > free:
        raise ConfigurationError(
            f"blocks of {_gib(kv_nbytes)} do not fit: of {_gib(total)} on {model.device}, {_gib(free)} are free beside "
            f"weights of {_gib(weights_nbytes(model))}: lower kv_nbytes or num_blocks"
        )


@contextmanager
def refusing(what: str, device: torch.device) -> Iterator[None]:
    """Refuse what does not fit beside weights and blocks. Raises ConfigurationError, with the numbers."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigurationError(
            f"{what} does not fit beside weights and blocks: of {_gib(total)} on {device}, {_gib(free)} were free when "
            f"it failed: lower max_batched_tokens, kv_nbytes or num_blocks ({str(problem).splitlines()[0]})"
        ) from problem


def measured(run: Callable[[], object], num_tokens: int, device: torch.device) -> int:
    """Run a step of so many tokens on a GPU, and return the most bytes that it allocated.

    Raises ConfigurationError, with the numbers, where they are not there.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with refusing(f"a step of {num_tokens} tokens", device):
        run()
        torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
