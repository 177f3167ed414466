"""``pagedkv presets``: all names of models, GPUs and cost models, with their numbers."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from pagedkv.cli import options as opt
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.tables import print_numbers, show
from pagedkv.cli.user_errors import reported
from pagedkv.models import model_names, read_model
from pagedkv.models.memory import GIB
from pagedkv.models.presets import source_of
from pagedkv.report.tables import Columns, Json, named, table
from pagedkv.simulation.cost import cost_model_names, find_gpu, gpu_names

OF_A_PAIR: Final = "peaks of the data sheet, at shares of them; not measured"
FOR_TRIALS: Final = "arbitrary, for trials"


MIB: Final = 2**20


def scaled(key: str, scale: float, form: str) -> Callable[[Json], str]:
    """Return the column of a number in another unit; none where it is 0 or unknown."""
    return lambda row: format(row[key] / scale, form) if row[key] else "-"


MODELS: Final[Columns[Json]] = {
    "model": lambda row: row["name"],
    "bytes a token": scaled("token_nbytes", 1, ",.0f"),
    "state MiB": scaled("state_nbytes", MIB, ",.1f"),
    "weights": scaled("weights_nbytes", GIB, ",.1f"),
    "context": scaled("max_context", 1, ",.0f"),
    "groups": lambda row: " ".join(row["groups"]),
    "config of": lambda row: row["source"],
}
GPUS: Final[Columns[Json]] = {
    "GPU": lambda row: row["name"],
    "GiB": scaled("memory_nbytes", GIB, ",.1f"),
    "memory GB/s": scaled("memory_nbytes_per_s", 1e9, ",.0f"),
    "bf16 TFLOP/s": scaled("flops", 1e12, ",.0f"),
    "host GB/s": scaled("link_nbytes_per_s", 1e9, ",.0f"),
    "from": lambda row: row["source"],
}


def presets(json_file: opt.JsonFile = None) -> None:
    """List the names for --model, --gpu and --cost-model, with GiB, bandwidth and bytes per token.

    Any model with any number of any GPU is a cost model's name as well: llama-3.1-8b/4xh200. Numbers of GPUs are
    those of data sheets, of models those of their configs, and seconds follow from both (docs/models-and-costs.md);
    pagedkv calibrate makes a cost model of steps that were measured.

    For example:

    pagedkv presets

    pagedkv presets --json -
    """
    models = {name: _model(name) for name in model_names()}
    gpus = {
        name: {key: value for key, value in asdict(find_gpu(name)).items() if key != "name"} for name in gpu_names()
    }
    with reported():
        if json_file is not None:
            require_writable(json_file)
            names = list(cost_model_names())
            write_json(json_file, {"command": command_line(), "models": models, "gpus": gpus, "cost_models": names})
    if json_file != STANDARD_OUTPUT:
        show(table("Models (weights in GiB)", MODELS, named(models)))
        show(table("GPUs", GPUS, named(gpus)))
        rows = [(name, OF_A_PAIR if "/" in name else FOR_TRIALS) for name in cost_model_names()]
        print_numbers("Cost models", ("name", "from"), rows)


def _model(name: str) -> dict[str, object]:
    model = read_model(name)
    return {
        **{key: getattr(model, key) for key in ("token_nbytes", "state_nbytes", "weights_nbytes", "max_context")},
        "groups": {group.name: group.token_nbytes for group in model.groups},
        "source": source_of(name),
    }
