"""ReplayServer: serves the inspector's page of a replay, in a thread, while another thread runs the replay.

It has the paths of :mod:`~pagedkv.server.inspector.pages`, and::

    POST /inspect/pause        {"paused": true}: the replay's time stands still until {"paused": false}

It has no paths of models.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final, final

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response

from pagedkv.errors import ConfigurationError
from pagedkv.server.access import Access
from pagedkv.server.bodies import BodyLimit
from pagedkv.server.config import ServerConfig, SlowCause
from pagedkv.server.errors import ApiError, add_error_answers, json_response
from pagedkv.server.inspector.inspected import Inspected
from pagedkv.server.inspector.pages import add_inspector_paths
from pagedkv.server.running import uvicorn_config
from pagedkv.server.static_pages import PAGE_HEADERS

__all__ = ["ReplayServer"]

MOST_BODY_NBYTES: Final = 1024
DRAIN_S: Final = 2.0
JOIN_S: Final = 10.0
"""Most time for the server's thread to end; it does not keep the process alive."""
JSON: Final = "application/json"


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to pause."""

    paused: bool


@final
class ReplayServer:
    """Serves the page of a replay.

    Args:
        inspected: the replay's data.
        title: the page's title.
        access: identifies callers; the data needs an administrator.
        pause: called with whether the replay is to pause, in the server's thread.

    Attributes:
        access, config, is_alive, is_draining: as of a service.
    """

    def __init__(self, inspected: Inspected, title: str, access: Access, pause: Callable[[bool], None]) -> None:
        self.access = access
        self.config = ServerConfig(title, drain_s=DRAIN_S)
        self.is_alive = True
        self.is_draining = False
        self._pause = pause
        self._app = FastAPI(title="pagedkv replay", docs_url=None, redoc_url=None, openapi_url=None)
        self._app.add_middleware(BodyLimit, max_nbytes=MOST_BODY_NBYTES)
        add_error_answers(self._app, lambda _: None)
        add_inspector_paths(self._app, self, "/inspect", lambda _: (inspected, title))
        self._app.post("/inspect/pause")(self._paused)

    def note_slow(self, cause: SlowCause) -> None:
        """Do nothing: no metric counts slow clients."""

    @contextlib.contextmanager
    def running(self, host: str, port: int) -> Iterator[str]:
        """Serve in a thread; yield the page's address.

        Args:
            host, port: where to listen; port 0: any free one.

        Raises:
            ConfigurationError: the server cannot listen there.
        """
        with _listening(host, port) as listening:
            server = uvicorn.Server(uvicorn_config(self._app, self, host=host, port=port))
            thread = threading.Thread(
                target=server.run, kwargs={"sockets": [listening]}, name="pagedkv inspector", daemon=True
            )
            thread.start()
            shown = f"[{host}]" if ":" in host else host
            try:
                yield f"http://{shown}:{listening.getsockname()[1]}/inspect"
            finally:
                self.is_draining = True
                server.should_exit = True
                thread.join(JOIN_S)

    async def _paused(self, request: Request) -> Response:
        if not self.access.identify(request.headers).is_admin:
            raise ApiError(403, "a pause needs an administrator's key")
        if request.headers.get("content-type") != JSON:  # which pages of other origins cannot send unasked
            raise ApiError(415, f"the content type must be {JSON}")
        try:
            asked = msgspec.json.decode(await request.body(), type=_Pause)
        except msgspec.DecodeError as problem:
            raise ApiError(400, f'the body must be {{"paused": true}} or {{"paused": false}}: {problem}') from problem
        self._pause(asked.paused)
        return json_response({"paused": asked.paused}, headers=PAGE_HEADERS)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen at an address. Raises ConfigurationError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as opened:
            opened.enter_context(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
            opened.pop_all()
    except OSError as problem:
        raise ConfigurationError(f"the page cannot be served at {host}:{port} ({problem.strerror})") from None
    with listening:
        yield listening
