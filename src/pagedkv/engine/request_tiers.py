"""The hooks of an engine's loop for its tiers: before and after steps, and when a request is admitted or ends.

:class:`NoTiers` is for an engine without tiers: its hooks do nothing. The hooks of :class:`RequestTiers` call
:mod:`pagedkv.engine.tiering` for requests of the engine.
"""

from collections.abc import Mapping
from typing import Final, final

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.events import TierEvents
from pagedkv.contract.keys import RequestKeys
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.tiering import EngineTiers, HandOff, LoadUnderWay, TierStatistics
from pagedkv.errors import ConfigurationError
from pagedkv.scheduling import Batch, Loader, Request

__all__ = ["NoTiers", "RequestTiers"]

NO_SHARED_TIER: Final = "a hand-off needs a tier that both engines have: a folder, Redis or an object store"


class NoTiers:
    """The hooks of an engine without tiers.

    Attributes:
        loader: begins loads for the scheduler; None: there are none.
    """

    loader: Loader | None = None

    # Steps

    def before_step(self, *, none_running: bool) -> None:
        """End loads whose reads are over; ``none_running``: copies delay no request."""

    def await_load(self) -> None:
        """Wait briefly for a load, before a step that computes nothing."""

    def after_step(self, batch: Batch, seconds: float, *, is_idle: bool) -> None:
        """Copy and offer waiting content after a step of so many seconds; ``is_idle``: no request waits or runs."""

    # Requests

    def admitted(self, request: EngineRequest, num_hit_tokens: int) -> None:
        """Note what a request's hit owes to tiers."""

    def chunks_computed(self, batch: Batch, requests: Mapping[Request, EngineRequest]) -> None:
        """Offer the chunks of prompts that a step computed, while their windows and states are still in blocks."""

    def prompt_computed(self, request: EngineRequest) -> None:
        """Offer a computed prompt."""

    def ended(self, request: EngineRequest) -> None:
        """Offer the answers of an ended request, and forget the request."""

    # All content

    def forget(self, token_ids: Int32Array, keys: RequestKeys, start: int) -> None:
        """Remove a prefix from position ``start`` on, and everything that continues it."""

    def reset(self) -> None:
        """Remove all content."""

    def renew(self) -> None:
        """Start with empty stores for new weights."""

    def flush(self, timeout_s: float) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """Wait until everything is stored; return whether it is in time."""
        return True

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002 - as above
        """Flush and close the stores; return whether everything was stored."""
        return True

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        return ()

    def loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads that are under way."""
        return ()

    # For other engines and routers

    def hand_over(self, token_ids: Int32Array, keys: RequestKeys, timeout_s: float) -> HandOff:  # noqa: ARG002
        """Refuse: there is no shared tier."""
        raise ConfigurationError(NO_SHARED_TIER)

    def take_over(self, hand_off: HandOff, token_ids: Int32Array, keys: RequestKeys) -> int:  # noqa: ARG002
        """Refuse: there is no shared tier."""
        raise ConfigurationError(NO_SHARED_TIER)

    def drain_events(self) -> tuple[TierEvents, ...]:
        """Take the events of entries since the last call, by medium."""
        return ()

    def entries(self) -> tuple[TierEvents, ...]:
        """Return all entries whose events were drained, by medium."""
        return ()

    def weights(self) -> dict[str, float]:
        """Return the measured saving by loading, by medium."""
        return {}


@final
class RequestTiers(NoTiers):
    """The hooks of an engine with tiers.

    Args:
        tiers: its tiers.
    """

    def __init__(self, tiers: EngineTiers) -> None:
        self._tiers = tiers
        self.loader = tiers

    def before_step(self, *, none_running: bool) -> None:
        """End loads whose reads are over."""
        self._tiers.end_loads(none_running=none_running)

    def await_load(self) -> None:
        """Wait briefly for a load, if there is one."""
        self._tiers.wait()

    def after_step(self, batch: Batch, seconds: float, *, is_idle: bool) -> None:
        """Note the speed of the step, and copy and offer waiting content."""
        num_prefilled = sum(len(chunk.token_ids) for chunk in batch.prefilling)
        self._tiers.note_step(num_prefilled, num_prefilled + len(batch.decoded_token_ids), seconds)
        self._tiers.offer_copies(is_idle=is_idle)

    def admitted(self, request: EngineRequest, num_hit_tokens: int) -> None:
        """Note what a request's hit owes to tiers."""
        self._tiers.left(request.scheduled)
        self._tiers.admitted(request.scheduled, num_hit_tokens)
        self._note(request)

    def chunks_computed(self, batch: Batch, requests: Mapping[Request, EngineRequest]) -> None:
        """Offer the chunks of prompts that a step computed, if ends are stored."""
        if self._tiers.stores_ends:
            for chunk in batch.prefilling:
                if not chunk.num_samples and not chunk.request.is_done and not chunk.request.num_generated:
                    prompt = requests[chunk.request].prompt_token_ids
                    self._tiers.offer(chunk.request, prompt[: chunk.stop + 1], chunk.stop)

    def prompt_computed(self, request: EngineRequest) -> None:
        """Count the hit of a request, and offer its prompt."""
        self._tiers.computed(request.scheduled)
        self._note(request)
        prompt = request.prompt_token_ids
        self._tiers.offer(request.scheduled, prompt, len(prompt))

    def ended(self, request: EngineRequest) -> None:
        """Offer a request's answers with their prompt, unless they are of beams."""
        for sample in request.samples if request.beams is None and request.first_token is not None else ():
            tokens = request.tokens_of(sample)
            self._tiers.offer(request.scheduled, tokens, len(tokens) - 1)
        self._tiers.left(request.scheduled)
        self._note(request)
        self._tiers.ended(request.scheduled)

    def forget(self, token_ids: Int32Array, keys: RequestKeys, start: int) -> None:
        """Remove a prefix from every tier."""
        self._tiers.forget(token_ids, keys, start)

    def reset(self) -> None:
        """Remove all content of every tier."""
        self._tiers.reset()

    def renew(self) -> None:
        """Open stores for new weights."""
        self._tiers.renew()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all computed blocks are stored in the tiers that admit them."""
        return self._tiers.flush(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush and close the stores."""
        return self._tiers.close(timeout_s)

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        return self._tiers.statistics()

    def _note(self, request: EngineRequest) -> None:
        request.tier_notes = self._tiers.notes(request.scheduled)
        request.num_loaded_tokens = self._tiers.num_loaded_tokens(request.scheduled)

    def loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads that are under way."""
        return self._tiers.loads()

    def hand_over(self, token_ids: Int32Array, keys: RequestKeys, timeout_s: float) -> HandOff:
        """Store what is computed, and list the entries of a prompt in shared tiers."""
        return self._tiers.hand_over(token_ids, keys, timeout_s)

    def take_over(self, hand_off: HandOff, token_ids: Int32Array, keys: RequestKeys) -> int:
        """List the entries of a hand-off; return how many leading tokens of the prompt can be loaded."""
        return self._tiers.take_over(hand_off, token_ids, keys)

    def drain_events(self) -> tuple[TierEvents, ...]:
        """Take the events of entries since the last call, by medium."""
        return self._tiers.drain_events()

    def entries(self) -> tuple[TierEvents, ...]:
        """Return all entries whose events were drained, by medium."""
        return self._tiers.entries()

    def weights(self) -> dict[str, float]:
        """Return the measured saving by loading, by medium."""
        return self._tiers.weights()
