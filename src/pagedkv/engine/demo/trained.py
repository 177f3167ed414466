"""The model of the demonstration, which is part of the package: 332,416 parameters in float16, 0.7 MB."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import safetensors.torch

from pagedkv.engine.llm import Tokenizer
from pagedkv.engine.loading import usable_device
from pagedkv.errors import ConfigurationError
from pagedkv.probe import compat

FOLDER: Final = Path(__file__).parent / "model"
"""``config.json`` and ``model.safetensors``, as transformers reads them."""

SHA256: Final = "2a79a8c2e7211af9a23af53ed508716b56492e24de65cd1ebdd3182c9cf73517"
"""Digest of ``model.safetensors``. Another training run reaches the same accuracy, with other weights."""


def load_trained(folder: Path = FOLDER, *, max_positions: int | None = None) -> compat.Model:
    """Load the model in float32, in evaluation mode.

    Args:
        folder: folder of the model's files.
        max_positions: most positions of a sequence, for benchmarks that do not use the answers; None: as trained.

    Raises:
        ConfigurationError: the weights are missing, or have another digest than :data:`SHA256`.
    """
    file = folder / "model.safetensors"
    try:
        content = file.read_bytes()
        config = json.loads((folder / "config.json").read_text())
    except OSError as problem:
        raise ConfigurationError(
            f"the demonstration's model cannot be read: {problem}. Install pagedkv again"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ConfigurationError(
            f"{file} is not the model that was trained: its SHA-256 is {found}, not {SHA256}. Install pagedkv again, "
            "or put the new digest into pagedkv.engine.demo.trained if you have trained another model"
        )
    weights = {name: tensor.float() for name, tensor in safetensors.torch.load(content).items()}
    given = {} if max_positions is None else {"max_position_embeddings": max_positions}
    return compat.make_llama({**config, **given}, weights)


def load_demo(device: str = "auto") -> tuple[compat.Model, Tokenizer]:
    """Load the model and its tokenizer, which has a chat template.

    Args:
        device: for its weights and blocks, as of :func:`~pagedkv.engine.loading.usable_device`; with ``auto``
            it is on the CPU, which is fast enough for it.

    Raises:
        ConfigurationError: as of :func:`load_trained`, or there is no such device.
    """
    tokenizer: Tokenizer = compat.load_tokenizer(str(FOLDER))
    model: Any = load_trained()
    return model if device == "auto" else model.to(usable_device(device)), tokenizer
