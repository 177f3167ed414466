"""EngineRouter: which engine a request goes to, and why.

A :class:`~pagedkv.routing.Router` over engines that are not ours. Its index lists the blocks of an engine from

    events    its KV events, which a thread of each engine follows: what it stored and evicted
    sent      the prompts that were sent to it, the last ``sent_tokens`` of them: for an engine that publishes nothing,
              has published nothing yet, or whose events are not understood

so that an engine without events is still sent what continues its prompts. The groups of the model, and with them the
size of blocks, are those that events show. An engine whose blocks are of another form than those of the others is
named, and served by what was sent to it.

All methods may be called from any thread; each holds one lock for the time of one decision or one batch of events.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Self, final

import numpy as np

from pagedkv.contract.answers import REMOVED, STORED, CacheEvents
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import FullAttention, GroupSpec, TokenIds
from pagedkv.errors import NoEngineError, RecordingError
from pagedkv.events import EventFollower
from pagedkv.route.engines import Engine, EngineStatus, require_distinct
from pagedkv.routing import Choice, HashedPrompt, IndexState, ReplicaIndex, Router, Routing, RoutingRules
from pagedkv.wire import Applied, FollowedMessage, follow

LOG: Final = logging.getLogger("pagedkv.route")
POLL_S: Final = 0.1
SENT: Final = "sent"
SENT_TOKENS: Final = 2_000_000
BLOCK_SIZE: Final = 16
UNKNOWN: Final = "the tokens of its prompt are not known, and it has the least to do"


@dataclass(slots=True, eq=False)
class Placed:
    """A request that goes to an engine, until :meth:`EngineRouter.ended`.

    Args:
        number: the router's number of it.
        url: the engine.
        reason: why.
        num_tokens: tokens of its prompt; an estimate where they are not known.
        num_predicted: tokens that the engine will hit by what is known of its cache, promises of others aside.
        choice: the decision, with the state of every engine.
    """

    number: int
    url: str
    reason: str
    num_tokens: int
    num_predicted: int
    choice: Choice
    prompt: HashedPrompt
    form: int
    is_prefilled: bool = False


@final
class SentBlocks:
    """The blocks of prompts that were sent to one engine, the latest ``most`` of them."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self.next_batch = 0

    def add(self, pools: Collection[tuple[int, int, str]], prompt: HashedPrompt, most: int) -> list[CacheEvents]:
        """Add a prompt's blocks; return the changes for the index. O(blocks)."""
        events = []
        for number, size, pool in pools:
            digests = [each.tobytes() for each in prompt.digests[size].astype(">u4").view(np.uint8).reshape(-1, 32)]
            for digest in digests:
                self._blocks[number, digest] = None
                self._blocks.move_to_end((number, digest))
            old = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - most // size)]
            changes = [(STORED, number, each) for each in digests] + [(REMOVED, *each) for each in old]
            kinds = np.array([kind for kind, _, _ in changes], np.int32)
            groups = np.array([group for _, group, _ in changes], np.int32)
            named = np.frombuffer(b"".join(digest for *_, digest in changes), np.uint8).reshape(-1, 32)
            events.append(CacheEvents(pool, kinds, groups, np.zeros_like(kinds), named, np.zeros_like(named)))
        return events


