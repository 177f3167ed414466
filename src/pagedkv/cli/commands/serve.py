"""``pagedkv serve``: a model of Hugging Face behind OpenAI's and Anthropic's protocols.

``pagedkv new-key``: an API key of a tenant, and its entry for ``--api-keys``.
"""

import ssl
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer

from pagedkv.api_keys import KeyOwner, entry_of, new_key as make_key, parse_key_file, read_key_file
from pagedkv.cli.engine_options import DEFAULT_MEMORY, EngineOptions
from pagedkv.cli.interrupting import EXIT_ENGINE_ENDED, INTERRUPTED_BEFORE_SERVING, leaving_at_once
from pagedkv.cli.options import LARGEST_PORT, command, flag, is_loopback, option, parse_size_with_unit
from pagedkv.cli.output_files import atomic_file, require_writable
from pagedkv.cli.progress import Stages, prepare
from pagedkv.contract.arguments import as_choice
from pagedkv.contract.extras import to_install
from pagedkv.errors import ConfigurationError, EngineError, MissingExtraError
from pagedkv.listening import bound
from pagedkv.model_folder import CHAT_DEMO, DEMO, require_model
from pagedkv.routing import ROUTINGS, Routing

if TYPE_CHECKING:
    from pagedkv.engine.sampling.parameters import Pooling
    from pagedkv.server import Service
MOST_REPLICAS: Final = 64
SHARE_OF_GPU: Final = 90.0
SHARE_OF_CPU: Final = 25.0
"""Per cent of the free memory that keys and values have by default: on a CPU other programs need memory too."""
SERVER: Final = "Server"
CLUSTER: Final = "Replicas"


