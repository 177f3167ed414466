"""``pagedkv run-batch``: answers the requests of an OpenAI batch file, without a port."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from pagedkv.cli.engine_options import EngineOptions
from pagedkv.cli.interrupting import EXIT_WRONG_ANSWERS, leaving_at_once
from pagedkv.cli.options import command, option
from pagedkv.cli.output_files import atomic_file, require_writable
from pagedkv.cli.progress import prepare, working
from pagedkv.model_folder import DEMO, require_model

AT_ONCE: Final = 2
"""Requests under way for each sequence that may run, so that none is waited for."""


@command
def run_batch(  # noqa: PLR0913 - typer needs a parameter for each option
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder of a model, its name on the hub of Hugging Face, or demo."),
    ] = DEMO,
    *,
    input_file: Annotated[Path, option("FILE", "Requests, as OpenAI's batch files have them.", "--input-file", "-i")],
    output_file: Annotated[Path, option("FILE", "Their results, in the same order.", "--output-file", "-o")],
    name: Annotated[str | None, option("TEXT", "The model's name in requests. Default: MODEL's.")] = None,
    tool_call_parser: Annotated[
        str, option("NAME", "Format of calls, by vLLM's names: auto, hf, hermes...; none.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, option("NAME", "Format of reasoning, likewise: auto, hf, deepseek_r1...; none.")
    ] = "auto",
    dtype: Annotated[str, option("TYPE", "float32, bfloat16, float16, auto.")] = "float32",
    device: Annotated[str, option("NAME", "cpu, cuda, cuda:N; auto: a GPU where there is one.")] = "auto",
    engine: EngineOptions,
) -> None:
    """Answer the requests of an OpenAI batch file: chat and text completions, responses, messages.

    The file of results is there once all are answered. A request that is refused has its error there, and the command
    ends with exit code 1.

    For example:

    pagedkv run-batch ./my-llama -i requests.jsonl -o results.jsonl
    """
    engine.require_valid()
    require_writable(output_file, str(input_file))
    for folder in (model, engine.draft_model):
        if folder not in {DEMO, None}:
            require_model(str(folder))
    with working("Loading torch"), leaving_at_once():
        from pagedkv.cli import server_building  # noqa: PLC0415 - paths are checked before torch is imported
        from pagedkv.engine.llm import compile_loops  # noqa: PLC0415 - as above
        from pagedkv.probe import compat  # noqa: PLC0415 - as above
        from pagedkv.server import OpenAccess, ServerConfig  # noqa: PLC0415 - as above
        from pagedkv.server.batches import answer_batch, read_batch  # noqa: PLC0415 - as above

    requests = read_batch(input_file)
    compat.be_silent()
    config = ServerConfig(
        name or Path(model).name,
        tool_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        sampling_defaults={} if model == DEMO else compat.sampling_defaults(model),
    )
    engine_config = engine.config()
    prepare(lambda: compile_loops(engine_config))
    serving = server_building.Serving(
        None if model == DEMO else model,
        dtype,
        engine_config,
        config,
        OpenAccess(),
        draft_model=engine.draft_model,
        device=device,
        has_own_process=False,
    )
    parts = server_building.applied(serving, server_building.Replicas(), inspects=False, has_texts=False)
    with ExitStack() as serving_parts:
        with working(f"Loading {model}"), leaving_at_once():
            application, _ = serving_parts.enter_context(parts)
        with atomic_file(output_file) as results, working(f"Answering {len(requests):,} requests"):
            most = AT_ONCE * engine.max_sequences
            num_failed = asyncio.run(answer_batch(application, requests, results.write, most_at_once=most))
    typer.echo(f"pagedkv: {len(requests) - num_failed:,} of {len(requests):,} requests were answered", err=True)
    if num_failed:
        raise typer.Exit(EXIT_WRONG_ANSWERS)
