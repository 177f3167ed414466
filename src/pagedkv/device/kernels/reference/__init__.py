"""The kernels in plain torch: used on a CPU, and as the reference in tests of the Triton kernels."""

from pagedkv.device.kernels.reference.attention import attend_rows
from pagedkv.device.kernels.reference.blocks import copy_blocks, zero_blocks
from pagedkv.device.kernels.reference.drawing import draw_tokens, noise_words
from pagedkv.device.kernels.reference.filtering import find_least
from pagedkv.device.kernels.reference.lists import list_work
from pagedkv.device.kernels.reference.states import read_states, write_states
from pagedkv.device.kernels.reference.tables import gather_rows, map_slots, pull_packet, step_tables
from pagedkv.device.kernels.reference.tokens import write_tokens

__all__ = [
    "attend_rows",
    "copy_blocks",
    "draw_tokens",
    "find_least",
    "gather_rows",
    "list_work",
    "map_slots",
    "noise_words",
    "pull_packet",
    "read_states",
    "step_tables",
    "write_states",
    "write_tokens",
    "zero_blocks",
]
