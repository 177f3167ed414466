"""The identity of an engine's content in tiers: layout, weights, code, and whatever else changes keys and values.

It is the same in every process that loads the same model with the same settings, and another one if anything differs
that could change a byte. Its fingerprint names the subtree of a store, so a tier never mixes models.

A model is known by its code and the numbers in its modules too. Two models of one class, one configuration and equal
weights may compute different keys: another scaling of attention, another epsilon of a norm, another activation, a
patched method. So its digest covers each module, with weights or not: its name, its class, the class's methods, and the
module's own attributes.

Methods are covered by their compiled code, not by the text of their file: that is what runs, also where the file has
changed since, or where there is none. Functions that a method calls count too, where they stand in the same file; code
of other files has the version of its package in the identity. Nothing in it depends on a process or a machine: no id,
no address, no path, no order of a set. Another minor version of Python compiles to other code, and so is another
identity.

A hook of a forward pass may do anything, also depend on what no attribute shows. A model with one has no digest.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final, TypeAlias, assert_never, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from pagedkv.contract.extras import needing
from pagedkv.contract.spec import GroupSpec
from pagedkv.device import GroupShape, KeyValueShape, LatentShape, StateShape
from pagedkv.errors import UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.compat import BorrowedModel
from pagedkv.tiers import GroupLayout, Identity, ModelIdentity

FORMAT: Final = "1"
"""Raised when this engine lays blocks out, or computes them, in another way than before."""
PIECE_NBYTES: Final = 2**26
UNIMPORTANT: Final = frozenset({"transformers_version", "architectures", "dtype", "torch_dtype"})
ADAPTER_STATE: Final = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""What PEFT's layers keep of adapters, as in :mod:`pagedkv.engine.captured_passes`."""
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
    is_compressed = isinstance(shape, LatentShape) and shape.ratio > 1
    if not isinstance(shape, StateShape) and (shape.companions or is_compressed):
        told = f"{spec.pool} {shape!r} {shape.companions!r}"
        return _described(told, size, torch.uint8, "C", (shape.block_nbytes(size),))
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


HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
GLOBAL_HOOKS: Final = ("_global_forward_pre_hooks", "_global_forward_hooks")
SCALARS: Final = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype)
NOT_COMPUTED: Final = frozenset(
    {
        *vars(nn.Module()),  # torch's own tables: weights and modules are covered by themselves
        *("name_or_path", "hf_device_map", "gradient_checkpointing", "loss_type", "all_tied_weights_keys"),
        "_is_hf_initialized",
    }
)
"""Attributes that change no keys, some of which differ between a model that was made and the same one loaded."""
Text: TypeAlias = Iterator[str]


def require_no_hooks(model: compat.Model) -> None:
    """Refuse a model that has hooks of its forward pass. Raises UnsupportedModelError with the module's name."""
    for place in GLOBAL_HOOKS:
        for hook in getattr(of_all_modules, place).values():
            raise UnsupportedModelError(_refusal("every module of torch", hook))
    for name, module in model.named_modules():
        for place in HOOKS:
            for hook in getattr(module, place).values():
                raise UnsupportedModelError(_refusal(f"{name or 'the model'} ({type(module).__name__})", hook))


def _refusal(where: str, hook: Callable[..., object]) -> str:
    return (
        f"{where} has a hook of its forward pass, {getattr(hook, '__qualname__', type(hook).__name__)}: what it "
        "changes cannot be told from outside, and tiers would give its keys to a model without it. Remove the hook, or "
        "leave out `tiers`"
    )


def code_digest(model: compat.Model) -> bytes:
    """Digest what a model computes besides its weights: 32 bytes. Raises UnsupportedModelError: it has hooks.

    Cost: 21 to 35 ms for a Llama of 30 layers, 12 of them for the code of its classes, on one core of two.
    """
    require_no_hooks(model)
    classes: dict[type, str] = {}
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in classes:
            classes[kind] = hashlib.sha256("\n".join(_class(kind)).encode()).hexdigest()
        digest.update(f"\n{name} {kind.__qualname__} {classes[kind]}\n".encode())
        digest.update("\n".join(_attributes(module)).encode())
    return digest.digest()


