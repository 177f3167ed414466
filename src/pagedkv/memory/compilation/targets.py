"""Processors that machine code may be made for besides the one at hand: kinds that many processors are of.

Code for the processor at hand is the fastest, and runs there alone; entries on disk are named by it. An image that is
built on one machine and runs on others is warmed up for a target. Where an entry for the processor itself is missing,
one for a target is taken that asks for nothing that this processor lacks.

What a processor can do is what Numba compiles for: ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` are heeded.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from numba.core.registry import cpu_target

from pagedkv.memory.contract.errors import ConfigurationError

__all__ = ["EXACTLY", "Processor", "Target", "own_processor", "runnable", "target_named"]

Processor: TypeAlias = tuple[str, str, str]
"""What Numba compiles for: triple, name and features as LLVM has them."""

EXACTLY: Final = "PAGEDKV_EXACT_PROCESSOR"
"""With this variable in the environment, entries for the processor itself are taken and no others: while warming up."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of processors.

    Args:
        name: what people call it.
        llvm_name: what LLVM calls it.
        features: what each of them has, in LLVM's words.
    """

    name: str
    llvm_name: str
    features: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Give the variables with which Numba compiles for it, and calls nothing that other machines may not have."""
        return {
            "NUMBA_CPU_NAME": self.llvm_name,
            "NUMBA_CPU_FEATURES": self._flags,
            "NUMBA_DISABLE_INTEL_SVML": "1",
        }

    def processor(self, triple: str) -> Processor:
        """Tell what Numba compiles for in that environment."""
        return triple, self.llvm_name, self._flags

    def runs_on(self, processor: Processor) -> bool:
        """Tell whether a processor has all that code for this target may use."""
        return set(self._flags.split(",")) <= {"", *processor[2].split(",")}

    @property
    def _flags(self) -> str:
        return ",".join(f"+{feature}" for feature in self.features)


# The levels of the System V psABI for x86-64, with the names that LLVM gives their instructions.
V2: Final = ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")
V3: Final = (*V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
V4: Final = (*V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

X86_64: Final = (
    Target("x86-64-v4", "x86-64-v4", V4),
    Target("x86-64-v3", "x86-64-v3", V3),
    Target("x86-64-v2", "x86-64-v2", V2),
)
ARM_64: Final = (Target("armv8-a", "generic", ()),)
TARGETS: Final[Mapping[str, tuple[Target, ...]]] = MappingProxyType(
    {"x86_64": X86_64, "aarch64": ARM_64, "arm64": ARM_64}
)
"""By architecture, those that ask for the most first."""


def own_processor() -> Processor:
    """Tell what this process compiles for."""
    processor: Processor = cpu_target.target_context.codegen().magic_tuple()
    return processor


def target_named(name: str) -> Target:
    """Give a target of this machine's architecture.

    Raises:
        ConfigurationError: there is none of that name.
    """
    known = {target.name: target for target in _targets_of(own_processor())}
    if name not in known:
        names = ", ".join(sorted(known)) or "none is known"
        raise ConfigurationError(f"target must be one of {names} on this architecture, got {name!r:.60}")
    return known[name]


def runnable(processor: Processor) -> Iterator[Processor]:
    """Give those whose machine code runs on a processor, the best first: its own, then that of targets."""
    yield processor
    if EXACTLY not in os.environ:
        targets = (target for target in _targets_of(processor) if target.runs_on(processor))
        yield from (found for target in targets if (found := target.processor(processor[0])) != processor)


def _targets_of(processor: Processor) -> tuple[Target, ...]:
    return TARGETS.get(processor[0].partition("-")[0], ())
