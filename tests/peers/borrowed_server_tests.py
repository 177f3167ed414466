"""Tests of vLLM's HTTP server, read from its source distribution and run against ours.

A module of theirs is executed as it is; only `tests.utils`, where its `RemoteOpenAIServer` comes from, is replaced, and
our module defines the fixture `server` itself. Nothing of theirs is copied.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import anthropic
import openai
import pytest

from pagedkv.server import Service
from tests.server.serving import running

__all__ = ["RemoteServer", "borrowed", "cases_of", "leave_out", "served", "their_tests", "without_server"]

FIXTURES: Final = frozenset({"client", "server"})
"""Fixtures of theirs that lead to a server."""


@final
class RemoteServer:
    """What their tests use of `RemoteOpenAIServer`.

    Args:
        url: of the running server.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def url_for(self, *parts: str) -> str:
        """Return the address of a path."""
        return "/".join((self._url, *parts))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:  # noqa: ANN401 - of the client
        """Return OpenAI's client of the server."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="none", max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:  # noqa: ANN401 - of the client
        """Return Anthropic's client of the server."""
        return anthropic.AsyncAnthropic(base_url=self._url, api_key="none", max_retries=0, **options)


@contextmanager
def served(service: Service) -> Iterator[RemoteServer]:
    """Run a server, and yield what their tests call it by."""
    with running(service) as url:
        yield RemoteServer(url)


def borrowed(path: str) -> ModuleType:
    """Execute a module of vLLM's tests; skip the module that asks where the distribution or a package is absent.

    Args:
        path: of the file, from the folder ``tests`` of the distribution.
    """
    for package in ("pytest_asyncio", "jsonschema"):
        pytest.importorskip(package, reason=f"vLLM's tests need {package}: make test-peers installs it")
    found = importlib.util.find_spec("vllm")
    folder = None if found is None or found.origin is None else Path(found.origin).parents[1]
    file = None if folder is None else folder / "tests" / path
    if file is None or not file.exists():
        pytest.skip(f"there is no {file or 'vllm'}: unpack vLLM's source distribution", allow_module_level=True)
    utils = ModuleType("tests.utils")
    vars(utils)["RemoteOpenAIServer"] = RemoteServer
    spec = importlib.util.spec_from_file_location(f"borrowed_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get("tests.utils")
    sys.modules["tests.utils"] = utils
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["tests.utils"]
        if before is not None:
            sys.modules["tests.utils"] = before
    return module


def cases_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the tests of a module of theirs that lead to a server, by name."""
    return {name: test for name, test in their_tests(module).items() if _asks_a_server(test)}


def without_server(module: ModuleType) -> set[str]:
    """Return the names of a module's tests that lead to no server: they test vLLM's own classes."""
    return {name for name, test in their_tests(module).items() if not _asks_a_server(test)}


def leave_out(request: pytest.FixtureRequest, left_out: Mapping[str, str]) -> None:
    """Expect a case to fail that is listed: where it passes, that is an error.

    Args:
        request: of a fixture of the case; left_out: why, by the name of a test or of one of its cases.
    """
    reason = left_out.get(request.node.name) or left_out.get(request.node.originalname)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


def their_tests(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the tests of a module of theirs, by name."""
    return {name: value for name, value in vars(module).items() if name.startswith("test_") and callable(value)}


def _asks_a_server(test: Callable[..., Any]) -> bool:
    return not FIXTURES.isdisjoint(inspect.signature(test).parameters)
