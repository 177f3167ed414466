"""SHA-256 (FIPS 180-4) as compiled functions, to be called from compiled loops.

This module contains the compression function and the padding. Messages and digests are arrays of the caller.

hashlib is not used since compiled loops cannot call it, and called from Python it takes 290 ns for 100 bytes, against
75 ns here, not counting the construction of the bytes object (all numbers: one core of a Zen 5 EPYC). Two compression
functions with one signature give the same words:

- ``compress_portable`` follows the text of FIPS 180-4: 210 ns for 64 bytes. It also runs interpreted.
- ``compress_hardware`` uses the SHA instructions of x86: 33 ns, which is the processor's limit for one chain
  (32 dependent instructions of 4 cycles). It is None where the instructions are missing.

``compress`` is the faster one. Code compiled for this machine's processor contains only that one. Code for a class of
processors (:mod:`pagedkv.compilation.targets`), some of which have the instructions, contains both and chooses when it
runs: it reads a byte that each process writes once. The byte is a named symbol, resolved when code is loaded, so that
code on disk contains no address of a process.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic, is_jitted

from pagedkv.compilation.compiled import compiled, is_compiling_at_all
from pagedkv.compilation.targets import own_processor

Words: TypeAlias = npt.NDArray[np.uint32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Compress: TypeAlias = Callable[[Words, Bytes, int], None]
CodeContext: TypeAlias = Any  # Numba's class; its methods are not annotated
STATE_WORDS: Final = 8
CHUNK_NBYTES: Final = 64  # FIPS 180-4 calls this a block, which means KV memory here
LENGTH_NBYTES: Final = 8
NUM_ROUNDS: Final = 64
NUM_CHUNK_WORDS: Final = 16
EMPTY_WINDOW: Final = (0,) * NUM_CHUNK_WORDS
MASK: Final = 0xFFFFFFFF
# FIPS 180-4, 5.3.3.
INITIAL_STATE: Final = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
# FIPS 180-4, 4.2.2. An array, because compiled code indexes a tuple by a chain of comparisons.
ROUND_CONSTANTS: Final = np.array(
    (
        0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
        0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
        0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
        0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
        0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
        0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
        0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
        0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
    ),
    np.int64,
)  # fmt: skip
ROUND_CONSTANTS.flags.writeable = False


# The portable compression. Words are kept as int (int64 when compiled) and masked to 32 bits after each
# sum: NumPy's uint32 warns of overflow when interpreted, and Numba widens it to uint64, of which a sum
# with a signed integer is a float. Schedule and working variables are tuples: they live in registers and
# on the stack, where a local array would be allocated on the heap at each call.


@compiled
def _big_endian_word(chunk: Bytes, at: int) -> int:
    high = (int(chunk[at]) << 24) | (int(chunk[at + 1]) << 16)
    low = (int(chunk[at + 2]) << 8) | int(chunk[at + 3])
    return (high | low) & MASK


@compiled
def _shifted(window: tuple[int, ...], word: int) -> tuple[int, ...]:
    return (*window[1:], word)


@compiled
def _first_words(chunk: Bytes) -> tuple[int, ...]:
    window: tuple[int, ...] = EMPTY_WINDOW  # the compiled type includes the length, so words are shifted in
    for index in range(NUM_CHUNK_WORDS):
        window = _shifted(window, _big_endian_word(chunk, 4 * index))
    return window


@compiled
def _doubled(word: int) -> int:
    """Join two copies of a word, so that a right shift leaves the rotated word in the low half."""
    return (word << 32) | word


@compiled
def _next_word(window: tuple[int, ...]) -> int:
    """Compute the word of the message schedule that follows the last 16 (FIPS 180-4, 6.2.2, step 1)."""
    early, late = _doubled(window[1]), _doubled(window[14])
    sigma0 = ((early >> 7) ^ (early >> 18) ^ (window[1] >> 3)) & MASK
    sigma1 = ((late >> 17) ^ (late >> 19) ^ (window[14] >> 10)) & MASK
    return (sigma1 + window[9] + sigma0 + window[0]) & MASK


@compiled
def _after_round(working: tuple[int, ...], addend: int) -> tuple[int, ...]:
    """Apply one round to the working variables; ``addend`` is the round's constant plus its word (step 3)."""
    a, b, c, d, e, f, g, h = working
    aa, ee = _doubled(a), _doubled(e)
    choice = (e & f) ^ (~e & g)
    majority = (a & b) ^ (a & c) ^ (b & c)
    t1 = h + (((ee >> 6) ^ (ee >> 11) ^ (ee >> 25)) & MASK) + choice + addend
    t2 = (((aa >> 2) ^ (aa >> 13) ^ (aa >> 22)) & MASK) + majority
    return ((t1 + t2) & MASK, a, b, c, (d + t1) & MASK, e, f, g)


