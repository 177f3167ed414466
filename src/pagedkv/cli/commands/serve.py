"""``pagedkv serve``: a model of Hugging Face behind OpenAI's and Anthropic's protocols."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from pagedkv.api_keys import read_key_file
from pagedkv.cli.engine_options import EngineOptions
from pagedkv.cli.interrupting import INTERRUPTED_BEFORE_SERVING, leaving_at_once
from pagedkv.cli.options import command, parse_size_with_unit, require_free
from pagedkv.cli.output_files import require_writable
from pagedkv.cli.progress import prepare, working
from pagedkv.contract.arguments import as_choice
from pagedkv.errors import ConfigurationError
from pagedkv.model_folder import DEMO, require_model
from pagedkv.routing import ROUTINGS, Routing

__all__ = ["serve"]

LARGEST_PORT: Final = 65_535
MOST_REPLICAS: Final = 64
SERVER: Final = "Server"
CLUSTER: Final = "Replicas"


@command
def serve(  # noqa: PLR0913 - typer needs a parameter for each option
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder of a model, its name on the hub of Hugging Face, or demo."),
    ] = DEMO,
    *,
    model_option: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="MODEL, as the other commands take it.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.", rich_help_panel=SERVER)] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen at.", rich_help_panel=SERVER)] = 8000,
    name: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The model's name for clients. Default: MODEL's.", rich_help_panel=SERVER),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="API keys and their tenants, as TOML.", rich_help_panel=SERVER),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", help="Most requests that wait; further ones get 429.", rich_help_panel=SERVER)
    ] = 1024,
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest body of a request.", rich_help_panel=SERVER)
    ] = "32MiB",
    deadline: Annotated[
        float | None,
        typer.Option(metavar="S", help="Seconds after which a request ends with an error.", rich_help_panel=SERVER),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(metavar="S", help="Seconds that requests under way have after Ctrl-C.", rich_help_panel=SERVER),
    ] = 30.0,
    request_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a trace of the served requests, for curve and plan.", rich_help_panel=SERVER
        ),
    ] = None,
    log_tokens: Annotated[
        bool, typer.Option("--log-tokens", help="Write tokens into the request log.", rich_help_panel=SERVER)
    ] = False,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Show blocks, requests and misses at /inspect.", rich_help_panel=SERVER)
    ] = False,
    inspect_texts: Annotated[
        bool, typer.Option("--inspect-texts", help="As --inspect, with blocks' texts.", rich_help_panel=SERVER)
    ] = False,
    one_process: Annotated[
        bool,
        typer.Option("--one-process", help="Run the engine in the server's process.", rich_help_panel=SERVER),
    ] = False,
    kv_events: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Publish KV events there, as vLLM's --kv-events-config: tcp://*:5557.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    kv_events_replay: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Send events again and snapshots there (replay_endpoint): tcp://*:5558.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    kv_events_topic: Annotated[
        str, typer.Option(metavar="TEXT", help="First frame of all events.", rich_help_panel=SERVER)
    ] = "",
    tool_parser: Annotated[
        str, typer.Option(metavar="NAME", help="auto, hermes, llama, mistral, none.", rich_help_panel=SERVER)
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(metavar="NAME", help="auto, think, none.", rich_help_panel=SERVER)
    ] = "auto",
    replicas: Annotated[
        int,
        typer.Option(metavar="N", help="Engines, each in a process of its own; on Ray.", rich_help_panel=CLUSTER),
    ] = 1,
    routing: Annotated[
        str,
        typer.Option(metavar="NAME", help="prefix, least-loaded, round-robin.", rich_help_panel=CLUSTER),
    ] = "prefix",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A running Ray cluster. Default: one here.", rich_help_panel=CLUSTER),
    ] = None,
    gpus_each: Annotated[
        float, typer.Option("--gpus-each", metavar="N", help="GPUs that a replica takes.", rich_help_panel=CLUSTER)
    ] = 0.0,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16, float16, auto.")] = "float32",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:N; auto: a GPU where there is one.")
    ] = "auto",
    engine: EngineOptions,
) -> None:
    """Serve a model to clients of OpenAI and Anthropic: chat, completions, streams, tool calls, cached prefixes.

    Without MODEL the small model of the demonstration is served, and nothing is downloaded. Ctrl-C drains: requests
    under way end, new ones are refused; a second one ends at once. docs/server.md has all paths and fields.

    For example:

    pagedkv serve

    pagedkv serve ./my-llama --port 8080 --memory 8

    pagedkv serve ./my-llama --device cuda --dtype auto --overlap

    pagedkv serve ./my-llama --api-keys keys.toml --host 0.0.0.0

    pagedkv serve ./my-llama --replicas 2

    pagedkv serve --kv-events tcp://127.0.0.1:5557 --kv-events-replay tcp://127.0.0.1:5558
    """
    model = _one_model(model, model_option)
    if not 0 <= port <= LARGEST_PORT:
        raise ConfigurationError(f"--port must be 0 to {LARGEST_PORT}, got {port}")
    max_body_nbytes = parse_size_with_unit(max_body, "--max-body")
    if not 1 <= replicas <= MOST_REPLICAS:
        raise ConfigurationError(f"--replicas must be 1 to {MOST_REPLICAS}, got {replicas}")
    if kv_events is None and (kv_events_replay is not None or kv_events_topic):
        raise ConfigurationError("--kv-events-replay and --kv-events-topic need --kv-events: the endpoint of events")
    if kv_events is not None and replicas > 1:
        raise ConfigurationError(
            "--kv-events needs --replicas 1: replicas publish at ports of their own (/inspect/routes)"
        )
    _require_usable(engine, api_keys, request_log)
    routed = cast("Routing", as_choice(routing, ROUTINGS, "--routing"))
    for folder in (model, engine.draft_model):
        if folder not in {DEMO, None}:
            require_model(str(folder))
    require_free(host, port)
    with working("Loading torch"), leaving_at_once(INTERRUPTED_BEFORE_SERVING):
        from pagedkv.cli import server_building  # noqa: PLC0415 - paths are checked before torch is imported
        from pagedkv.engine.llm import compile_loops  # noqa: PLC0415 - as above
        from pagedkv.probe import compat  # noqa: PLC0415 - as above
        from pagedkv.server import ServerConfig, run  # noqa: PLC0415 - as above
        from pagedkv.server.engine_process import EventEndpoints  # noqa: PLC0415 - as above

    config = ServerConfig(
        name or Path(model).name,
        max_body_nbytes=max_body_nbytes,
        max_waiting=max_waiting,
        deadline_s=deadline,
        drain_s=drain,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    engine_config = engine.config()
    access = server_building.access(api_keys)
    compat.be_silent()
    events = None if kv_events is None else EventEndpoints(kv_events, kv_events_replay, kv_events_topic)
    parts = server_building.applied(
        server_building.Serving(
            None if model == DEMO else model,
            dtype,
            engine_config,
            config,
            access,
            events,
            engine.draft_model,
            device,
            has_own_process=not one_process,
        ),
        server_building.Replicas(replicas, routed, ray, gpus_each),
        inspects=inspect or inspect_texts,
        has_texts=inspect_texts,
    )
    prepare(lambda: compile_loops(engine_config))  # here, since an engine in a process of its own is silent
    with ExitStack() as serving:
        serving.enter_context(server_building.warnings_shown())
        with working(f"Loading {model}"), leaving_at_once(INTERRUPTED_BEFORE_SERVING):
            application, service = serving.enter_context(parts)
        serving.enter_context(server_building.log_requests(service, request_log, writes_tokens=log_tokens))
        typer.echo(f"pagedkv: {config.model_name} is served at http://{host}:{port}/v1 (Ctrl-C ends)", err=True)
        if inspect or inspect_texts or replicas > 1:
            typer.echo(f"pagedkv: the inspector is at http://{host}:{port}/inspect", err=True)
        run(application, service, host=host, port=port)


def _one_model(argument: str, option: str | None) -> str:
    """Return the model, however it was named. Raises ConfigurationError."""
    if option is not None and argument not in {DEMO, option}:
        raise ConfigurationError(f"two models are given, {argument!r} and --model {option!r}: give one")
    return argument if option is None else option


def _require_usable(engine: EngineOptions, api_keys: Path | None, request_log: Path | None) -> None:
    """Refuse wrong options and files before torch is imported. Raises ConfigurationError, OutputError."""
    engine.require_valid()
    if api_keys is not None:
        read_key_file(api_keys)
    if request_log is not None:
        require_writable(request_log)
