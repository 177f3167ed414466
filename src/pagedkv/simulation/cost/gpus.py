"""Published peak numbers of well-known GPUs.

Rates are the manufacturer's, from the data sheets named beside each entry: *dense* BF16 operations (data sheets print
twice as many, for weights of which half are zero), memory bandwidth, and the host link in one direction (they print the
sum of both). :class:`~pagedkv.simulation.cost.derivation.Assumptions` has the shares of them that programs
reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.models.memory import GIB

__all__ = ["Gpu", "find_gpu", "gpu_names"]

TERA: Final = 10**12
GIGA: Final = 10**9
PCIE_4_X16: Final = 32 * GIGA
PCIE_5_X16: Final = 64 * GIGA
GDDR_LEFT_BY_ECC: Final = 15 / 16
"""Cards with GDDR6 reserve a sixteenth of it for error correction: 22.5 of 24 GiB are left."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's peak numbers.

    Args:
        name: as commonly written, in lower case.
        memory_nbytes: memory that programs see; the "GB" of data sheets are GiB.
        flops: dense BF16 operations a second.
        memory_nbytes_per_s: bandwidth of its memory.
        link_nbytes_per_s: bandwidth to the host's memory, in one direction.
        source: source of the numbers.
    """

    name: str
    memory_nbytes: int
    flops: float
    memory_nbytes_per_s: float
    link_nbytes_per_s: float
    source: str = ""


GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            # NVIDIA A100 Tensor Core GPU data sheet: SXM4 40 GB and 80 GB.
            Gpu("a100-40", 40 * GIB, 312 * TERA, 1555 * GIGA, PCIE_4_X16, "NVIDIA A100 data sheet, SXM4 40 GB"),
            Gpu("a100-80", 80 * GIB, 312 * TERA, 2039 * GIGA, PCIE_4_X16, "NVIDIA A100 data sheet, SXM4 80 GB"),
            # NVIDIA H100 Tensor Core GPU data sheet: SXM5.
            Gpu("h100", 80 * GIB, 989 * TERA, 3350 * GIGA, PCIE_5_X16, "NVIDIA H100 data sheet, SXM5"),
            # NVIDIA H200 Tensor Core GPU data sheet: SXM. Programs see 140.4 GiB of its 141 GB.
            Gpu("h200", 140 * GIB, 989 * TERA, 4800 * GIGA, PCIE_5_X16, "NVIDIA H200 data sheet, SXM"),
            # NVIDIA DGX B200 data sheet, an eighth of the machine. Programs see 179 GiB of its 180 GB.
            Gpu("b200", 179 * GIB, 2250 * TERA, 8000 * GIGA, PCIE_5_X16, "NVIDIA DGX B200 data sheet, an eighth"),
            # NVIDIA L4 and L40S data sheets.
            Gpu("l4", int(24 * GIB * GDDR_LEFT_BY_ECC), 121 * TERA, 300 * GIGA, PCIE_4_X16, "NVIDIA L4 data sheet"),
            Gpu("l40s", int(48 * GIB * GDDR_LEFT_BY_ECC), 362 * TERA, 864 * GIGA, PCIE_4_X16, "NVIDIA L40S data sheet"),
        )
    }
)


def gpu_names() -> tuple[str, ...]:
    """Return the names of all GPUs in the table."""
    return tuple(GPUS)


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, in any case of letters.

    Raises:
        ConfigurationError: the GPU is not in the table.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        nearest = get_close_matches(name.lower(), GPUS, n=1)
        hint = f"nearest is {nearest[0]}; " if nearest else ""
        raise ConfigurationError(f"unknown GPU {name[:40]!r}: {hint}known are {', '.join(GPUS)}")
    return gpu