@dataclass(frozen=True, slots=True)
class WebOptions:
    """Where clients reach the server, as uvicorn's options."""

    root_path: Annotated[str, option("PATH", "Path before all paths, of a proxy: /llm.", panel=SERVER)] = ""
    ssl_keyfile: Annotated[Path | None, option("FILE", "Key of the certificate, for https.", panel=SERVER)] = None
    ssl_certfile: Annotated[Path | None, option("FILE", "Certificate, for https.", panel=SERVER)] = None
    ssl_keyfile_password: Annotated[str | None, option("TEXT", "Password of --ssl-keyfile.", panel=SERVER)] = None
    ssl_ca_certs: Annotated[
        Path | None, option("FILE", "Certificates of those who sign clients' certificates.", panel=SERVER)
    ] = None
    ssl_cert_reqs: Annotated[
        int, option("N", "Clients' certificates: 0 none, 1 optional, 2 required.", panel=SERVER)
    ] = 0

    def encryption(self) -> dict[str, object]:
        """Return uvicorn's options of TLS; empty without a certificate. Raises ConfigurationError, for the path too."""
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(f"--root-path must begin with / and not end with it, got {self.root_path!r}")
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None or self.ssl_ca_certs is not None or self.ssl_cert_reqs:
                raise ConfigurationError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile")
            return {}
        if self.ssl_cert_reqs not in {0, 1, 2}:
            raise ConfigurationError(f"--ssl-cert-reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password or "")
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except OSError as problem:
            raise ConfigurationError(f"--ssl-certfile {self.ssl_certfile} cannot be used: {problem}") from problem
        return {
            "ssl_certfile": self.ssl_certfile,
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_keyfile_password": self.ssl_keyfile_password,
            "ssl_ca_certs": self.ssl_ca_certs,
            "ssl_cert_reqs": self.ssl_cert_reqs,
        }


@command
def serve(  # noqa: PLR0913, PLR0915 - typer needs a parameter for each option; each is checked where it is said
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder of a model, its name on the hub of Hugging Face, or demo."),
    ] = DEMO,
    *,
    model_option: Annotated[str | None, option("MODEL", "MODEL, as the other commands take it.", "--model")] = None,
    demo: Annotated[
        str,
        option(
            "facts|chat",
            "Without MODEL: one that finds facts, or one of random weights for benchmarks, which may ask anything.",
        ),
    ] = "facts",
    host: Annotated[str, option("ADDRESS", "Address to listen at.", panel=SERVER)] = ("127.0.0.1"),
    port: Annotated[int, option("N", "Port to listen at.", panel=SERVER)] = 8000,
    name: Annotated[str | None, option("TEXT", "The model's name for clients. Default: MODEL's.", panel=SERVER)] = None,
    served_model_name: Annotated[
        list[str] | None,
        option("TEXT", "As --name; may be repeated: requests may give any of them.", panel=SERVER),
    ] = None,
    lora: Annotated[
        list[str] | None,
        option("NAME=PATH", "Folder of a LoRA adapter, chosen by requests as model NAME; may be repeated."),
    ] = None,
    chat_template: Annotated[
        Path | None, option("FILE", "Chat template, in place of the model's own.", panel=SERVER)
    ] = None,
    api_keys: Annotated[Path | None, option("FILE", "API keys and their tenants, as TOML.", panel=SERVER)] = None,
    api_key: Annotated[
        list[str] | None, option("KEY", "A key that everybody shares; may be repeated.", panel=SERVER)
    ] = None,
    without_keys: Annotated[bool, flag("Serve other machines although there are no API keys.", panel=SERVER)] = False,
    cors_origin: Annotated[
        list[str] | None,
        option("ORIGIN", "Origin of pages that may call the server; may be repeated.", panel=SERVER),
    ] = None,
    strict_fields: Annotated[bool, flag("Refuse requests with unknown fields.", panel=SERVER)] = False,
    enable_force_include_usage: Annotated[
        bool, flag("Tell usage in each chunk of a stream, asked for or not.", panel=SERVER)
    ] = False,
    return_tokens_as_token_ids: Annotated[
        bool, flag("Name tokens of log-probabilities by ids: token_id:5.", panel=SERVER)
    ] = False,
    enable_tokenizer_info_endpoint: Annotated[
        bool, flag("Tell special tokens and the chat template at /tokenizer_info.", panel=SERVER)
    ] = False,
    pooling: Annotated[
        str | None, option("mean|last", "Serve /v1/embeddings: mean of a text, or its last token.", panel=SERVER)
    ] = None,
    outlive_engine: Annotated[bool, flag("Go on and answer 503 if the engine ends by itself.", panel=SERVER)] = False,
    max_waiting: Annotated[int, option("N", "Most requests that wait; further ones get 429.", panel=SERVER)] = 1024,
    max_body: Annotated[str, option("SIZE", "The largest body of a request.", panel=SERVER)] = "32MiB",
    deadline: Annotated[
        float | None, option("S", "Seconds after which a request ends with an error.", panel=SERVER)
    ] = None,
    drain: Annotated[float, option("S", "Seconds that requests under way have after Ctrl-C.", panel=SERVER)] = 30.0,
    request_log: Annotated[
        Path | None, option("FILE", "Write a trace of the served requests, for curve and plan.", panel=SERVER)
    ] = None,
    log_tokens: Annotated[bool, flag("Write tokens into the request log.", panel=SERVER)] = False,
    step_log: Annotated[
        Path | None, option("FILE", "Write each step of the engine, for calibrate.", panel=SERVER)
    ] = None,
    inspect: Annotated[bool, flag("Show blocks, requests and misses at /inspect.", panel=SERVER)] = False,
    inspect_texts: Annotated[bool, flag("As --inspect, with blocks' texts.", panel=SERVER)] = False,
    one_process: Annotated[bool, flag("Run the engine in the server's process.", panel=SERVER)] = False,
    kv_events: Annotated[
        str | None,
        option("ENDPOINT", "Publish KV events there, as vLLM's --kv-events-config: tcp://*:5557.", panel=SERVER),
    ] = None,
    kv_events_replay: Annotated[
        str | None,
        option("ENDPOINT", "Send events again and snapshots there (replay_endpoint): tcp://*:5558.", panel=SERVER),
    ] = None,
    kv_events_topic: Annotated[str, option("TEXT", "First frame of all events.", panel=SERVER)] = "",
    tool_call_parser: Annotated[
        str,
        option("NAME", "Format of calls, by vLLM's names: auto, hf, hermes...; none.", panel=SERVER),
    ] = "auto",
    generation_config: Annotated[
        str, option("auto|none", "Defaults of sampling: generation_config.json of the model, or none.", panel=SERVER)
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        option("NAME", "Format of reasoning, likewise: auto, hf, deepseek_r1...; none.", panel=SERVER),
    ] = "auto",
    replicas: Annotated[int, option("N", "Engines, each in a process of its own; on Ray.", panel=CLUSTER)] = 1,
    routing: Annotated[str, option("NAME", "prefix, least-loaded, round-robin.", panel=CLUSTER)] = "prefix",
    ray: Annotated[str | None, option("ADDRESS", "A running Ray cluster. Default: one here.", panel=CLUSTER)] = None,
    gpus_each: Annotated[float, option("N", "GPUs that a replica takes.", panel=CLUSTER)] = 0.0,
    dtype: Annotated[str, option("TYPE", "float32, bfloat16, float16, auto.")] = "float32",
    device: Annotated[str, option("NAME", "cpu, cuda, cuda:N; auto: a GPU where there is one.")] = "auto",
    engine: EngineOptions,
    web: WebOptions,
) -> None:
    """Serve a model to clients of OpenAI and Anthropic: chat, completions, streams, tool calls, cached prefixes.

    Without MODEL the small model of the demonstration is served, and nothing is downloaded. Ctrl-C drains: requests
    under way end, new ones are refused; a second one ends at once. docs/server.md has all paths and fields.

    For example:

    pagedkv serve

    pagedkv serve --demo chat

    pagedkv serve ./my-llama --port 8080 --memory 8

    pagedkv serve ./my-llama --device cuda --dtype auto

    pagedkv serve ./my-llama --api-keys keys.toml --host 0.0.0.0

    pagedkv serve ./my-llama --lora legal=./legal-adapter --lora chat=./chat-adapter

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
    if replicas > 1:
        _require_no_engine_here(kv_events, step_log, lora)
    adapters = _parse_adapters(lora or ())
    _require_usable(engine, api_keys, request_log, step_log)
    encryption, served = web.encryption(), _as_served(model, demo)
    template = None if chat_template is None else _read_template(chat_template)
    if api_keys is not None and api_key:
        raise ConfigurationError(
            "--api-key and --api-keys are both given: callers have tenants, or share all; give one"
        )
    if api_keys is None and not api_key and not without_keys:
        _require_loopback(host)
    routed = cast("Routing", as_choice(routing, ROUTINGS, "--routing"))
    pooled = None if pooling is None else cast("Pooling", as_choice(pooling, ("mean", "last"), "--pooling"))
    for folder in (model, engine.draft_model):
        if folder not in {DEMO, None}:
            require_model(str(folder))
    sockets = bound(host, port, "--host", "--port")  # last: what is refused above leaves no socket
    stages = Stages()
    with stages.stage("loading torch and transformers"), leaving_at_once(INTERRUPTED_BEFORE_SERVING):
        from pagedkv.cli import server_building  # noqa: PLC0415 - paths are checked before torch is imported
        from pagedkv.engine.llm import compile_loops  # noqa: PLC0415 - as above
        from pagedkv.engine.loading import usable_device  # noqa: PLC0415 - as above
        from pagedkv.probe import compat  # noqa: PLC0415 - as above
        from pagedkv.server import ServerConfig, run  # noqa: PLC0415 - as above
        from pagedkv.server.engine_process import EventEndpoints  # noqa: PLC0415 - as above

    compat.be_silent()
    names = [*([name] if name else []), *(served_model_name or ())] or [Path(model).name]
    has_defaults = as_choice(generation_config, ("auto", "none"), "--generation-config") == "auto" and model != DEMO
    defaults = compat.sampling_defaults(model) if has_defaults else {}
    config = ServerConfig(
        names[0],
        aliases=tuple(names[1:]),
        root_path=web.root_path,
        max_body_nbytes=max_body_nbytes,
        max_waiting=max_waiting,
        deadline_s=deadline,
        drain_s=drain,
        tool_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        outlives_engine=outlive_engine,
        strict_fields=strict_fields,
        tells_usage=enable_force_include_usage,
        tokens_as_ids=return_tokens_as_token_ids,
        tells_tokenizer=enable_tokenizer_info_endpoint,
        pooling=pooled,
        cors_origins=tuple(cors_origin or ()),
        sampling_defaults=defaults,
    )
    engine_config = engine.config(_default_memory(model, usable_device(device), replicas, gpus_each))
    engine_config = replace(engine_config, adapters=adapters or None)
    access = server_building.access(api_keys, api_key or ())
    events = None if kv_events is None else EventEndpoints(kv_events, kv_events_replay, kv_events_topic)
    parts = server_building.applied(
        server_building.Serving(
            served,
            dtype,
            engine_config,
            config,
            access,
            events,
            engine.draft_model,
            device,
            has_own_process=not one_process,
            chat_template=template,
        ),
        server_building.Replicas(replicas, routed, ray, gpus_each),
        inspects=inspect or inspect_texts,
        has_texts=inspect_texts,
    )
    with stages.stage("loading the loops, which are compiled once"):  # an engine in a process of its own is silent
        prepare(lambda: compile_loops(engine_config))
    with ExitStack() as serving:
        serving.enter_context(server_building.warnings_shown())
        building = f"loading {model}, warming it up and comparing it with itself over blocks"
        with stages.stage(building), leaving_at_once(INTERRUPTED_BEFORE_SERVING):
            application, service = serving.enter_context(parts)
        serving.enter_context(server_building.log_requests(service, request_log, writes_tokens=log_tokens))
        serving.enter_context(server_building.log_steps(service, step_log))
        address = f"{'https' if encryption else 'http'}://{host}:{sockets[0].getsockname()[1]}"

        shows = inspect or inspect_texts or replicas > 1
        try:
            run(
                application,
                service,
                host=host,
                port=port,
                sockets=sockets,
                encryption=encryption,
                on_started=lambda: tell(service, address, inspects=shows, total_s=stages.total_s),
            )
        except EngineError as problem:
            typer.echo(f"pagedkv: {problem}", err=True)
            raise typer.Exit(EXIT_ENGINE_ENDED) from problem


def tell(service: "Service", address: str, *, inspects: bool, total_s: float) -> None:
    """Say what is served, and where, and after how many seconds."""
    config, facts = service.config, service.engine.facts
    typer.echo(f"pagedkv: {facts.choices}", err=True)
    if config.sampling_defaults:
        values = ", ".join(f"{field} {value:g}" for field, value in config.sampling_defaults.items())
        typer.echo(f"pagedkv: requests that leave it open have {values} (generation_config.json)", err=True)
    beyond = f", of {facts.context:,} that the model takes" if facts.context > facts.max_tokens else ""
    typer.echo(f"pagedkv: the longest sequence has {facts.max_tokens:,} tokens, answer included{beyond}", err=True)
    if facts.adapters:
        typer.echo(f"pagedkv: its adapters are {', '.join(facts.adapters)}", err=True)
    typer.echo(f"pagedkv: {config.model_name} is served at {address}/v1 (Ctrl-C ends), after {total_s:.1f} s", err=True)
    if inspects:
        typer.echo(f"pagedkv: the inspector is at {address}/inspect", err=True)


def _parse_adapters(given: Sequence[str]) -> dict[str, str]:
    """Return the folders of adapters by name. Raises ConfigurationError; MissingExtraError: peft is not installed."""
    adapters: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not folder or name in adapters:
            raise ConfigurationError(f"--lora must be NAME=PATH, each name once, got {text!r}")
        if not Path(folder).is_dir():
            raise ConfigurationError(f"--lora {text}: there is no folder {folder}")
        adapters[name] = folder
    if adapters and find_spec("peft") is None:
        raise MissingExtraError(f"--lora needs peft: {to_install('lora')}")
    return adapters


def _as_served(model: str, demo: str) -> str | None:
    """Return the model as engines take it. Raises ConfigurationError."""
    is_chat = as_choice(demo, ("facts", "chat"), "--demo") == "chat"
    if model != DEMO and is_chat:
        raise ConfigurationError("--demo chat is a model of its own: leave MODEL out")
    return model if model != DEMO else CHAT_DEMO if is_chat else None


def _default_memory(model: str, device: str, replicas: int, gpus_each: float) -> str:
    """Return the memory for keys and values of each engine where --memory is not given.

    Engines that share a device share what is free on it: on a GPU as Ray hands it out, on a CPU equally.
    """
    if model == DEMO:
        return DEFAULT_MEMORY
    if device == "cpu":
        return f"{SHARE_OF_CPU / replicas:g}%"
    return f"{SHARE_OF_GPU * (gpus_each if replicas > 1 and 0 < gpus_each < 1 else 1):g}%"


def _one_model(argument: str, option: str | None) -> str:
    """Return the model, however it was named. Raises ConfigurationError."""
    if option is not None and argument not in {DEMO, option}:
        raise ConfigurationError(f"two models are given, {argument!r} and --model {option!r}: give one")
    return argument if option is None else option


def _require_no_engine_here(kv_events: str | None, step_log: Path | None, lora: list[str] | None) -> None:
    """Refuse what a cluster's front cannot do, since its engines are elsewhere. Raises ConfigurationError."""
    if kv_events is not None:
        raise ConfigurationError(
            "--kv-events needs --replicas 1: replicas publish at ports of their own (/inspect/routes)"
        )
    if step_log is not None:
        raise ConfigurationError("--step-log needs --replicas 1: the steps of replicas are not in this process")
    if lora:
        raise ConfigurationError("--lora needs --replicas 1: requests are routed by the model's own prefixes")


