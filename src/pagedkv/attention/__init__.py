"""Attention over blocks: an interface by layer number and step, and its back ends.

In the order in which data flows::

    backend     AttentionBackend, the interface, with the parameters of a layer and of a step
    reference   attention by its definition, on gathered keys; the others are tested against it
    cpu         compiled loops that read blocks in place, SDPA for prompts
    on_gpu      Triton's kernels, for decoding rows and prompts alike
    flash_infer, varlen   kernels of other packages, if preferred and usable; facts
    selection   chooses the back end of a storage
    selected    attention to the keys that a model's indexer selects, in rows
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
from pagedkv.attention.reference import ReferenceBackend, Span, gather, spans
from pagedkv.attention.selected import KeysInRows
from pagedkv.attention.selection import LayerChoice, PreferringBackend, backend_for
from pagedkv.attention.unfolding import Unfolding, UnfoldingReader

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "CPUBackend",
    "GroupMetadata",
    "KeysInRows",
    "KnownRanges",
    "LayerChoice",
    "PreferringBackend",
    "ReferenceBackend",
    "Span",
    "StepMetadata",
    "TritonBackend",
    "Unfolding",
    "UnfoldingReader",
    "backend_for",
    "gather",
    "spans",
]
