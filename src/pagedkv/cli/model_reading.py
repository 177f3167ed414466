"""The model that ``--model`` names, with a status on the terminal while its class is asked."""

from contextlib import nullcontext

from pagedkv.cli.progress import working
from pagedkv.models import ModelMemory
from pagedkv.planner.models import asks_class, read_model


def named_model(name_or_path: str, kv_dtype: str | None = None) -> ModelMemory:
    """Read the memory of a model. Raises ConfigurationError as :func:`pagedkv.planner.models.read_model`."""
    status = working(f"Asking the model's class what its layers keep: {name_or_path}")
    with status if asks_class(name_or_path) else nullcontext():
        return read_model(name_or_path, kv_dtype)
