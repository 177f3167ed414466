"""A router before any server: OpenAI's and Anthropic's requests go to the engine that has cached most of their prompt.

::

    engines    the engines: addresses, their file, what is known of each
    placing    EngineRouter: which engine a request goes to, and why; follows KV events, remembers what was sent
    prompts    the tokens of a request's prompt: by an engine's /tokenize, or a tokenizer here
    proxy      a request and its answer, byte for byte, to one engine, or to another where nothing was taken
    app        paths of the router itself: page, engines, metrics; health checks; the application at an address

It knows no model and computes nothing: engines are stock servers of vLLM and SGLang, or pagedkv's. As a library::

    from pagedkv.route import Engine, EngineRouter

    with EngineRouter([Engine("http://a:8000", "tcp://a:5557"), Engine("http://b:8000")]) as router:
        placed = router.choose(token_ids)
        try:
            ...  # send the request to placed.url, and at its first token:
            router.prefilled(placed)
        finally:
            router.ended(placed)
"""

from pagedkv.contract.extras import needing

with needing("route", "pagedkv.route"):
    import aiohttp  # noqa: F401 - imported first, so that a missing package raises our MissingExtraError
    import msgspec  # noqa: F401 - as aiohttp
    import prometheus_client  # noqa: F401 - as aiohttp
    import starlette  # noqa: F401 - as aiohttp
    import uvicorn  # noqa: F401 - as aiohttp
    import zmq  # noqa: F401 - as aiohttp

from pagedkv.route.app import RouteConfig, create_app, run
from pagedkv.route.engines import Engine, EngineStatus, read_engines
from pagedkv.route.placing import EngineRouter, Placed
from pagedkv.route.prompts import Prompt, Prompts, Tokenizer, tokenizer_named

__all__ = [
    "Engine",
    "EngineRouter",
    "EngineStatus",
    "Placed",
    "Prompt",
    "Prompts",
    "RouteConfig",
    "Tokenizer",
    "create_app",
    "read_engines",
    "run",
    "tokenizer_named",
]
