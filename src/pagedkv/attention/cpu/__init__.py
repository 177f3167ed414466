"""Attention on a CPU: compiled loops read blocks in place for decoding sequences; prompts use SDPA on gathered keys.

In the order in which data flows::

    backend    CPUBackend: chooses the path of each sequence; a layer's keys as a flat array and strides
    decode     one query a sequence, blocks read in place
"""

from pagedkv.attention.cpu.backend import CPUBackend

__all__ = ["CPUBackend"]
