"""``pagedkv route``: a router before stock servers of vLLM and SGLang, or pagedkv's own."""

import logging
from pathlib import Path
from typing import Annotated, Final

import typer

from pagedkv.api_keys import read_key_file
from pagedkv.cli.options import command, flag, is_loopback, option, parse_size_with_unit
from pagedkv.contract.arguments import as_choice
from pagedkv.errors import ConfigurationError
from pagedkv.listening import bound
from pagedkv.routing import ROUTINGS, Routing

ENGINES: Final = "Engines"
ROUTER: Final = "Router"


@command
def route(  # noqa: PLR0913 - typer needs a parameter for each option
    engines: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="Servers, as in http://127.0.0.1:8000.")
    ] = None,
    *,
    kv_events: Annotated[
        list[str] | None, option("ENDPOINT", "KV events of a server; once for each URL, in order.", panel=ENGINES)
    ] = None,
    kv_events_replay: Annotated[
        list[str] | None, option("ENDPOINT", "Where it sends events again; once for each.", panel=ENGINES)
    ] = None,
    engines_file: Annotated[
        Path | None, option("FILE", "Engines as JSON, read again when it changes.", "--engines", panel=ENGINES)
    ] = None,
    tokenizer: Annotated[
        str | None, option("FOLDER", "Tokenise here; default: by the engines' /tokenize.", panel=ENGINES)
    ] = None,
    host: Annotated[str, option("ADDRESS", "Address to listen at.", panel=ROUTER)] = "127.0.0.1",
    port: Annotated[int, option("N", "Port to listen at.", panel=ROUTER)] = 8080,
    routing: Annotated[str, option("NAME", "prefix, least-loaded or round-robin.", panel=ROUTER)] = "prefix",
    api_keys: Annotated[
        Path | None, option("FILE", "Keys of administrators, who see the page and change engines.", panel=ROUTER)
    ] = None,
    max_body: Annotated[str, option("SIZE", "The largest body of a request.", panel=ROUTER)] = "32MiB",
    first_byte: Annotated[float, option("S", "Most seconds to an engine's first byte.", panel=ROUTER)] = 600.0,
    drain: Annotated[float, option("S", "Seconds that requests have after Ctrl-C.", panel=ROUTER)] = 30.0,
    verbose: Annotated[bool, flag("Print a line for each request.", panel=ROUTER)] = False,
) -> None:
    """Route requests before stock vLLM and SGLang servers: each goes where most of its prompt is cached, and says why.

    OpenAI's and Anthropic's requests are passed on byte for byte, streams too. The reason is in the headers of each
    answer and on the page /route. docs/route.md tells how to start the engines.

    For example:

    pagedkv route http://127.0.0.1:8000 http://127.0.0.1:8001

    pagedkv route http://a:8000 http://b:8000 --kv-events tcp://a:5557 --kv-events tcp://b:5557

    pagedkv route --engines engines.json --tokenizer ./my-model --port 9000
    """
    from pagedkv.route import (  # noqa: PLC0415
        Engine,
        EngineRouter,
        RouteConfig,
        create_app,
        read_engines,
        run,
        tokenizer_named,
    )
    from pagedkv.route.proxy import ProxyLimits  # noqa: PLC0415 - help works without its extra
    from pagedkv.warming import ROUTING  # noqa: PLC0415 - as above

    if (engines_file is None) == (not engines):
        raise ConfigurationError("name the servers by URL, or by a file (--engines), and not by both")
    if engines_file is not None:
        if kv_events or kv_events_replay:
            raise ConfigurationError("--kv-events belongs to servers named by URL; the file has kv_events of each")
        listed = read_engines(engines_file)
    else:
        urls = engines or []
        events = _for_each(kv_events, urls, "--kv-events")
        again = _for_each(kv_events_replay, urls, "--kv-events-replay")
        listed = [Engine(*each) for each in zip(urls, events, again, strict=True)]
    as_choice(routing, ROUTINGS, "--routing")
    way: Routing = routing  # type: ignore[assignment]  # checked before
    config = RouteConfig(
        ProxyLimits(max_body=parse_size_with_unit(max_body, "--max-body"), first_byte_s=first_byte),
        engines_file=engines_file,
        keys=None if api_keys is None else read_key_file(api_keys),
        drain_s=drain,
    )
    logging.basicConfig(format="pagedkv: %(message)s", level=logging.WARNING)
    logging.getLogger("pagedkv.route").setLevel(logging.INFO if verbose else logging.WARNING)
    ROUTING.compile()  # now, not in the first decision
    sockets = bound(host, port, "--host", "--port")
    typed = sockets[0].getsockname()[1]
    shown = "127.0.0.1" if is_loopback(host) else host
    local = None if tokenizer is None else tokenizer_named(tokenizer)
    with EngineRouter(listed, routing=way) as router:
        app = create_app(router, config, local)
        run(
            app,
            config,
            sockets,
            lambda: typer.echo(f"pagedkv route: http://{shown}:{typed}/v1, page http://{shown}:{typed}/route"),
        )


def _for_each(given: list[str] | None, urls: list[str], name: str) -> list[str | None]:
    """Return an endpoint for each server, or None for each."""
    if not given:
        return [None] * len(urls)
    if len(given) != len(urls):
        raise ConfigurationError(f"{name} is given {len(given)} times for {len(urls)} servers: give it once for each")
    return list(given)
