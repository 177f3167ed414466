"""JSON responses, written by msgspec: NaN becomes null, since JSON has no NaN."""

from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["json_response"]


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401
    """Answer with JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