def _attributes(module: nn.Module) -> Text:
    """Yield a module's own attributes. Its training counts, since a dropout acts in training alone."""
    yield f"training {module.training}"
    for name, value in sorted(vars(module).items()):
        if _may_compute(type(module), name):
            yield name
            yield from _Reader(type(module).__module__).value(value)


def _may_compute(kind: type, name: str) -> bool:
    """Whether an attribute may change keys. Private ones of whole models are how transformers loads and places them."""
    return name not in NOT_COMPUTED and not (name.startswith("_") and issubclass(kind, compat.Model))


def _class(kind: type) -> Text:
    """Yield the code and the numbers of a class, and of those that it inherits from."""
    for each in kind.__mro__:
        if each is object or each in nn.Module.__mro__ or each in LIBRARY:
            continue  # the identity has their versions
        reader = _Reader(each.__module__)
        yield each.__qualname__
        for name, value in sorted(vars(each).items()):
            is_table = name.startswith("__") or not _may_compute(each, name)  # a docstring, a file's name, a plan
            if isinstance(value, FunctionType) or not is_table:
                yield name
                yield from reader.value(value)


LIBRARY: Final = frozenset(compat.Model.__mro__)


@final
class _Reader:
    """Writes values as lines of text.

    Args:
        file: module of the code that is read; functions that it calls are read too if they are of this module.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._seen: set[int] = set()

    def value(self, value: object) -> Text:
        """Yield a value: numbers, containers of them, functions and tensors whole, and of other objects the class."""
        match value:
            case _ if isinstance(value, SCALARS):
                yield f"{type(value).__name__} {value!r}"
            case list() | tuple():
                yield f"{type(value).__name__} {len(value)}"
                for each in value:
                    yield from self.value(each)
            case set() | frozenset():
                yield from sorted(" ".join(self.value(each)) for each in value)
            case Mapping():
                yield f"mapping {len(value)}"
                yield from sorted(" ".join([*self.value(key), *self.value(each)]) for key, each in value.items())
            case torch.Tensor():
                content = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
                yield f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content.data).hexdigest()}"
            case np.ndarray() | np.generic():
                yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
            case _:
                yield from self._callable(value)

    def _callable(self, value: object) -> Text:
        match value:
            case FunctionType():
                yield from self._function(value)
            case BuiltinFunctionType() | type():
                yield value.__qualname__  # the module of code from a hub is named after its folder
            case MethodType() | staticmethod() | classmethod():
                yield from self.value(value.__func__)
            case property():
                yield from self.value((value.fget, value.fset))
            case functools.cached_property():
                yield from self.value(value.func)
            case functools.partial():
                yield from self.value((value.func, value.args, value.keywords))
            case _:
                yield f"a {type(value).__qualname__}"

    def _function(self, function: FunctionType) -> Text:
        """Yield a function: its code, what it encloses, and the functions and numbers of its file that it names."""
        yield from self._code(function.__code__)
        yield from self.value((function.__defaults__, function.__kwdefaults__))
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        for cell in function.__closure__ or ():
            yield from self.value(_content(cell))
        if function.__module__ != self._file:
            return
        for name in sorted(_names(function.__code__)):
            named = function.__globals__.get(name)
            is_ours = isinstance(named, FunctionType) and named.__module__ == self._file
            if is_ours or (isinstance(named, int | float) and not isinstance(named, bool)):
                yield name
                yield from self.value(named)

    def _code(self, code: CodeType) -> Text:
        yield f"code {code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_argcount} {code.co_kwonlyargcount}"
        yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars} {code.co_flags}"
        for constant in code.co_consts:
            yield from self._code(constant) if isinstance(constant, CodeType) else self.value(constant)


def _content(cell: Any) -> object:  # noqa: ANN401 - a cell has no public type
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _names(code: CodeType) -> set[str]:
    """Return the global names in a function and in those inside it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
