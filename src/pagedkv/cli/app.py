"""The application: its commands, by name. The module of a command is imported when it runs.

So help and completion of names are fast, although some commands import torch, which takes seconds.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from pagedkv import __version__
from pagedkv.cli.user_errors import reported
from pagedkv.contract.extras import needing

SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "generate": "Answer prompts with a model of Hugging Face on paged memory: any decoder, with the model's own "
        "tokens.",
        "serve": "Serve a model to clients of OpenAI and Anthropic: chat, completions, streams, tool calls, cached "
        "prefixes.",
        "route": "Route requests before stock vLLM and SGLang servers: each goes where most of its prompt is cached, "
        "and says why.",
        "run-batch": "Answer the requests of an OpenAI batch file: chat and text completions, responses, messages.",
        "new-key": "Make an API key for pagedkv serve --api-keys, and its entry for that file.",
        "replay": "Serve a request trace on a virtual clock, with continuous batching, through the production block "
        "space.",
        "curve": "Show what a cache of each size would hit, by each eviction policy and the optimum, and what no cache "
        "can serve.",
        "plan": "Find the memory, block size, policy and batch limits for a trace: many settings, served by the "
        "simulator.",
        "report": "Write one HTML page about a trace, or one that compares several runs: needs no network, opens from "
        "a file.",
        "convert": "Convert a trace of any known format to the pagedkv trace format, which docs/trace-format.md "
        "describes.",
        "record": "Record a running vLLM or SGLang: its KV events, and with its request log a trace to curve and "
        "replay.",
        "calibrate": "Fit a cost model to measured steps of an engine, and show its error.",
        "validate": "Show the error of a cost model on measured steps of an engine.",
        "presets": "List the names for --model, --gpu and --cost-model, with GiB, bandwidth and bytes per token.",
        "warm-up": "Compile all loops ahead of the first request, on all cores, and keep them on disk.",
        "demo": "Answer questions about documents with a small model and too little KV memory, and judge every answer.",
    }
)
"""The commands with one line of help each. The line repeats the first line of the docstring, so that help need not
import the command."""

BESIDE: Final = {"new_key": "serve", "validate": "calibrate"}
"""Commands in the file of another one."""
SHORT_HELP: Final = {"help_option_names": ["--help", "-h"]}


class PlainFlags:
    """Shows no type for options without a value; newer versions of typer would show ``<bool>`` in help."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - click's, which newer versions of typer hide
        """Return the parameters of the command."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the mixed class
        for each in params:
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""
        return params


class PlainCommand(PlainFlags, TyperCommand):
    """A command with plain flags."""


class LateCommands(PlainFlags, TyperGroup):
    """Lists commands without importing them, until one of them runs, or shows its own help or completion."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401 - click's, which newer versions of typer hide
        """Find the command that was typed, and import it. Exits as :func:`~pagedkv.cli.user_errors.reported` does."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        if stand_in is None:
            return name, None, rest
        return name, _imported(stand_in.name), rest


def _imported(name: str | None) -> Any:  # noqa: ANN401 - a command of click, as above
    """Import the command of a name: the function of that name, in the module of that name."""
    python_name = str(name).replace("-", "_")
    with reported(), needing("cli", "the command line"):
        module = import_module(f"pagedkv.cli.commands.{BESIDE.get(python_name, python_name)}")
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, cls=PlainCommand, context_settings=SHORT_HELP)(getattr(module, python_name))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=LateCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=SHORT_HELP,
)
for each, summary in SUMMARIES.items():
    app.command(each, help=summary)(lambda: None)


def _print_version(is_set: bool) -> None:  # noqa: FBT001 - called by typer with the flag's value
    if is_set:
        typer.echo(f"pagedkv {__version__}")
        raise typer.Exit


@app.callback()
def pagedkv(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Paged KV-cache bookkeeping: block tables, prefix cache, eviction; replayed over request traces."""