@compiled
def _working_variables(state: Words) -> tuple[int, ...]:
    a, b, c, d = int(state[0]) & MASK, int(state[1]) & MASK, int(state[2]) & MASK, int(state[3]) & MASK
    e, f, g, h = int(state[4]) & MASK, int(state[5]) & MASK, int(state[6]) & MASK, int(state[7]) & MASK
    return (a, b, c, d, e, f, g, h)


@compiled
def compress_portable(state: Words, message: Bytes, offset: int) -> None:
    """Compress as :func:`compress` does, by plain integer arithmetic, on any processor or interpreted."""
    chunk = message[offset : offset + CHUNK_NBYTES]
    window = _first_words(chunk)
    working = _working_variables(state)
    for number in range(NUM_ROUNDS):
        working = _after_round(working, int(ROUND_CONSTANTS[number]) + window[0])
        window = _shifted(window, _next_word(window))
    for index in range(STATE_WORDS):
        state[index] = (int(state[index]) + working[index]) & MASK


# The hardware compression, by LLVM's names for the SHA instructions of x86 (Intel, "Intel SHA Extensions",
# 2013). They hold the working variables in two vectors, abef and cdgh, with lanes from the last letter
# to the first; one sha256rnds2 does two rounds and gives the new abef, and the old abef is the new cdgh.

NUM_QUADS: Final = NUM_ROUNDS // 4  # rounds and words of the schedule are handled in fours: a vector of words
UINT32X4: Final = ir.VectorType(ir.IntType(32), 4)
NAME_OF_FUNCTION: Final = "pagedkv_compress_by_sha_instructions"


def _instruction(builder: ir.IRBuilder, name: str, *operands: ir.Value) -> ir.Value:
    signature = ir.FunctionType(UINT32X4, [UINT32X4] * len(operands))
    return builder.call(builder.module.declare_intrinsic(name, fnty=signature), operands)


def _lanes(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, lanes: tuple[int, int, int, int]) -> ir.Value:
    """Select four lanes of two vectors: 0 to 3 of the first, 4 to 7 of the second."""
    return builder.shuffle_vector(low, high, ir.Constant(UINT32X4, lanes))


def _vector_at(builder: ir.IRBuilder, pointer: ir.Value, index: int) -> ir.Value:
    vectors = builder.bitcast(pointer, UINT32X4.as_pointer())
    return builder.gep(vectors, [ir.Constant(ir.IntType(64), index)])


def _emit_schedule(builder: ir.IRBuilder, chunk: ir.Value) -> list[ir.Value]:
    """Emit the 64 words of the schedule, as 16 vectors, from a pointer to 64 bytes."""
    quads = []
    for index in range(4):
        loaded = builder.load(_vector_at(builder, chunk, index), align=1)
        quads.append(_instruction(builder, "llvm.bswap.v4i32", loaded))
    for index in range(4, NUM_QUADS):
        sixteen, twelve, eight, four = quads[index - 4 :]
        partial = _instruction(builder, "llvm.x86.sha256msg1", sixteen, twelve)
        partial = builder.add(partial, _lanes(builder, eight, four, (1, 2, 3, 4)))
        quads.append(_instruction(builder, "llvm.x86.sha256msg2", partial, four))
    return quads


def _emit_rounds(
    builder: ir.IRBuilder, abef: ir.Value, cdgh: ir.Value, schedule: list[ir.Value]
) -> tuple[ir.Value, ir.Value]:
    for quad, words in enumerate(schedule):
        constants = ir.Constant(UINT32X4, ROUND_CONSTANTS[4 * quad : 4 * quad + 4].tolist())
        addends = builder.add(words, constants)
        cdgh = _instruction(builder, "llvm.x86.sha256rnds2", cdgh, abef, addends)
        upper = _lanes(builder, addends, addends, (2, 3, 2, 3))
        abef = _instruction(builder, "llvm.x86.sha256rnds2", abef, cdgh, upper)
    return abef, cdgh


