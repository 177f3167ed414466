"""Whether the processor has the SHA instructions of x86, decided when code is compiled or when it runs.

Code compiled for this machine's processor decides when it is compiled. Code for a class of processors
(:mod:`pagedkv.compilation.targets`), some of which have the instructions, decides when it runs: it reads a byte
that each process writes once. The byte is a named symbol, resolved when code is loaded, so that code on disk contains
no address of a process.
"""

import ctypes
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, TypeAlias, cast

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from pagedkv.compilation.compiled import is_compiling_at_all
from pagedkv.compilation.targets import own_processor

__all__ = ["FEATURES", "PRESENCE", "SHA", "Known", "has_sha_instructions"]

CodeContext: TypeAlias = Any  # Numba's class; its methods are not annotated

NAME: Final = "pagedkv_has_sha_instructions"
BYTE: Final = ir.IntType(8)
FEATURES: Final = '"target-features"="+sse4.1,+ssse3,+sha"'
"""The attribute of a function in which LLVM may use the instructions, whatever the target."""


class Known(Enum):
    """What is known about the instructions when code is compiled."""

    ABSENT = "absent"
    PRESENT = "present"
    QUERIED = "queried when code runs"


def _known() -> Known:
    if not is_compiling_at_all():
        return Known.ABSENT
    triple, _name, features = own_processor()
    if "+sha" in features.split(","):
        return Known.PRESENT
    return Known.QUERIED if triple.startswith("x86_64-") else Known.ABSENT


def _this_machine_has_them() -> bool:
    """Detect the instructions of this machine's processor, whatever Numba's target."""
    try:
        return bool(binding.get_host_cpu_features().get("sha"))
    except RuntimeError:  # LLVM cannot detect them
        return False


SHA: Final = _known()

PRESENCE: Final = ctypes.c_uint8(SHA is not Known.ABSENT and _this_machine_has_them())
"""The byte that code reads when it runs. Written here, and by tests of both values."""

binding.add_symbol(NAME, ctypes.addressof(PRESENCE))


def _emit_question(
    _context: CodeContext, builder: ir.IRBuilder, _signature: CodeContext, _arguments: list[ir.Value]
) -> ir.Value:
    presence = builder.module.globals.get(NAME) or ir.GlobalVariable(builder.module, BYTE, NAME)
    return builder.icmp_unsigned("!=", builder.load(presence), ir.Constant(BYTE, 0))


def _typed_question(_context: object) -> tuple[object, Callable[..., ir.Value]]:
    return types.boolean(), _emit_question


has_sha_instructions: Final = cast("Callable[[], bool]", intrinsic(_typed_question))
"""Whether the processor has the instructions, in compiled code. One load."""
