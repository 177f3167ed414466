"""ReplayPage: the inspector's page over a replay, from the first request until Ctrl-C."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeVar, final

import typer

from pagedkv.api_keys import new_key
from pagedkv.cli.inspecting.following import ReplayFollower, ReplaySubject
from pagedkv.cli.inspecting.options import InspectOptions, is_loopback
from pagedkv.cli.inspecting.pace import Pace
from pagedkv.planner.traces.request import Request
from pagedkv.server.access import Access, ApiKeys, Caller, OpenAccess
from pagedkv.server.inspector import InspectedReplay, ReplayServer
from pagedkv.simulation import VirtualServer

__all__ = ["ReplayPage", "replay_page"]

T = TypeVar("T")

ADMINISTRATOR: Final = "administrator"


@contextmanager
def replay_page(title: str, options: InspectOptions) -> Iterator["ReplayPage"]:
    """Yield a page to show a replay with; its server ends with the block.

    Raises:
        ConfigurationError: the file of keys cannot be read.
    """
    access, key = _access(options)
    with ExitStack() as serving:
        yield ReplayPage(title, options, access, key, serving)


def _access(options: InspectOptions) -> tuple[Access, str | None]:
    """Return who may see the page, and the key that was made for it, if any."""
    if options.inspect_keys is not None:
        return ApiKeys.read(options.inspect_keys), None
    if is_loopback(options.inspect_host):
        return OpenAccess(), None
    key, digest = new_key()
    return ApiKeys({digest: Caller(ADMINISTRATOR, is_admin=True)}), key


@final
class ReplayPage:
    """The page over one replay.

    Args:
        title: the page's title.
        options: where it is served, and how fast the replay runs.
        access: identifies callers; key: the key to be printed, if one was made.
        serving: the page is served until this is closed.
    """

    def __init__(
        self, title: str, options: InspectOptions, access: Access, key: str | None, serving: ExitStack
    ) -> None:
        self._title = title
        self._options = options
        self._access = access
        self._key = key
        self._serving = serving
        self._pace = Pace(options.speed)
        self._is_over = False

    def follow(self, server: VirtualServer, first: Request) -> None:
        """Serve the page of a replay, before it gets its first request.

        Raises:
            ConfigurationError: the server cannot listen at the address.
        """
        pace, subject = self._pace, ReplaySubject(server)
        inspected = InspectedReplay(
            subject,
            self._between_steps,
            virtual_clock=lambda: pace.now_s,
            state=lambda: follower.state(is_over=self._is_over),
            unit_s=pace.speed or 1.0,
            shows_tokens=first.prompt_token_ids is not None,
        )
        follower = ReplayFollower(server, subject, inspected, pace)
        server.follow(follower)
        page = ReplayServer(inspected, self._title, self._access, lambda paused: pace.pause(is_paused=paused))
        url = self._serving.enter_context(page.running(self._options.inspect_host, self._options.inspect_port))
        self._serving.callback(pace.close)
        typer.echo(f"pagedkv: the replay is shown at {url}", err=True)
        if self._key is not None:
            typer.echo(f"pagedkv: its administrator's key is {self._key}", err=True)

    def _between_steps(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.wrap_future(self._pace.call_soon(work))

    def stay(self) -> None:
        """Serve the page of the replay that has ended, until Ctrl-C."""
        self._is_over = True
        with suppress(KeyboardInterrupt):
            typer.echo("pagedkv: the replay has ended; its page stays until Ctrl-C", err=True)
            self._pace.stay()
