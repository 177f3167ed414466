"""RequestRules: checks requests against the limits of one engine, and fills in what their parameters leave open.

It reads limits and changes nothing. The engine calls it before a request enters the scheduler, and for the message of a
request that exceeds its tenant's limits.
"""

from collections.abc import Sequence
from typing import final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.engine_request import EngineRequest, RequestSpec
from pagedkv.engine.intent import Intent
from pagedkv.engine.intent_rules import require_possible
from pagedkv.engine.sample import Decode
from pagedkv.engine.sampling import SamplingParams, seed_of
from pagedkv.errors import RequestError
from pagedkv.space import BlockSpace

__all__ = ["RequestRules"]


@final
class RequestRules:
    """The limits of one engine.

    Args:
        config: the engine's configuration.
        space: the block space, which has the longest sequence and the tenants.
        end_ids: tokens that end a sequence, unless its request ignores them.
        num_vocabulary: columns of the logits.
        decode: maps token ids to text, for stop texts; None: there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: BlockSpace,
        end_ids: frozenset[int],
        num_vocabulary: int,
        decode: Decode | None,
    ) -> None:
        self._config = config
        self._space = space
        self._end_ids = end_ids
        self._num_vocabulary = num_vocabulary
        self._decode = decode

    def complete(
        self, prompt_token_ids: Int32Array, params: SamplingParams, intent: Intent, number: int
    ) -> RequestSpec:
        """Fill in the values that the parameters leave open; the default seed comes from the request's ``number``.

        Raises RequestError if the prompt, the parameters or the intent cannot be served.
        """
        self._require_tokens(prompt_token_ids)
        require_possible(intent, self._space, len(prompt_token_ids))
        for token_ids in (intent.prediction, intent.answered):
            if token_ids:
                self._require_tokens(np.array(token_ids, np.int32))
        room = self._space.config.max_tokens - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if self._config.beyond_context == "clip":
            max_tokens = min(max_tokens, room)
        if max_tokens > room or max_tokens < max(1, params.min_tokens):
            is_least = params.max_tokens is None or self._config.beyond_context == "clip"
            wanted = max(1, params.min_tokens) if is_least else params.max_tokens
            raise RequestError(
                f"a prompt of {len(prompt_token_ids)} tokens and {wanted} new ones are more than the "
                f"{self._space.config.max_tokens} of the longest sequence: shorten one, set max_tokens of the engine "
                "if the model knows more, or let answers end there (EngineConfig(beyond_context='clip'))"
            )
        if intent.answered:
            _require_continuable(intent.answered, params, max_tokens)
        own_ends = frozenset() if params.ignore_eos else self._end_ids
        return RequestSpec(
            prompt_token_ids,
            params,
            max_tokens,
            own_ends | set(params.stop_token_ids),
            self._end_ids,
            seed_of(self._config.seed, number),
            self._num_vocabulary,
            self._decode,
            intent,
        )

    def too_large(self, spec: RequestSpec) -> RequestError:
        """Return the error for a request that does not fit the pools, even alone."""
        num_answers = max(spec.params.n, spec.params.num_beams)
        return RequestError(
            f"a prompt of {len(spec.prompt_token_ids)} tokens with {num_answers} answers of {spec.max_tokens} does "
            f"not fit {self._space.config.blocks_by_pool()} blocks and {self._config.max_sequences} sequences, even "
            "alone: ask for less (n, max_tokens), or give the engine more memory"
        )

    def beyond_limits(self, request: EngineRequest) -> str:
        """Return the message for a request that exceeds its tenant's limits."""
        tenant, params = request.intent.tenant, request.params
        return (
            f"a prompt of {len(request.prompt_token_ids)} tokens with {max(params.n, params.num_beams)} answers of "
            f"{request.spec.max_tokens} needs more than tenant {tenant!r} can have, {self._space.most_blocks(tenant)} "
            "blocks: ask for less (n, max_tokens), or raise its cap"
        )

    def _require_tokens(self, prompt_token_ids: Int32Array) -> None:
        if not len(prompt_token_ids):
            raise RequestError("a prompt needs at least one token, and this one is empty")
        low, high = int(prompt_token_ids.min()), int(prompt_token_ids.max())
        if low < 0 or high >= self._num_vocabulary:
            raise RequestError(
                f"token ids must be from 0 to {self._num_vocabulary - 1}, got {low if low < 0 else high}: is this the "
                "model's own tokenizer?"
            )


def _require_continuable(answered: Sequence[int], params: SamplingParams, max_tokens: int) -> None:
    """Check that tokens of an answer can be continued. Raises RequestError."""
    if max(params.n, params.num_beams) > 1:
        raise RequestError(
            f"tokens of an answer are given, and {max(params.n, params.num_beams)} answers or beams are requested: "
            "only a single answer can be continued"
        )
    if len(answered) >= max_tokens:
        raise RequestError(f"{len(answered)} tokens of an answer of at most {max_tokens} are given: none is left")
