"""Records: all inputs and choices of a router as JSON lines, and their replay.

A router that is made with ``note=RecordWriter(file.write)`` writes a line for each input. :func:`replay` passes them to
a router of the same groups, which makes the same choices, since choices depend on the inputs alone. So a choice made in
service can be examined later, and other rules can be tried on the same inputs::

    {"kind": "router", "t": 0.0, "routing": "prefix", "rules": {...}}
    {"kind": "join", "t": 0.0, "replica": "r0"}
    {
        "kind": "arrival",
        "t": 0.1,
        "request": 0,
        "num_tokens": 400,
        "digests": {"16": "..."},
        "among": null,
        "chosen": "r0",
        "reason": "...",
    }

A prompt is recorded by the digests of its blocks, without its tokens. 16 bytes of a digest are written, as in the
index. Arrays are base64 of little-endian integers. ``t`` is the caller's time; for an input without a time it is that
of the line before.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

from pagedkv.contract.answers import CacheEvents, StoredBlocks, TierEvents
from pagedkv.contract.arrays import DIGEST_NBYTES, DIGEST_WORDS, Int32Array, Uint32Array
from pagedkv.contract.spec import GroupSpec
from pagedkv.errors import ConfigurationError
from pagedkv.routing.prompts import HashedPrompt
from pagedkv.routing.replica_index import ReplicaIndex
from pagedkv.routing.routers import Choice, Router, RoutingRules

Line: TypeAlias = dict[str, Any]

KEPT_NBYTES: Final = 16
KEPT_WORDS: Final = 4


@final
class RecordWriter:
    """Writes the inputs and choices of a router.

    Args:
        write: called with each line, which ends with a line break: the ``write`` method of a text file.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._now_s = 0.0

    def __call__(self, kind: str, now_s: float | None, values: Mapping[str, object]) -> None:
        """Write one input."""
        self._now_s = self._now_s if now_s is None else now_s
        line = {"kind": kind, "t": self._now_s} | {name: _plain(value) for name, value in values.items()}
        self._write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class ReplayedChoice:
    """A choice of a replay.

    Args:
        request: number of the request.
        now_s: recorded time of its arrival.
        recorded: the recorded choice of a replica.
        choice: the choice of the replay's router.
    """

    request: int
    now_s: float
    recorded: str
    choice: Choice

    @property
    def is_same(self) -> bool:
        """Whether the replay chose the same replica."""
        return self.choice.replica == self.recorded


def replay(
    lines: Iterable[str], groups: Sequence[GroupSpec], rules: RoutingRules | None = None
) -> Iterator[ReplayedChoice]:
    """Pass a recorded sequence to a new router, and yield its choices.

    Args:
        lines: the lines of a record.
        groups: the model's KV-cache groups.
        rules: rules of the new router; None: the recorded rules. With other rules too, first tokens and ends of
            requests keep their recorded times.

    Raises:
        ConfigurationError: a line is invalid, or inconsistent with earlier lines.
    """
    router: Router | None = None
    for number, text in enumerate(lines, 1):
        try:
            line: Line = json.loads(text)
            if router is None:
                router = Router(ReplicaIndex(groups), line["routing"], rules or RoutingRules(**line["rules"]))
            elif line["kind"] == "arrival":
                yield _choose(router, line)
            else:
                _INPUTS[line["kind"]](router, line)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"line {number} is not an input of a router: {text!r:.80}") from error


def _choose(router: Router, line: Line) -> ReplayedChoice:
    router.ended(line["request"])  # a request comes again when its replica has gone; by other rules it is elsewhere
    choice = router.choose_hashed(line["request"], _prompt(line), line["t"], among=line["among"])
    return ReplayedChoice(line["request"], line["t"], line["chosen"], choice)


def _prompt(line: Line) -> HashedPrompt:
    digests = {int(size): _digest_words(text) for size, text in line["digests"].items()}
    return HashedPrompt(line["num_tokens"], digests)


