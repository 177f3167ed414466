"""Attention over blocks. Public import path of :mod:`pagedkv.memory.attention`."""

from pagedkv.memory.attention import (
    AttentionBackend,
    AttentionLayer,
    CPUBackend,
    GroupMetadata,
    KnownRanges,
    LayerChoice,
    PreferringBackend,
    ReferenceBackend,
    StepMetadata,
    TritonBackend,
    Unfolding,
    UnfoldingReader,
    backend_for,
)

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
]
