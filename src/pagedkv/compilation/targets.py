"""Targets: classes of processors for which machine code may be made, besides the processor of this machine.

Code for this machine's processor is the fastest, but runs only on such processors; entries on disk are named by
processor. An image that is built on one machine and runs on others is warmed up for a target. If there is no entry for
the processor itself, one is used for a target with no instruction that the processor lacks.

The features of a processor are those that Numba compiles for: ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` apply.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from numba.core.registry import cpu_target

from pagedkv.errors import ConfigurationError

Processor: TypeAlias = tuple[str, str, str]
"""Numba's target: triple, name and features in LLVM's notation."""

EXACTLY: Final = "PAGEDKV_EXACT_PROCESSOR"
"""With this environment variable, only entries for the processor itself are used: while warming up."""


@dataclass(frozen=True, slots=True)
class Target:
    """A class of processors.

    Args:
        name: its common name.
        llvm_name: LLVM's name of it.
        features: LLVM's names of the features that all of them have.
    """

    name: str
    llvm_name: str
    features: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for which Numba compiles for it, without calling libraries that others may not have."""
        return {
            "NUMBA_CPU_NAME": self.llvm_name,
            "NUMBA_CPU_FEATURES": self._flags,
            "NUMBA_DISABLE_INTEL_SVML": "1",
        }

    def processor(self, triple: str) -> Processor:
        """Return Numba's target in that environment."""
        return triple, self.llvm_name, self._flags

    def runs_on(self, processor: Processor) -> bool:
        """Whether a processor has all features that code for this target may use."""
        return set(self._flags.split(",")) <= {"", *processor[2].split(",")}

    @property
    def _flags(self) -> str:
        return ",".join(f"+{feature}" for feature in self.features)


# The levels of the System V psABI for x86-64, with LLVM's names of their instructions.
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
"""By architecture, the most demanding first."""


def own_processor() -> Processor:
    """Return Numba's target in this process."""
    processor: Processor = cpu_target.target_context.codegen().magic_tuple()
    return processor


def target_named(name: str) -> Target:
    """Return a target of this machine's architecture.

    Raises:
        ConfigurationError: there is none with that name.
    """
    known = {target.name: target for target in _targets_of(own_processor())}
    if name not in known:
        names = ", ".join(sorted(known)) or "none is known"
        raise ConfigurationError(f"target must be one of {names} on this architecture, got {name!r:.60}")
    return known[name]


def runnable(processor: Processor) -> Iterator[Processor]:
    """Yield the processors with machine code that runs on a given one, the fastest first: itself, then targets."""
    yield processor
    if EXACTLY not in os.environ:
        targets = (target for target in _targets_of(processor) if target.runs_on(processor))
        yield from (found for target in targets if (found := target.processor(processor[0])) != processor)


def _targets_of(processor: Processor) -> tuple[Target, ...]:
    return TARGETS.get(processor[0].partition("-")[0], ())
