"""Intent: a caller's hints about a request: its tenant, its priority, its leases, its predicted answer.

An intent changes no token of an answer, as :class:`SamplingParams` changes no block. It reaches the scheduler and the
block space with the request; forks inherit it, and a preempted request keeps it.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from pagedkv.contract.arguments import as_count, as_token_array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import RequestError, TokenError
from pagedkv.scheduling import CacheIntent

if TYPE_CHECKING:
    from pagedkv.engine.engine_request import EngineRequest

__all__ = ["PLAIN", "Intent"]

LARGEST_PRIORITY: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Intent(CacheIntent):
    """A caller's hints about a request; checked when built.

    Leases need ``EngineConfig(leases=True)``. Without it they are refused, and their counts in the output are 0.

    Args:
        tenant: one of the engine's tenants, which is charged for the request's blocks; None: the unnamed one.
        keep_for_s: seconds for which prompt and answer stay leased once the request has ended, whatever ended it. A
            lease is soft: it is broken if nothing else can be evicted. None: no lease.
        breakpoints: at most 4 :class:`Breakpoint`, places of the prompt whose leading tokens are leased once they are
            computed.
        retention: 1: what the request leaves is evicted after all other unleased content, which needs ``leases``; -1:
            before all other content. Excludes ``keep_for_s``.
        publish: what other requests may hit of it: "all", its "prompt", or "none".
        salt: requests of different salts share no content, and do not hit each other's.
        priority: requests of a higher one are scheduled first.
        replaces: a request that this one supersedes, such as the turn before it in a conversation. What only that one
            has is evicted first, from when both this one is admitted and that one has ended. It is not aborted.
        prediction: tokens that the answer may have, in order: guesses where ``EngineConfig.predicted_tokens`` allows
            them, in place of those by ``speculation``. Forks inherit none.
        answered: the first tokens of the answer, which another engine has generated, such as a replica that has failed.
            They are computed with the prompt, and the answer continues behind them; updates and log-probabilities
            begin there. Needs one answer without a beam search. With the same model, parameters and seed the answer is
            the one that the other engine would have given. Forks inherit none.

    Raises:
        RequestError: a value is out of range, or contradicts another.
    """

    salt: bytes = field(default=b"", repr=False)  # a secret of its tenant
    priority: int = 0
    replaces: "EngineRequest | None" = None
    prediction: tuple[int, ...] = field(default=(), repr=False)
    answered: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check the values."""
        CacheIntent.__post_init__(self)  # super() fails in a dataclass with slots, which is a new class
        if not isinstance(self.salt, bytes):
            raise RequestError(f"salt must be bytes, got {self.salt!r}")
        priority = as_count(
            self.priority, "priority", least=-LARGEST_PRIORITY, most=LARGEST_PRIORITY, error=RequestError
        )
        object.__setattr__(self, "priority", priority)
        for name in ("prediction", "answered"):
            try:
                tokens = as_token_array(getattr(self, name))
            except TokenError as problem:
                raise RequestError(f"{name} must be token ids: {problem}") from problem
            object.__setattr__(self, name, tuple(tokens.tolist()))

    @property
    def keys(self) -> RequestKeys:
        """The extra keys of its blocks."""
        return RequestKeys(salt=self.salt) if self.salt else NO_KEYS

    def for_fork(self, num_tokens: int) -> "Intent":
        """Return the intent of a fork whose prompt has so many tokens: it replaces no request and predicts nothing."""
        places = tuple(place for place in self.breakpoints if place.num_tokens <= num_tokens)
        if places == self.breakpoints and self.replaces is None and not self.prediction and not self.answered:
            return self
        return replace(self, breakpoints=places, replaces=None, prediction=(), answered=())


PLAIN: Final = Intent()
"""The intent of a request whose caller gives none."""
