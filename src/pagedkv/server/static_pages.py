"""Pages of the package: an HTML file, its style and its script, which reads data from the same server."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import Response

from pagedkv.server.access import Access, OpenAccess

__all__ = ["PAGE_HEADERS", "add_page"]

NEEDS_KEY: Final = b'data-access="keys"'
OPEN: Final = b'data-access="open"'
PAGE_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Headers of pages and of their data: browsers cache nothing, and load nothing from other servers."""


def add_page(app: FastAPI, access: Access, path: str, package: str, name: str) -> None:
    """Add a page, as ``PATH``, ``PATH/NAME.css`` and ``PATH/NAME.js``.

    The page of a server without API keys sends no key; other pages read no data until the user has entered a key.

    Args:
        app: the application.
        access: the access of the application's service.
        path: the page's path.
        package: the package with the page's files in its folder ``static``.
        name: the files' name without its ending.
    """
    static = files(package) / "static"
    html = (static / f"{name}.html").read_bytes()
    is_open = isinstance(access, OpenAccess)
    for own_path, content, kind in (
        (path, html.replace(NEEDS_KEY, OPEN if is_open else NEEDS_KEY), "text/html"),
        (f"{path}/{name}.css", (static / f"{name}.css").read_bytes(), "text/css"),
        (f"{path}/{name}.js", (static / f"{name}.js").read_bytes(), "text/javascript"),
    ):
        app.get(own_path, include_in_schema=False)(_sender(content, kind))


def _sender(content: bytes, kind: str) -> Callable[[], Any]:
    async def send() -> Response:
        return Response(content, headers=PAGE_HEADERS, media_type=kind)

    return send
