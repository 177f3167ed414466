"""Attention over blocks: an interface by layer number and step, and its back ends.

In the order in which data flows::

    layer       AttentionLayer: the parameters of a layer
    metadata    StepMetadata: the parameters of a step
    backend     AttentionBackend: the interface
    gathering   gathers the keys of one sequence, and computes which keys its queries see
    reference   attention by its definition; the others are tested against it
    on_gpu      Triton's kernels, for decoding rows and prompts alike
    preferring  kernels of other packages, if preferred and usable: flash_infer, varlen; facts, page_lists
    cpu         compiled loops that read blocks in place, SDPA for prompts
    selection   chooses the back end of a storage
    unfolding   attention to latents without unfolding them, by matrices read from a model

The package does not depend on models and schedulers. A back end takes a layer's number and a step's metadata; it never
changes a cache object. Needs torch (``pip install 'pagedkv[torch]'``).
"""

from pagedkv.contract.extras import needing

with needing("torch", "pagedkv.attention"):
    import torch  # noqa: F401 - imported first, so that its absence raises our MissingExtraError

from pagedkv.attention.backend import AttentionBackend, AttentionLayer, GroupMetadata, KnownRanges, StepMetadata
from pagedkv.attention.cpu import CPUBackend
from pagedkv.attention.on_gpu import TritonBackend
from pagedkv.attention.reference import ReferenceBackend, gather, spans
from pagedkv.attention.selection import LayerChoice, PreferringBackend, backend_for
from pagedkv.attention.unfolding import Unfolding, UnfoldingReader

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "CPUBackend",
    "GroupMetadata",
    "KnownRanges",
    "LayerChoice",
    "PreferringBackend",
    "ReferenceBackend",
    "StepMetadata",
    "TritonBackend",
    "Unfolding",
    "UnfoldingReader",
    "backend_for",
    "gather",
    "spans",
]
