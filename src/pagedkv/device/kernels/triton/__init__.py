"""The kernels in Triton, for GPUs, and for Triton's interpreter, which runs them on a CPU in tests."""

from pagedkv.device.kernels.triton.attention import attend_rows
from pagedkv.device.kernels.triton.blocks import copy_blocks, zero_blocks
from pagedkv.device.kernels.triton.calls import gather_rows, map_slots
from pagedkv.device.kernels.triton.drawing import draw_tokens, noise_words
from pagedkv.device.kernels.triton.filtering import find_least
from pagedkv.device.kernels.triton.lists import list_work
from pagedkv.device.kernels.triton.packets import pull_packet
from pagedkv.device.kernels.triton.states import read_states, write_states
from pagedkv.device.kernels.triton.tables import step_tables
from pagedkv.device.kernels.triton.tokens import write_tokens

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
