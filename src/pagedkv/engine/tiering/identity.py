"""The identity of an engine's content in tiers: layout, weights, code, and whatever else changes keys and values.

It is the same in every process that loads the same model with the same settings, and another one if anything differs
that could change a byte. Its fingerprint names the subtree of a store, so a tier never mixes models.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import chain
from typing import Any, Final, TypeAlias, assert_never

import torch

from pagedkv.contract.extras import needing
from pagedkv.contract.spec import GroupSpec
from pagedkv.device import GroupShape, KeyValueShape, LatentShape, StateShape
from pagedkv.engine import compat
from pagedkv.engine.borrowing import BorrowedModel
from pagedkv.engine.tiering.model_code import code_digest
from pagedkv.tiers import GroupLayout, Identity, ModelIdentity

__all__ = ["Scales", "identity_of", "model_digest"]

FORMAT: Final = "1"
"""Raised when this engine lays blocks out, or computes them, in another way than before."""
PIECE_NBYTES: Final = 2**26
UNIMPORTANT: Final = frozenset({"transformers_version", "architectures", "dtype", "torch_dtype"})
ADAPTER_STATE: Final = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""What PEFT's layers keep of adapters, as in :mod:`pagedkv.engine.model_watch`."""


Scales: TypeAlias = tuple[tuple[float, ...], ...]
"""The scales of each group that is stored in eight bits; of other groups none."""


def identity_of(
    model: compat.Model,
    weights: bytes,
    specs: Sequence[GroupSpec],
    shapes: Sequence[GroupShape],
    blocks_per_run: int,
    scales: Scales,
    draft: compat.Model | None = None,
) -> Identity:
    """Return the identity of what a model computes.

    Args:
        model: the model; its class, configuration and device are read.
        weights: digest of its weights and its code (:func:`model_digest`).
        specs: the groups; shapes: what their blocks hold, of all heads; scales: by which scales.
        blocks_per_run: blocks of a run, since keys of other runs have other content.
        draft: the model whose layers the last groups are of; None: there is none.

    Raises:
        MissingExtraError: xxhash is not installed.
        UnsupportedModelError: the draft model has hooks of its forward pass.

    Cost: the weights of a draft model are read once.
    """
    layouts = tuple(
        replace(_layout(spec, shape), scales=own) for spec, shape, own in zip(specs, shapes, scales, strict=True)
    )
    drafting = () if draft is None else (("draft", _text_of(draft)),)
    versions = (
        ("engine", FORMAT),
        ("torch", torch.__version__),
        ("transformers", compat.version()),
        ("device", model.device.type),
        ("config", hashlib.sha256(_config_text(model)).hexdigest()),
        ("groups", repr(tuple(specs))),
        ("blocks_per_run", str(blocks_per_run)),
        *drafting,
    )
    return Identity(layouts, ModelIdentity(type(model).__name__, weights, versions=versions))


def _text_of(draft: compat.Model) -> str:
    """Identify a draft model: its class, its configuration, its weights and its code."""
    config = hashlib.sha256(_config_text(draft)).hexdigest()
    return f"{type(draft).__name__} {config} {model_digest(draft).hex()}"


def model_digest(model: compat.Model) -> bytes:
    """Digest all parameters and buffers, by name, type, shape and bytes, and the model's code: 32 bytes.

    Raises:
        MissingExtraError: xxhash is not installed.
        UnsupportedModelError: the model has hooks of its forward pass.

    Cost: the weights are read once, at 20 GB/s from host memory; the code as :func:`code_digest` tells.
    """
    with needing("tiers", "a digest of the weights"):
        xxhash: Any = import_module("xxhash")
    with BorrowedModel(model).alone():  # a pass of another engine lends the model a hook or compiled code meanwhile
        digest = hashlib.sha256(code_digest(model))
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda named: named[0]):
        content = xxhash.xxh3_128()
        for piece in _pieces(tensor):
            content.update(piece)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + content.digest())
    for name, module in model.named_modules():
        state = [repr(getattr(module, attribute, None)) for attribute in ADAPTER_STATE]
        if hasattr(module, ADAPTER_STATE[0]):
            digest.update(f"{name} {state}".encode())
    return digest.digest()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Read a tensor's bytes piece by piece, so that a copy on the host is small."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), PIECE_NBYTES):
        yield flat[begin : begin + PIECE_NBYTES].cpu().numpy().data


def _config_text(model: compat.Model) -> bytes:
    """Write the model's configuration, without what does not change a computation."""
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name not in UNIMPORTANT
    }
    return json.dumps(config, sort_keys=True, default=str).encode()


def _layout(spec: GroupSpec, shape: GroupShape) -> GroupLayout:
    """Describe a block of a group."""
    size = spec.block_size
    match shape:
        case KeyValueShape() if shape.value_dim == shape.key_dim:
            sizes = (shape.num_layers, 2, size, shape.num_heads, shape.key_dim)
            return _described(spec.pool, size, shape.dtype, "LKNHC", sizes)
        case LatentShape():
            return _described(spec.pool, size, shape.dtype, "LNC", (shape.num_layers, size, shape.dim))
        case KeyValueShape() | StateShape():  # parts of several sizes: the name describes them
            return _described(f"{spec.pool} {shape!r}", size, torch.uint8, "C", (shape.block_nbytes(size),))
        case _:
            assert_never(shape)


def _described(name: str, block_size: int, dtype: torch.dtype, letters: str, sizes: tuple[int, ...]) -> GroupLayout:
    """Describe a contiguous block."""
    kind = str(dtype).removeprefix("torch.")
    return GroupLayout(name, block_size, kind, letters, sizes, tuple(torch.empty(sizes, device="meta").stride()))