def _events(router: Router, line: Line) -> None:
    events = [
        _tier_events(each)
        if "medium" in each
        else CacheEvents(
            each["pool"],
            kinds := _integers(each["kinds"]),
            _integers(each["groups"]),
            np.zeros_like(kinds),
            digests := _digests(each["digests"]),
            np.zeros_like(digests),
        )
        for each in line["events"]
    ]
    is_proven = line.get("is_proven", True)
    router.apply(line["replica"], line["lifetime"], line["batch"], events, line["t"], is_proven=is_proven)


def _snapshot(router: Router, line: Line) -> None:
    blocks = [
        _tier_events(each)
        if "medium" in each
        else StoredBlocks(
            each["pool"],
            groups := _integers(each["groups"]),
            np.zeros_like(groups),
            digests := _digests(each["digests"]),
            np.zeros_like(digests),
            np.zeros(len(groups), bool),
        )
        for each in line["blocks"]
    ]
    router.index.restore(line["replica"], line["lifetime"], line["next_batch"], blocks, line["t"])


def _tier_events(each: Line) -> TierEvents:
    return TierEvents(each["medium"], each["run_tokens"], _integers(each["kinds"]), _digests(each["keys"]))


def _alive(router: Router, line: Line) -> None:
    router.index.note_alive(line["replica"], line["lifetime"], line["next_batch"], line["t"])


_INPUTS: Final[dict[str, Callable[[Router, Line], object]]] = {
    "join": lambda router, line: router.add_replica(line["replica"], line["t"]),
    "leave": lambda router, line: router.remove_replica(line["replica"]),
    "events": _events,
    "snapshot": _snapshot,
    "alive": _alive,
    "forget": lambda router, line: router.index.forget(line["replica"], line["t"]),
    "weight": lambda router, line: router.weigh(line["medium"], line["weight"], line["t"]),
    "take_back": lambda router, line: router.take_back(line["request"], _prompt(line), line["t"]),
    "first_token": lambda router, line: router.prefilled(line["request"]),
    "end": lambda router, line: router.ended(line["request"]),
}


# Values as JSON and back


def _plain(value: object) -> object:
    match value:
        case RoutingRules():
            return asdict(value)
        case HashedPrompt():
            return {str(size): _text(digests[:, :KEPT_WORDS].astype(">u4")) for size, digests in value.digests.items()}
        case CacheEvents() | StoredBlocks() | TierEvents():
            return _blocks(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value


def _blocks(value: CacheEvents | StoredBlocks | TierEvents) -> dict[str, object]:
    kinds = {} if isinstance(value, StoredBlocks) else {"kinds": _text(value.kinds.astype("<i4"))}
    if isinstance(value, TierEvents):
        return {"medium": value.medium, "run_tokens": value.run_tokens, "keys": _kept(value.keys), **kinds}
    groups = _text(value.groups.astype("<i4"))
    return {"pool": value.pool, "groups": groups, "digests": _kept(value.digests), **kinds}


def _kept(digests: np.ndarray[Any, Any]) -> str:
    return _text(np.asarray(digests, np.uint8).reshape(-1, DIGEST_NBYTES)[:, :KEPT_NBYTES])


def _text(values: np.ndarray[Any, Any]) -> str:
    return b64encode(values.tobytes()).decode()


def _integers(text: str) -> Int32Array:
    return np.frombuffer(b64decode(text), "<i4").astype(np.int32)


def _digests(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    kept = np.frombuffer(b64decode(text), np.uint8).reshape(-1, KEPT_NBYTES)
    return np.pad(kept, ((0, 0), (0, DIGEST_NBYTES - KEPT_NBYTES)))


def _digest_words(text: str) -> Uint32Array:
    kept = np.frombuffer(b64decode(text), ">u4").astype(np.uint32).reshape(-1, KEPT_WORDS)
    return np.pad(kept, ((0, 0), (0, DIGEST_WORDS - KEPT_WORDS)))