@final
class _Followed:
    """An engine, and the thread that follows its events."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_up = True
        self.is_removed = False
        self.sent = SentBlocks()
        self.groups: tuple[GroupSpec, ...] = ()
        self.problem: str | None = None
        self.num_restarts = 0
        self.num_unplaced = 0
        self.should_begin_anew = False
        self.thread: threading.Thread | None = None


@final
class EngineRouter:
    """Routes requests to engines. Use it as a context manager, or call :meth:`close`.

    Args:
        engines: the engines, at most 64.
        routing: ``prefix``, ``least-loaded`` or ``round-robin``.
        rules: the numbers of the cost (:class:`~pagedkv.routing.RoutingRules`).
        groups: the model's groups before events show them.
        sent_tokens: tokens of prompts that are remembered of each engine without events.
        clock: returns monotonic seconds.

    Raises:
        ConfigurationError: an address is invalid, or an engine is named twice.
    """

    def __init__(  # noqa: PLR0913 - engines, and how to choose
        self,
        engines: Sequence[Engine],
        *,
        routing: Routing = "prefix",
        rules: RoutingRules | None = None,
        groups: Sequence[GroupSpec] = (FullAttention(BLOCK_SIZE),),
        sent_tokens: int = SENT_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._clock = clock
        self._sent_tokens = sent_tokens
        self._groups = tuple(groups)
        self._router = Router(ReplicaIndex(self._groups), routing, rules)
        self._form = 0  # counts changes of the groups
        self._numbers = count()
        self._engines: dict[str, _Followed] = {}
        self.set_engines(engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. May be called again."""
        self._is_over.set()
        for each in [*self._engines.values()]:
            if each.thread is not None:
                each.thread.join()

    # Engines

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines, those that drain too."""
        with self._lock:
            return tuple(each.engine for each in self._engines.values())

    @property
    def urls_up(self) -> list[str]:
        """The engines that answer health checks."""
        with self._lock:
            return [url for url, known in self._engines.items() if known.is_up]

    def set_engines(self, engines: Sequence[Engine]) -> None:
        """Replace the list: new ones join, changed ones change, others leave; their requests under way go on.

        Raises:
            ConfigurationError: an engine is named twice, or there are more than 64; the list stays as it was.
        """
        require_distinct(engines)
        with self._lock:
            wanted = {engine.url: engine for engine in engines}
            for url, known in [*self._engines.items()]:
                new = wanted.get(url)
                if new is None or (new.kv_events, new.kv_events_replay) != (
                    known.engine.kv_events,
                    known.engine.kv_events_replay,
                ):
                    known.is_removed = True
                    del self._engines[url]
                    self._router.remove_replica(url)
            for url, engine in wanted.items():
                if url in self._engines:
                    self._engines[url].engine = engine
                    continue
                self._router.add_replica(url, self._clock())
                followed = self._engines[url] = _Followed(engine)
                if engine.kv_events is not None:
                    followed.thread = threading.Thread(target=self._follow, args=(followed,), daemon=True)
                    followed.thread.start()

    def drain(self, url: str, *, is_draining: bool = True) -> None:
        """Send an engine no further requests, or send it some again. Raises KeyError: there is no such engine."""
        with self._lock:
            known = self._engines[url]
            old = known.engine
            known.engine = Engine(old.url, old.kv_events, old.kv_events_replay, is_draining)

    def note_health(self, url: str, *, is_up: bool, is_gone: bool = False) -> None:
        """Tell whether an engine answers; ``is_gone``: its port refuses connections, so its cache has ended too."""
        with self._lock:
            known = self._engines.get(url)
            if known is None:
                return
            if known.is_up != is_up:
                LOG.warning("engine %s is %s", url, "up" if is_up else "down")
            if is_gone and known.is_up:
                self._router.index.forget(url, self._clock())
                known.sent = SentBlocks()
                known.should_begin_anew = True
            known.is_up = is_up

    def statuses(self) -> list[EngineStatus]:
        """Return what is known of each engine. O(blocks of the index)."""
        with self._lock:
            found = []
            for url, known in self._engines.items():
                view, load = self._router.index.view(url), self._router.loads.load(url, self._clock())
                found.append(
                    EngineStatus(
                        known.engine,
                        known.is_up,
                        str(view.state),
                        SENT if self._is_by_sent(known) else "events",
                        view.num_blocks,
                        len(load.requests) - load.num_decoding,
                        load.num_decoding,
                        load.num_prefill_tokens,
                        view.num_lost_batches,
                        known.num_restarts,
                        known.num_unplaced,
                        known.problem,
                    )
                )
            return found

    # Requests

    def choose(
        self,
        token_ids: TokenIds | None,
        *,
        keys: RequestKeys = NO_KEYS,
        num_tokens: int = 0,
        without: Iterable[str] = (),
    ) -> Placed:
        """Choose an engine, and count the request there until :meth:`ended`.

        Args:
            token_ids: the prompt, int32 ``[n]``; None: not known, and the load decides.
            keys: its adapter and salt.
            num_tokens: an estimate of the prompt's length, where ``token_ids`` is None.
            without: engines that must not be chosen.

        Raises:
            NoEngineError: no engine is left.
            TokenError: token ids are not int32.

        Cost: O(tokens + blocks x engines).
        """
        left_out = frozenset(without)
        with self._lock:
            router, now_s = self._router, self._clock()
            among = [
                url
                for url, known in self._engines.items()
                if known.is_up and not known.engine.is_draining and url not in left_out
            ]
            if not among:
                states = {url: "down" if not known.is_up else "draining" for url, known in self._engines.items()}
                states |= dict.fromkeys(left_out, "has not taken it")
                raise NoEngineError(f"no engine can take the request: {states or 'the list is empty'}")
            if token_ids is None:
                empty = np.zeros((0, 8), np.uint32)
                prompt = HashedPrompt(num_tokens, {size: empty for _, size, _ in router.index.cached_groups})
            else:
                prompt = router.index.hash(token_ids, keys)
            number = next(self._numbers)
            choice = router.choose_hashed(
                number, prompt, now_s, among=among if len(among) < len(self._engines) else None
            )
        chosen = choice.chosen
        predicted = chosen.num_hit_tokens - chosen.num_promised_tokens
        reason = UNKNOWN if token_ids is None else str(choice.reason)
        return Placed(number, choice.replica, reason, prompt.num_tokens, predicted, choice, prompt, self._form)

    def prefilled(self, placed: Placed) -> None:
        """Tell that a request's first token came: its prompt is computed, and cached there."""
        with self._lock:
            if placed.is_prefilled:
                return
            placed.is_prefilled = True
            self._router.prefilled(placed.number)
            known = self._engines.get(placed.url)
            if known is not None and placed.form == self._form and self._is_by_sent(known):
                events = known.sent.add(self._router.index.cached_groups, placed.prompt, self._sent_tokens)
                batch, now_s = known.sent.next_batch, self._clock()
                known.sent.next_batch += 1
                self._router.apply(placed.url, SENT, batch, events, now_s, is_proven=False)

    def ended(self, placed: Placed) -> None:
        """Tell that a request has ended, answered or not. May be called again."""
        with self._lock:
            self._router.ended(placed.number)

    def take_back(self, placed: Placed) -> None:
        """Take back a choice: the engine has not taken the request."""
        with self._lock:
            if placed.form == self._form and placed.url in self._engines:
                self._router.take_back(placed.number, placed.prompt, self._clock())
            else:
                self._router.ended(placed.number)

    # Events

    def _is_by_sent(self, known: _Followed) -> bool:
        view_state = self._router.index.state(known.engine.url)
        return view_state is IndexState.EMPTY or known.sent.next_batch > 0

    def _follow(self, known: _Followed) -> None:
        """Follow one engine's events until it is removed; in its own thread."""
        engine = known.engine
        assert engine.kv_events is not None
        while not (self._is_over.is_set() or known.is_removed):
            with EventFollower(engine.kv_events, engine.kv_events_replay, None) as follower:
                known.should_begin_anew = False
                self._follow_once(known, follower)

    def _follow_once(self, known: _Followed, follower: EventFollower) -> None:
        before = known.num_restarts
        while not (self._is_over.is_set() or known.is_removed or known.should_begin_anew):
            try:
                messages = follower.poll(POLL_S)
            except RecordingError as problem:
                self._note_problem(known, str(problem))
                self._is_over.wait(POLL_S)
                continue
            with self._lock:
                if known.is_removed or known.should_begin_anew:
                    return
                if messages and self._agree(known, follower):
                    for message in messages:
                        self._apply(known, message)
                unnamed = follower.unnamed
                if unnamed is not None:
                    known.num_restarts = before + unnamed.num_restarts
                    known.num_unplaced = unnamed.names.num_unplaced
                    if unnamed.unknown_kinds:
                        kinds = ", ".join(unnamed.unknown_kinds)
                        self._note_problem(
                            known,
                            f"events of unknown kinds: {kinds} (BlockStored, BlockRemoved, AllBlocksCleared are known)",
                        )
        if known.should_begin_anew:
            known.num_restarts += 1

    def _apply(self, known: _Followed, message: FollowedMessage) -> None:
        if isinstance(message, Applied):
            known.sent = SentBlocks()  # from here on the index is that of the engine's own events
        follow(self._router, known.engine.url, message, self._clock())

    def _agree(self, known: _Followed, follower: EventFollower) -> bool:
        """Return whether an engine's blocks are of the index's form; one that is alone with its own sets the form."""
        groups = follower.groups_seen
        if not groups:
            return True  # nothing was stored yet
        is_new, known.groups = not known.groups, groups
        if groups == self._groups:
            return True
        others = [each for each in self._engines.values() if each is not known and each.groups == self._groups]
        if others:
            told = f"its blocks are {groups}, and those of {others[0].engine.url} are {self._groups}"
            self._note_problem(known, f"{told}: it is served by what was sent to it")
            return False
        self._regroup(groups)
        known.should_begin_anew = not is_new  # what it stored before is followed once more
        return is_new

    def _regroup(self, groups: tuple[GroupSpec, ...]) -> None:
        LOG.warning("blocks are %s from here on", groups)
        self._groups = groups
        self._form += 1
        self._router.regroup(groups)
        for each in self._engines.values():
            each.sent = SentBlocks()
            each.should_begin_anew = each.groups not in {(), groups}

    def _note_problem(self, known: _Followed, problem: str) -> None:
        if known.problem != problem:
            known.problem = problem
            LOG.warning("events of %s: %s", known.engine.url, problem)
