"""Loading a model and its tokenizer, from a folder or by name; failures are errors of one sentence.

Errors of transformers have many types and long texts. Here there are two: there is no such model, or it cannot be run.
"""

from typing import Final

from safetensors import SafetensorError

from pagedkv.memory.contract.errors import ConfigurationError, UnsupportedModelError
from pagedkv.serving.engine import compat
from pagedkv.serving.engine.llm import Tokenizer
from pagedkv.serving.model_folder import require_folder

__all__ = ["DTYPES", "load", "load_tokenizer"]

DTYPES: Final = ("float32", "bfloat16", "float16", "auto")


def load(name: str, dtype: str = "float32") -> tuple[compat.Model, Tokenizer | None]:
    """Load a decoder and, where there is one, its tokenizer.

    Args:
        name: a folder with ``config.json`` and weights, or a model's name on the hub of Hugging Face.
        dtype: of weights and keys: float32, bfloat16, float16, or auto: as the weights are stored.

    Raises:
        ConfigurationError: there is no such folder or model, its weights are broken, or ``dtype`` is none.
        UnsupportedModelError: it is no decoder that transformers can run.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    require_folder(name)
    try:
        model = compat.load_model(name, dtype)
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