def _emit_compression(builder: ir.IRBuilder, state: ir.Value, chunk: ir.Value) -> None:
    """Emit FIPS 180-4, 6.2.2, from pointers to eight words and to 64 bytes, both unaligned."""
    abcd_at, efgh_at = _vector_at(builder, state, 0), _vector_at(builder, state, 1)
    abcd, efgh = builder.load(abcd_at, align=1), builder.load(efgh_at, align=1)
    abef = _lanes(builder, abcd, efgh, (5, 4, 1, 0))
    cdgh = _lanes(builder, abcd, efgh, (7, 6, 3, 2))
    new_abef, new_cdgh = _emit_rounds(builder, abef, cdgh, _emit_schedule(builder, chunk))
    abef, cdgh = builder.add(abef, new_abef), builder.add(cdgh, new_cdgh)
    builder.store(_lanes(builder, abef, cdgh, (3, 2, 7, 6)), abcd_at, align=1)
    builder.store(_lanes(builder, abef, cdgh, (1, 0, 5, 4)), efgh_at, align=1)


def _function_of_its_own(module: ir.Module) -> ir.Function:
    """Return a module's function that compresses, in which LLVM may use the instructions, whatever the target.

    It is not inlined, and in the encoding of SSE, in which alone the instructions exist. Each of them waits while the
    upper halves of AVX's registers are in use: a digest took 12 us there instead of 0.1. LLVM clears them before calls.
    """
    if NAME_OF_FUNCTION not in module.globals:
        signature = ir.FunctionType(ir.VoidType(), [ir.IntType(32).as_pointer(), ir.IntType(8).as_pointer()])
        function = ir.Function(module, signature, NAME_OF_FUNCTION)
        function.linkage = "internal"
        function.attributes.add("noinline")
        set.add(function.attributes, FEATURES)  # llvmlite's own method refuses attributes with values
        builder = ir.IRBuilder(function.append_basic_block())
        _emit_compression(builder, *function.args)
        builder.ret_void()
    return module.globals[NAME_OF_FUNCTION]


def _emit_call(
    context: CodeContext, builder: ir.IRBuilder, signature: CodeContext, arguments: list[ir.Value]
) -> ir.Value:
    state_type, message_type, offset_type = signature.args
    state = context.make_array(state_type)(context, builder, arguments[0])
    message = context.make_array(message_type)(context, builder, arguments[1])
    offset = context.cast(builder, arguments[2], offset_type, types.intp)
    chunk = builder.gep(message.data, [offset])
    builder.call(_function_of_its_own(builder.module), [state.data, chunk])
    return context.get_dummy_value()


def _is_row_of(dtype: types.Type, array: types.Type) -> "TypeGuard[types.Array[types.Type]]":
    return isinstance(array, types.Array) and array.dtype == dtype and array.ndim == 1 and array.layout == "C"


def _typed_compression(
    _context: object, state: types.Type, message: types.Type, offset: types.Type
) -> tuple[object, Callable[..., ir.Value]]:
    """Accept only the array types that ``compress`` documents; others would be read as if they were these."""
    if not (_is_row_of(types.uint32, state) and state.mutable):
        raise TypingError(f"state must be a contiguous, writable uint32 array of one dimension, not {state}")
    if not _is_row_of(types.uint8, message):
        raise TypingError(f"message must be a contiguous uint8 array of one dimension, not {message}")
    return types.void(state, message, offset), _emit_call


_compress_by_instructions: Final = cast("Compress", intrinsic(_typed_compression))


@compiled
def _compress_hardware(state: Words, message: Bytes, offset: int) -> None:
    """Compress as :func:`compress` does, by the SHA instructions of x86."""
    _compress_by_instructions(state, message, offset)


@compiled
def _compress_querying(state: Words, message: Bytes, offset: int) -> None:
    """Compress as :func:`compress` does, by the faster way of the processor at hand."""
    if has_sha_instructions():
        _compress_by_instructions(state, message, offset)
    else:
        compress_portable(state, message, offset)


class Known(Enum):
    """What is known about the instructions when code is compiled."""

    ABSENT = "absent"
    PRESENT = "present"
    QUERIED = "queried when code runs"


COMPRESS: Final[Mapping[Known, Compress]] = MappingProxyType(
    {Known.PRESENT: _compress_hardware, Known.QUERIED: _compress_querying, Known.ABSENT: compress_portable}
)


