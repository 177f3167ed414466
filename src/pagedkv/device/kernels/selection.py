"""Selects the kernels of a device: Triton's on a GPU, those of a CPU elsewhere, or all in plain torch."""

from types import ModuleType
from typing import Literal, TypeAlias

import torch

from pagedkv.device.kernels import on_cpu, reference
from pagedkv.errors import ConfigurationError, DeviceUnavailableError

KernelChoice: TypeAlias = Literal["auto", "torch", "triton"]


def kernels_for(device: torch.device, choice: KernelChoice = "auto") -> ModuleType:
    """Return the module with the kernels of a device.

    Args:
        choice: "auto" is Triton on a GPU, and elsewhere plain torch with compiled loops for block tables; "triton" on a
            CPU is Triton's interpreter.

    Raises:
        ConfigurationError: the choice is unknown.
        DeviceUnavailableError: Triton is not installed, or is chosen on a CPU while its interpreter is off.
    """
    if not isinstance(choice, str) or choice not in {"auto", "torch", "triton"}:
        raise ConfigurationError(f"kernels must be 'auto', 'torch' or 'triton', got {choice!r}")
    if choice == "auto" and device.type == "cpu":
        return on_cpu
    if choice == "torch":
        return reference
    try:
        import triton.knobs  # noqa: PLC0415 - on machines with a GPU alone

        from pagedkv.device.kernels import triton as kernels  # noqa: PLC0415 - as above
    except ImportError as problem:
        raise DeviceUnavailableError(
            f"kernels for {device} need Triton, which is not installed: pip install triton, or choose kernels='torch'"
        ) from problem
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise DeviceUnavailableError(
            "kernels='triton' on a CPU needs Triton's interpreter, for tests: set TRITON_INTERPRET=1 in the environment"
        )
    return kernels