def _require_loopback(host: str) -> None:
    """Refuse an address of a server without keys that other machines can reach. Raises ConfigurationError."""
    if not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} can be reached from other machines, and there are no API keys: give --api-keys, or "
            "--without-keys to serve everyone"
        )


def _read_template(path: Path) -> str:
    """Read a chat template. Raises ConfigurationError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"--chat-template {path} cannot be read: {problem}") from problem


def _require_usable(engine: EngineOptions, api_keys: Path | None, *logs: Path | None) -> None:
    """Refuse wrong options and files before torch is imported. Raises ConfigurationError, OutputError."""
    engine.require_valid()
    if api_keys is not None:
        read_key_file(api_keys)
    for log in logs:
        if log is not None:
            require_writable(log)


@command
def new_key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is: tenants share no cached blocks.")],
    *,
    admin: Annotated[bool, typer.Option("--admin", help="The key may read metrics and the inspector.")] = False,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of keys, which gets the entry; it is made if missing.")
    ] = None,
) -> None:
    """Make an API key for pagedkv serve --api-keys, and its entry for that file.

    The key is the only line of the standard output. It is stored nowhere: the entry has its digest.

    For example:

    pagedkv new-key team-a --file keys.toml

    pagedkv serve --api-keys keys.toml
    """
    key, digest = make_key()
    entry = entry_of(KeyOwner(tenant, admin), digest)
    if file is None:
        parse_key_file(entry, "the entry")
        typer.echo(f"Its entry for --api-keys:\n\n{entry}\nThe key, which is shown only here:\n", err=True)
    else:
        require_writable(file)
        if file.exists():
            read_key_file(file)
            entry = f"{file.read_text(encoding='utf-8').rstrip()}\n\n{entry}"
        parse_key_file(entry, str(file))
        with atomic_file(file) as written:
            written.write(entry.encode())
        typer.echo(f"{file} has its entry. The key, which is shown only here:", err=True)
    typer.echo(key)
