"""The tiers at the moments of an engine's loop: what its requests and steps give them and take from them.

``NoTiers`` is an engine without tiers: nothing happens at any moment. :class:`RequestTiers` does what
:mod:`pagedkv.serving.engine.tiering` says, for requests of the engine.
"""

from collections.abc import Mapping
from typing import final

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.keys import RequestKeys
from pagedkv.memory.scheduling import Batch, Loader, Request
from pagedkv.serving.engine.engine_request import EngineRequest
from pagedkv.serving.engine.tiering import EngineTiers, LoadUnderWay, TierStatistics

__all__ = ["NoTiers", "RequestTiers"]


class NoTiers:
    """The moments of an engine without tiers.

    Attributes:
        loader: begins loads for the scheduler; None: there are none.
    """

    loader: Loader | None = None

    # Steps

    def before_step(self, *, is_alone: bool) -> None:
        """End loads that have their answers; ``is_alone``: no request runs that copies would delay."""

    def await_load(self) -> None:
        """Wait a little for a load, where a step computes nothing."""

    def after_step(self, batch: Batch, seconds: float, *, is_idle: bool) -> None:
        """Copy and offer what waits, behind a step that took so long; ``is_idle``: no request is served."""

    # Requests

    def admitted(self, request: EngineRequest, num_hit_tokens: int) -> None:
        """Note what a request's hit owes to tiers."""

    def chunks_computed(self, batch: Batch, requests: Mapping[Request, EngineRequest]) -> None:
        """Offer what chunks of prompts have computed, where the windows and states there are gone a step later."""

    def prompt_computed(self, request: EngineRequest) -> None:
        """Offer a prompt."""

    def ended(self, request: EngineRequest) -> None:
        """Offer what a request that has ended has computed, and forget it."""

    # All of it

    def forget(self, token_ids: Int32Array, keys: RequestKeys, start: int) -> None:
        """Remove a prefix from position ``start`` on, and what continues it."""

    def reset(self) -> None:
        """Remove all content."""

    def renew(self) -> None:
        """Begin anew for new weights."""

    def flush(self, timeout_s: float) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """Wait until all is stored; return whether that came about."""
        return True

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002 - as above
        """Flush, and end the stores; return whether all was stored."""
        return True

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        return ()

    def loads(self) -> tuple[LoadUnderWay, ...]:
        """What tiers are asked for now."""
        return ()


@final
class RequestTiers(NoTiers):
    """The moments of an engine with tiers.

    Args:
        tiers: its tiers.
    """

    def __init__(self, tiers: EngineTiers) -> None:
        self._tiers = tiers
        self.loader = tiers

    def before_step(self, *, is_alone: bool) -> None:
        """End loads that have their answers."""
        self._tiers.end_loads(is_alone=is_alone)

    def await_load(self) -> None:
        """Wait a little for a load, if there is one."""
        self._tiers.wait()

    def after_step(self, batch: Batch, seconds: float, *, is_idle: bool) -> None:
        """Note how fast the step was, and copy and offer what waits."""
        num_prefilled = sum(len(chunk.token_ids) for chunk in batch.prefilling)
        self._tiers.note_step(num_prefilled, num_prefilled + len(batch.decoded_token_ids), seconds)
        self._tiers.offer_copies(is_idle=is_idle)

    def admitted(self, request: EngineRequest, num_hit_tokens: int) -> None:
        """Note what a request's hit owes to tiers."""
        self._tiers.left(request.scheduled)
        self._tiers.admitted(request.scheduled, num_hit_tokens)
        self._note(request)

    def chunks_computed(self, batch: Batch, requests: Mapping[Request, EngineRequest]) -> None:
        """Offer what chunks of prompts have computed, if ends are stored."""
        if self._tiers.stores_ends:
            for chunk in batch.prefilling:
                if not chunk.num_samples and not chunk.request.is_done and not chunk.request.num_generated:
                    prompt = requests[chunk.request].prompt_token_ids
                    self._tiers.offer(chunk.request, prompt[: chunk.stop + 1], chunk.stop)

    def prompt_computed(self, request: EngineRequest) -> None:
        """Count its hit, and offer a prompt."""
        self._tiers.computed(request.scheduled)
        self._note(request)
        prompt = request.prompt_token_ids
        self._tiers.offer(request.scheduled, prompt, len(prompt))

    def ended(self, request: EngineRequest) -> None:
        """Offer a request's answers behind their prompt; those of beams are not offered."""
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
        """Begin stores for new weights."""
        self._tiers.renew()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was computed is stored in all tiers that want it."""
        return self._tiers.flush(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush and end the stores."""
        return self._tiers.close(timeout_s)

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        return self._tiers.statistics()

    def _note(self, request: EngineRequest) -> None:
        request.tier_notes = self._tiers.notes(request.scheduled)
        request.num_loaded_tokens = self._tiers.num_loaded_tokens(request.scheduled)

    def loads(self) -> tuple[LoadUnderWay, ...]:
        """What tiers are asked for now."""
        return self._tiers.loads()
