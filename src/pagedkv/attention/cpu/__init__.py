"""Attention on a CPU: compiled loops read blocks in place for decoding sequences; prompts use SDPA on gathered keys.

In the order in which data flows::

    backend    CPUBackend: chooses the path of each sequence
    memory     a layer's keys as a flat array and strides, for compiled loops
    decode     one query a sequence, blocks read in place
    prefill    many queries a sequence, keys gathered
"""

from pagedkv.attention.cpu.backend import CPUBackend

__all__ = ["CPUBackend"]
