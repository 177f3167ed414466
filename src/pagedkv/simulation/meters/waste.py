"""Slots without a token: in the blocks in use, in blocks of other sizes, and in contiguous reservations.

The three reservations are those of the systems to which PagedAttention is compared (Kwon et al., SOSP 2023, sections
3.1 and 6.1: Orca with an oracle, with powers of two, and with the maximum length). Each figure is a mean over decode
steps.
"""

from typing import Final

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.simulation.running_rows import RunningRows

__all__ = ["WasteMeter"]

BLOCK_SIZES: Final = (1, 8, 16, 32, 64, 128, 256)


class WasteMeter:
    """Sums of waste over decode steps.

    Args:
        block_size: block size of the first group.
        max_length: tokens of the largest reservation, at least the longest recorded sequence; None: exactly that.
    """

    def __init__(self, block_size: int, max_length: int | None) -> None:
        self._block_size = block_size
        self._max_length = max_length
        self._longest = 1
        self._num_steps = 0
        self._sum = 0.0
        self._sums_by_size = [0.0] * len(BLOCK_SIZES)
        self._sum_exact = 0.0
        self._sum_power = 0.0
        self._sum_of_mean_lengths = 0.0

    def note_length(self, length: int) -> None:
        """Record the length of a sequence of the trace."""
        self._longest = max(self._longest, length)

    def measure(self, lengths: Int32Array, running: RunningRows, num_live: int, lengths_of_tails: Int32Array) -> None:
        """Measure one decode step.

        Args:
            lengths: int32 ``[sequences]``, tokens of each, at least 1.
            running: the sequences.
            num_live: blocks in use.
            lengths_of_tails: int32, lengths of sequences with distinct last blocks, since the last block of a prompt
                may be shared.
        """
        num_tokens = int(lengths.sum())
        num_empty = _count_slots(lengths_of_tails, self._block_size) - int(lengths_of_tails.sum())
        self._num_steps += 1
        self._sum += num_empty / (num_live * self._block_size)
        for place, block_size in enumerate(BLOCK_SIZES):
            self._sums_by_size[place] += 1 - num_tokens / _count_slots(lengths, block_size)
        self._sum_exact += 1 - num_tokens / running.num_final_tokens
        self._sum_power += 1 - num_tokens / running.num_power_tokens
        self._sum_of_mean_lengths += num_tokens / len(lengths)

    def as_dict(self) -> dict[str, object]:
        """Return the means for JSON."""
        num_steps = max(1, self._num_steps)
        max_length = max(self._max_length or 0, self._longest)
        mean_maximum = (self._num_steps - self._sum_of_mean_lengths / max_length) / num_steps
        return {
            "mean": float(self._sum / num_steps),
            "by_block_size": {
                str(size): float(total / num_steps) for size, total in zip(BLOCK_SIZES, self._sums_by_size, strict=True)
            },
            "contiguous": {
                "exact": float(self._sum_exact / num_steps),
                "power_of_two": float(self._sum_power / num_steps),
                "maximum": float(mean_maximum),
            },
            "max_length": max_length,
        }


@compiled
def _count_slots(lengths: Int32Array, block_size: int) -> int:
    """Count the slots of the blocks of sequences with these lengths."""
    num_slots = 0
    for length in lengths:
        num_slots += -(-length // block_size) * block_size
    return num_slots
