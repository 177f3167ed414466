"""Content of requests in the cache: leases at breakpoints and at ends, supersession, retention.

The scheduler has no clock: a lease begins at the space's time, which the caller advances. Without
``SpaceConfig.leases`` there are no leases, and no function here costs time.
"""

from collections.abc import Iterable
from hashlib import blake2b
from math import inf, nextafter
from typing import Final

import numpy as np

from pagedkv.contract.answers import Receipt
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.scheduling.config import NO_INTENT
from pagedkv.scheduling.request import Request
from pagedkv.space import BlockSpace

MOST_RENEWED: Final = 1024  # each hit looks all of them up, in about 1 us each
NO_TOKEN: Final = np.zeros(1, np.int32)


class LeaseBook:
    """The latest leases at breakpoints, at most 1,024, which hits of their tokens renew.

    A request with breakpoints of its own leases its tokens anyway; the book is for hits of requests without them.
    """

    def __init__(self) -> None:
        self._leases: dict[tuple[RequestKeys, int, bytes], tuple[float, float]] = {}

    def note(self, keys: RequestKeys, token_ids: Int32Array, keep_for_s: float, until_s: float) -> None:
        """Record a lease of these tokens. O(tokens)."""
        key = keys, len(token_ids), _digest_of(token_ids)
        former_s, former_until_s = self._leases.pop(key, (0.0, 0.0))
        is_longer = until_s >= former_until_s
        self._leases[key] = (keep_for_s if is_longer else former_s), max(until_s, former_until_s)
        if len(self._leases) > MOST_RENEWED:
            del self._leases[next(iter(self._leases))]

    def renew(self, space: BlockSpace, request: Request, num_hit_tokens: int) -> None:
        """Renew the leases whose tokens a request has hit. O(leases + tokens of the hit), 0 without leases."""
        if not self._leases or not num_hit_tokens:
            return
        now_s = space.now_s
        self._leases = {key: lease for key, lease in self._leases.items() if lease[1] > now_s}
        lengths = sorted({key[1] for key in self._leases if key[0] == request.keys and key[1] <= num_hit_tokens})
        hasher, start = blake2b(digest_size=16), 0
        for length in lengths:
            hasher.update(request.known_token_ids[start:length].tobytes())
            start = length
            lease = self._leases.get((request.keys, length, hasher.copy().digest()))
            if lease is not None:
                until_s = _end_of(now_s, lease[0])
                _lease(space, request.known_token_ids[:length], request.keys, until_s)
                self.note(request.keys, request.known_token_ids[:length], lease[0], until_s)


def lease_breakpoints(space: BlockSpace, book: LeaseBook, request: Request, num_computed: int) -> None:
    """Lease the tokens before breakpoints that a request has reached, each once. O(breakpoints + their tokens)."""
    for place, breakpoint_ in enumerate(request.intent.breakpoints):
        num_tokens = min(breakpoint_.num_tokens, request.num_prompt_tokens)
        if request.leased_at[place] is None and num_tokens <= num_computed:
            until_s = _end_of(space.now_s, breakpoint_.keep_for_s)
            tokens = request.known_token_ids[:num_tokens]
            num_leased = request.leased_at[place] = _lease(space, tokens, request.keys, until_s)
            if num_leased:
                book.note(request.keys, tokens[:num_leased], breakpoint_.keep_for_s, until_s)


def release(space: BlockSpace, request: Request, rows: list[int]) -> tuple[Receipt, ...]:
    """Free the rows of ended sequences by the request's intent; if another request replaces it, by that instead.

    Their ends are kept for a next turn, unless they are replaced or to be evicted first.
    """
    intent, successor = request.intent, request.superseded_by
    num_generated = [request.num_generated] * len(rows)
    if successor is not None and successor.rows:
        return space.free(rows, num_generated=num_generated, superseded_by=successor.rows[0])
    if successor is not None or intent.retention < 0:
        return space.free(rows, num_generated=num_generated, priority=-1)
    if intent is NO_INTENT or not space.config.leases:
        return space.free(rows, num_generated=num_generated, keeps_end=True)
    if intent.keep_for_s is None:
        return space.free(rows, num_generated=num_generated, priority=intent.retention, keeps_end=True)
    until_s = _end_of(space.now_s, intent.keep_for_s)
    known = [request.known_token_ids] if request.sequences is None else request.sequences()
    receipts = space.free(rows, num_generated=num_generated, keep_until_s=until_s, keeps_end=True)
    for token_ids in known:
        num_leased = space.lease(_in_space(space, token_ids), until_s, keys=request.keys)
        request.num_leased_tokens = max(request.num_leased_tokens, num_leased)
    return receipts


def replaced_content(space: BlockSpace, request: Request) -> list[Int32Array]:
    """Return the tokens in the space of each sequence of the ended request that a request replaces; changes nothing."""
    former = request.replaces
    if former is None or not former.is_done or former.sequences is None:
        return []
    return [_in_space(space, token_ids) for token_ids in former.sequences()]


def supersede(space: BlockSpace, request: Request, replaced: Iterable[Int32Array]) -> None:
    """Make a request that has its blocks supersede the request that it replaces.

    Content of the replaced request that no other request uses is evicted first from now on, or from its end on.
    ``replaced``: that of :func:`replaced_content`.
    """
    former, request.replaces = request.replaces, None
    if former is None:
        return
    if not former.is_done:
        former.superseded_by = request
    for token_ids in replaced:
        space.supersede(token_ids, keys=former.keys)


def _in_space(space: BlockSpace, token_ids: Int32Array) -> Int32Array:
    """Return the tokens of a sequence that the space can have: the last generated token is never appended to it."""
    return token_ids[: space.config.max_tokens]


def _end_of(now_s: float, keep_for_s: float) -> float:
    """Return the end of a lease that begins now; always later than now, however short the lease is."""
    return max(now_s + keep_for_s, nextafter(now_s, inf))


def _lease(space: BlockSpace, token_ids: Int32Array, keys: RequestKeys, until_s: float) -> int:
    """Lease all of these tokens; return how many were leased.

    The space does not lease a prompt's last token, so one more token is appended.
    """
    prompt = np.concatenate([token_ids, NO_TOKEN]) if len(token_ids) < space.config.max_tokens else token_ids
    return space.lease(prompt, until_s, keys=keys)


def _digest_of(token_ids: Int32Array) -> bytes:
    return blake2b(token_ids.tobytes(), digest_size=16).digest()
