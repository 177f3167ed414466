"""Engine: the addresses of one engine; EngineStatus: what the router knows of it; their list as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pagedkv.errors import ConfigurationError
from pagedkv.events import Endpoints

FIELDS: Final = frozenset({"url", "kv_events", "kv_events_replay", "is_draining"})


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine.

    Args:
        url: of its HTTP server, without a path; also its name.
        kv_events: endpoint of its KV events; None: it publishes none.
        kv_events_replay: endpoint at which it sends batches again.
        is_draining: whether it gets no further requests.

    Raises:
        ConfigurationError: an address is invalid.
    """

    url: str
    kv_events: str | None = None
    kv_events_replay: str | None = None
    is_draining: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ConfigurationError(
                f"{self.url!r} is not the address of a server. Give it as in http://127.0.0.1:8000"
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))
        if self.kv_events is not None:
            Endpoints(self.kv_events, self.kv_events_replay)
        elif self.kv_events_replay is not None:
            raise ConfigurationError(f"{self.url} has an endpoint of batches again, and none of KV events: give both")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What is known of an engine.

    Args:
        engine: its addresses.
        is_up: whether its last health check was answered.
        index: state of the list of its blocks: exact, degraded, empty.
        source: where the list is from: ``events``, or ``sent`` for what was sent to it.
        num_blocks: blocks in the list.
        num_waiting, num_decoding: outstanding requests without and with a first token.
        num_prefill_tokens: prompt tokens that are still to be computed there.
        num_lost_batches, num_restarts, num_unplaced: batches of events that were lost, processes after the first, and
            stored blocks whose beginning is not known.
        problem: why its events are not used, or what of them is not understood; None: nothing is wrong.
    """

    engine: Engine
    is_up: bool
    index: str
    source: str
    num_blocks: int
    num_waiting: int
    num_decoding: int
    num_prefill_tokens: int
    num_lost_batches: int
    num_restarts: int
    num_unplaced: int
    problem: str | None


def parse_engines(text: str | bytes, source: str) -> list[Engine]:
    """Read engines from JSON: a list of objects with the fields of :class:`Engine`. Raises ConfigurationError."""
    try:
        entries = json.loads(text)
    except ValueError as problem:
        raise ConfigurationError(f"{source} is not JSON: {problem}") from problem
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(f'{source} must be a list of engines, as in [{{"url": "http://127.0.0.1:8000"}}]')
    engines = [_engine(entry, f"entry {place + 1} of {source}") for place, entry in enumerate(entries)]
    require_distinct(engines)
    return engines


def _engine(entry: object, where: str) -> Engine:
    if not isinstance(entry, dict) or not set(entry) <= FIELDS or not isinstance(entry.get("url"), str):
        raise ConfigurationError(f"{where} must have a url, and may have {', '.join(sorted(FIELDS - {'url'}))}")
    for name in ("kv_events", "kv_events_replay"):
        if not isinstance(entry.get(name), str | None):
            raise ConfigurationError(f"{name} of {where} must be a text or null, got {entry[name]!r}")
    if not isinstance(entry.get("is_draining", False), bool):
        raise ConfigurationError(f"is_draining of {where} must be true or false")
    return Engine(**entry)


def read_engines(path: Path) -> list[Engine]:
    """Read a file of engines, as :func:`parse_engines`. Raises ConfigurationError."""
    try:
        return parse_engines(path.read_bytes(), str(path))
    except OSError as problem:
        raise ConfigurationError(f"the file of engines {path} cannot be read: {problem.strerror}") from problem


def require_distinct(engines: Sequence[Engine]) -> None:
    """Raise ConfigurationError if two engines have one address."""
    urls = [engine.url for engine in engines]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise ConfigurationError(f"an engine is named twice: {', '.join(twice)}")


def as_entries(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """Return engines as :func:`parse_engines` reads them."""
    return [asdict(engine) for engine in engines]
