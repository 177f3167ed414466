"""Adapters: LoRA adapters of one model, as folders of PEFT, and which of them a pass computes with.

transformers loads them into the model's layers (``load_adapter``), where each layer has the weights of all adapters
beside its own::

    a layer      out = W x                          no adapter: bits as before they were loaded
                 out = W x + scale * B_a (A_a x)    adapter a

All tokens of a pass have one adapter, since a layer has one. PEFT can also mix adapters in a batch
(``adapter_names``), but row by row, and a step of this engine is one flat row. So a step has a pass for each adapter of
its requests, and one for those without any.

An adapter changes keys and values. Its name and a digest of its files are extra keys of its blocks
(:class:`~pagedkv.contract.keys.RequestKeys`), so that requests of different adapters share nothing.

PEFT's own ``set_adapter`` sets for each weight whether it is trained, and takes 12 to 24 ms for a model of 32 layers on
a busy core. So the two attributes of a layer that say what it computes with are written here, and restored after each
pass: other engines over the model compute without an adapter.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import SafetensorError, safe_open

from pagedkv.contract.extras import needing
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import ConfigurationError, RequestError
from pagedkv.probe import compat
from pagedkv.probe.compat import BorrowedModel

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
"""What PEFT puts before the name of each layer."""
LORA: Final = "lora_"
"""Part of the name of each weight of LoRA."""
PLAIN_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}
"""Values of a PEFT config that leave the model's own weights and layers alone, and all tokens alike."""


@final
class Adapters:
    """The adapters of one model; loads them.

    Args:
        model: the model, whose layers get the weights.
        folders: by name, folders of PEFT with a config and weights as safetensors.

    Raises:
        ConfigurationError: a folder has no adapter of this model, or one that does more than LoRA; or the model has
            adapters of its own.
        MissingExtraError: peft is not installed.
    """

    def __init__(self, model: compat.Model, folders: Mapping[str, str]) -> None:
        if compat.has_adapters(model):
            raise ConfigurationError(
                "the model has adapters already: give a model without, and all adapters as folders"
            )
        self.model = model
        self._versions = {name: _require_lora(name, Path(folder)) for name, folder in folders.items()}
        self._inner = {name: f"pagedkv_adapter_{number}" for number, name in enumerate(folders)}
        """PEFT's names of them: transformers takes each weight for an adapter's that has its name anywhere in it."""
        with BorrowedModel(model).alone(), needing("lora", "an adapter"):
            for name, folder in folders.items():
                _require_fitting(model, name, Path(folder))
                _load(model, name, folder, self._inner[name])
        self._layers = compat.adapted_layers(model)
        self._compute_with(None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order given."""
        return tuple(self._versions)

    def keys(self, name: str, salt: bytes) -> RequestKeys:
        """Return the extra keys of the blocks of an adapter's requests."""
        return RequestKeys(name, self._versions[name], salt)

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Let the model compute with an adapter for a while, or with none; within its lock (:class:`BorrowedModel`)."""
        if name is None:
            yield
            return
        self._compute_with(name)
        try:
            yield
        finally:
            self._compute_with(None)

    def _compute_with(self, name: str | None) -> None:
        adapters = [self._inner[next(iter(self._inner)) if name is None else name]]
        for layer in self._layers:
            attributes = vars(layer)
            attributes["_active_adapter"], attributes["_disable_adapters"] = adapters, name is None


def keys_for(adapters: Adapters | None, name: str | None, salt: bytes) -> RequestKeys:
    """Return the extra keys of a request's blocks. Raises RequestError: there is no such adapter."""
    if name is None:
        return RequestKeys(salt=salt) if salt else NO_KEYS
    if adapters is None or name not in adapters.names:
        there = "it has none" if adapters is None else f"it has {', '.join(map(repr, adapters.names))}"
        raise RequestError(f"this engine has no adapter {name!r}: {there} (EngineConfig.adapters)")
    return adapters.keys(name, salt)


def _require_lora(name: str, folder: Path) -> str:
    """Check an adapter's config, and return the digest of its config and weights. Raises ConfigurationError."""
    digest = hashlib.sha256()
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        for file in (CONFIG, WEIGHTS):
            with (folder / file).open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            others = sorted(key for key in weights.keys() if LORA not in key)  # noqa: SIM118 - no mapping
    except (OSError, ValueError, SafetensorError) as problem:
        raise ConfigurationError(
            f"adapter {name!r}: {folder} is no folder of PEFT with {CONFIG} and {WEIGHTS}: {problem}"
        ) from problem
    for field, plain in PLAIN_VALUES.items():
        if config.get(field, plain[0]) not in plain:
            raise ConfigurationError(
                f"adapter {name!r} has {field} {config[field]!r}: only LoRA of a model's layers is served, which "
                "leaves the model's own weights alone and concerns all tokens alike"
            )
    if others:
        raise ConfigurationError(
            f"adapter {name!r} has weights besides those of LoRA, {others[0]}: all requests would compute with them"
        )
    return digest.hexdigest()


def _require_fitting(model: compat.Model, name: str, folder: Path) -> None:
    """Compare an adapter's matrices with the layers that they name. Raises ConfigurationError, with the tensor."""
    linear = {place: layer for place, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    with safe_open(folder / WEIGHTS, framework="pt") as weights:
        for key in weights.keys():  # noqa: SIM118 - no mapping
            place, _, part = key.removeprefix(PREFIX).partition(f".{LORA}")
            layer = linear.get(place)
            shape = weights.get_slice(key).get_shape()
            if layer is None or part not in {"A.weight", "B.weight"}:
                continue  # loading tells what it finds
            there, what = (shape[1], "takes") if part == "A.weight" else (shape[0], "gives")
            here = layer.in_features if part == "A.weight" else layer.out_features
            if there != here:
                raise ConfigurationError(
                    f"adapter {name!r} is not of this model: its {key} is {list(shape)}, for a layer that {what} "
                    f"{there} features, and {place} {what} {here}"
                )


def _load(model: compat.Model, name: str, folder: str, inner: str) -> None:
    """Load an adapter into a model's layers. Raises ConfigurationError."""
    try:
        report: Any = compat.load_adapter(model, folder, inner)
    except ModuleNotFoundError:
        raise
    except Exception as problem:
        first_line = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise ConfigurationError(f"adapter {name!r} cannot be loaded from {folder}: {first_line}") from problem
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(map(str, getattr(report, what)))
        if what == "missing_keys":  # those of adapters that were loaded before are among them
            found = [key for key in found if inner in key.split(".")]
        if found:
            raise ConfigurationError(
                f"adapter {name!r} is not of this model: {what.replace('_', ' ')} {', '.join(found[:3])}"
            )