def _this_machine_has_them() -> bool:
    """Detect the instructions of this machine's processor, whatever Numba's target."""
    try:
        return bool(binding.get_host_cpu_features().get("sha"))
    except RuntimeError:  # LLVM cannot detect them
        return False


def _known() -> Known:
    if not is_compiling_at_all():
        return Known.ABSENT
    triple, _name, features = own_processor()
    if "+sha" in features.split(","):
        return Known.PRESENT
    return Known.QUERIED if triple.startswith("x86_64-") else Known.ABSENT


SHA: Final = _known()
PRESENCE: Final = ctypes.c_uint8(SHA is not Known.ABSENT and _this_machine_has_them())
"""The byte that code reads when it runs. Written here, and by tests of both values."""
compress_hardware: Final[Compress | None] = _compress_hardware if PRESENCE.value else None
"""The same as ``compress``, or None without these instructions."""
compress: Final[Compress] = COMPRESS[SHA]
"""Absorb the 64 bytes at ``message[offset:]`` into ``state`` (FIPS 180-4, 6.2.2).

``state`` is uint32 ``[8]``, from :func:`initial_state` at first; ``message`` is uint8 ``[nbytes]``; both are
contiguous. Changes ``state`` alone. Bounds are not checked: ``0 <= offset <= nbytes - 64``.
"""


@compiled
def initial_state(out: Words) -> None:
    """Write the state before the first 64 bytes into ``out``, uint32 ``[8]`` (FIPS 180-4, 5.3.3)."""
    for index in range(STATE_WORDS):
        out[index] = INITIAL_STATE[index]


@compiled
def padded_nbytes(length: int) -> int:
    """Return the bytes of a message of ``length`` bytes with its padding: 9 more, up to a multiple of 64."""
    return (length + 1 + LENGTH_NBYTES + CHUNK_NBYTES - 1) // CHUNK_NBYTES * CHUNK_NBYTES


@compiled
def pad_message(message: Bytes, length: int) -> int:
    """Write the padding after ``message[:length]`` (FIPS 180-4, 5.1.1); return the padded length.

    ::

        message | 0x80 | zeros | bits of the message, 8 bytes big-endian
        0       length                                                  padded_nbytes(length)
    """
    end = padded_nbytes(length)
    message[length] = 0x80
    message[length + 1 : end] = 0
    # Writes only the bytes of the length that are not zero: writing all eight takes 16 ns more, of 70.
    num_bits = 8 * length
    place = end - 1
    while num_bits > 0:
        message[place] = num_bits & 0xFF
        num_bits >>= 8
        place -= 1
    return end


@compiled
def _sha256_compiled(message: Bytes, length: int, out: Words) -> None:
    initial_state(out)
    for offset in range(0, pad_message(message, length), CHUNK_NBYTES):
        compress(out, message, offset)


def _sha256_interpreted(message: Bytes, length: int, out: Words) -> None:
    # Python takes 0.15 ms for 64 bytes.
    message[padded_nbytes(length) - 1] = 0  # padding: an IndexError where there is no room for it
    out[:] = np.frombuffer(hashlib.sha256(message[:length].tobytes()).digest(), ">u4")


sha256_message: Final = _sha256_compiled if is_jitted(_sha256_compiled) else _sha256_interpreted
"""Digest ``message[:length]`` into ``out``.

Args:
    message: uint8 ``[nbytes]``, contiguous, with ``nbytes >= padded_nbytes(length)``: the padding is written
        in place, so that nothing is copied. Compiled code does not check that there is room.
    length: bytes to digest, int64.
    out: uint32 ``[8]``, contiguous: the digest, most significant word first, each in the machine's own
        byte order (``out.astype(">u4").tobytes()`` equals hashlib's digest).

Changes ``message[length:padded_nbytes(length)]`` and ``out``. O(length).
"""
NAME: Final = "pagedkv_has_sha_instructions"
BYTE: Final = ir.IntType(8)
FEATURES: Final = '"target-cpu"="x86-64" "target-features"="+sse4.1,+ssse3,+sha"'
"""The attributes of a function in which LLVM may use the instructions, whatever the target.

Features of a function replace those that Numba states, so without a processor of its own LLVM would use all features of
the named one, also those that this machine lacks: a hypervisor may hide AVX-512 of a processor that is named for it.
"""
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
