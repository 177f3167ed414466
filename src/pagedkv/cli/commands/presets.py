"""``pagedkv presets``."""

import typer

from pagedkv.models import model_names
from pagedkv.simulation.cost import cost_model_names, gpu_names

__all__ = ["presets"]


def presets() -> None:
    """List the names that --model, --gpu and --cost-model know.

    Any model with any number of any GPU is a cost model's name as well: llama-3.1-8b/4xh200.

    For example:

    pagedkv presets
    """
    for title, names in (("models", model_names()), ("GPUs", gpu_names()), ("cost models", cost_model_names())):
        typer.echo(f"{title}:")
        for name in names:
            typer.echo(f"  {name}")
