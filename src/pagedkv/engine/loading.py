"""Loading a model and its tokenizer, from a folder or by name; failures are errors of one sentence.

Errors of transformers have many types and long texts. Here there are two: there is no such model, or it cannot be run.
"""

import re
from typing import Final

import torch
from safetensors import SafetensorError

from pagedkv.contract.arguments import dtype_name
from pagedkv.engine.llm import Tokenizer
from pagedkv.errors import ConfigurationError, UnsupportedModelError
from pagedkv.model_folder import require_folder
from pagedkv.probe import compat

DTYPES: Final = ("float32", "bfloat16", "float16", "auto")


def usable_device(name: str) -> str:
    """Return the device of a name: ``auto`` is the first GPU where there is one, else the CPU.

    Args:
        name: auto, cpu, cuda, or a GPU's name, as cuda:1.

    Raises:
        ConfigurationError: the name is none of these, or there is no such GPU.
    """
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        return "cuda" if num_gpus else "cpu"
    if name == "cpu":
        return name
    if re.fullmatch(r"cuda(:\d+)?", name) is None:
        raise ConfigurationError(f"device must be auto, cpu, cuda, or cuda:N, got {name!r}")
    index = int(name.partition(":")[2] or 0)
    if index >= num_gpus:
        raise ConfigurationError(
            f"device {name!r} is not there: torch {torch.__version__} finds {num_gpus} GPUs. "
            "Choose cpu, or check the driver and that torch is built for CUDA"
        )
    return name


def load(name: str, dtype: str = "float32", device: str = "cpu") -> tuple[compat.Model, Tokenizer | None]:
    """Load a decoder and, where there is one, its tokenizer.

    Args:
        name: a folder with ``config.json`` and weights, or a model's name on the hub of Hugging Face.
        dtype: of weights and keys: float32, bfloat16, float16, or auto: as the weights are stored; fp32, bf16 and fp16
            are the same words.
        device: for its weights and blocks: as of :func:`usable_device`.

    Raises:
        ConfigurationError: there is no such folder, model or device, the weights are broken or do not fit, or ``dtype``
            is none.
        UnsupportedModelError: it is no decoder that transformers can run.
    """
    dtype = dtype_name(dtype)
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    require_folder(name)
    place = usable_device(device)
    try:
        model = compat.load_model(name, dtype, place)
    except torch.OutOfMemoryError as problem:
        raise ConfigurationError(f"model {name!r} does not fit on {place}: {_first_line(problem)}") from problem
    except (OSError, SafetensorError) as problem:
        raise ConfigurationError(f"model {name!r} cannot be loaded: {_first_line(problem)}") from problem
    except (ValueError, KeyError, ImportError) as problem:
        raise UnsupportedModelError(f"model {name!r} cannot be run: {_first_line(problem)}") from problem
    return model, load_tokenizer(name)


def load_tokenizer(name: str) -> Tokenizer | None:
    """Load a model's tokenizer; None where there is none that can be loaded."""
    try:
        tokenizer: Tokenizer = compat.load_tokenizer(name)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):
        return None  # prompts must then be token ids; a text raises RequestError
    return tokenizer


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__
