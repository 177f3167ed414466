"""``pagedkv presets``: all names of models, GPUs and cost models, with their numbers."""

from typing import Final

from pagedkv.cli import options as opt
from pagedkv.cli.output_files import STANDARD_OUTPUT, command_line, require_writable, write_json
from pagedkv.cli.tables import print_numbers
from pagedkv.cli.user_errors import reported
from pagedkv.models import model_names, read_model
from pagedkv.models.memory import GIB
from pagedkv.models.presets import PRESETS
from pagedkv.simulation.cost import cost_model_names, find_gpu, gpu_names

TERA: Final = 10**12
GIGA: Final = 10**9
OF_A_PAIR: Final = "peaks of the data sheet, at shares of them; not measured"
FOR_TRIALS: Final = "arbitrary, for trials"


def presets(json_file: opt.JsonFile = None) -> None:
    """List the names for --model, --gpu and --cost-model, with GiB, bandwidth and bytes per token.

    Any model with any number of any GPU is a cost model's name as well: llama-3.1-8b/4xh200. Numbers of GPUs are
    those of data sheets, of models those of their configs, and seconds follow from both (docs/models-and-costs.md);
    pagedkv calibrate makes a cost model of steps that were measured.

    For example:

    pagedkv presets

    pagedkv presets --json -
    """
    with reported():
        if json_file is not None:
            require_writable(json_file)
            write_json(json_file, _document())
    if json_file != STANDARD_OUTPUT:
        _print_models()
        _print_gpus()
        rows = [(name, OF_A_PAIR if "/" in name else FOR_TRIALS) for name in cost_model_names()]
        print_numbers("Cost models", ("name", "from"), rows)


def _print_models() -> None:
    rows = []
    for name in model_names():
        model = read_model(name)
        rows.append(
            (
                name,
                f"{model.token_nbytes:,}",
                f"{model.state_nbytes:,}" if model.state_nbytes else "-",
                "-" if model.weights_nbytes is None else f"{model.weights_nbytes / GIB:,.1f}",
                "-" if model.max_context is None else f"{model.max_context:,}",
                " ".join(group.name for group in model.groups),
                PRESETS[name].source,
            )
        )
    headings = ("model", "bytes a token", "state bytes", "weights GiB", "context", "groups", "config of")
    print_numbers("Models", headings, rows)


def _print_gpus() -> None:
    rows = []
    for name in gpu_names():
        gpu = find_gpu(name)
        rows.append(
            (
                name,
                f"{gpu.memory_nbytes / GIB:,.1f}",
                f"{gpu.memory_nbytes_per_s / GIGA:,.0f}",
                f"{gpu.flops / TERA:,.0f}",
                f"{gpu.link_nbytes_per_s / GIGA:,.0f}",
                gpu.source,
            )
        )
    print_numbers("GPUs", ("GPU", "GiB", "memory GB/s", "bf16 TFLOP/s", "host GB/s", "from"), rows)


def _document() -> dict[str, object]:
    models = {name: read_model(name) for name in model_names()}
    gpus = {name: find_gpu(name) for name in gpu_names()}
    return {
        "command": command_line(),
        "models": {
            name: {
                "token_nbytes": model.token_nbytes,
                "state_nbytes": model.state_nbytes,
                "weights_nbytes": model.weights_nbytes,
                "max_context": model.max_context,
                "groups": {group.name: group.token_nbytes for group in model.groups},
                "source": PRESETS[name].source,
            }
            for name, model in models.items()
        },
        "gpus": {
            name: {
                "memory_nbytes": gpu.memory_nbytes,
                "memory_nbytes_per_s": gpu.memory_nbytes_per_s,
                "flops": gpu.flops,
                "link_nbytes_per_s": gpu.link_nbytes_per_s,
                "source": gpu.source,
            }
            for name, gpu in gpus.items()
        },
        "cost_models": list(cost_model_names()),
    }
