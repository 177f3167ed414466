"""Checks of an intent against the engine: its tenant, its breakpoints, leases."""

from pagedkv.contract.arguments import require_instance
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.intent import PLAIN, Intent
from pagedkv.errors import ConfigurationError, RequestError
from pagedkv.space import BlockSpace

__all__ = ["require_possible"]


def require_possible(intent: Intent, space: BlockSpace, num_prompt_tokens: int) -> None:
    """Check an intent for a prompt of so many tokens. O(breakpoints + tenants).

    Raises:
        RequestError: it is not an Intent; there is no such tenant; a breakpoint lies after the prompt; ``retention`` is
            1 and the space has no leases; ``replaces`` is not a request.
    """
    if intent is PLAIN:
        return
    require_instance(intent, Intent, "intent", RequestError)
    if intent.replaces is not None:
        require_instance(intent.replaces, EngineRequest, "replaces", RequestError)
    try:
        space.most_blocks(intent.tenant)
    except ConfigurationError as problem:
        raise RequestError(f"the intent names a tenant that this engine does not have: {problem}") from problem
    behind = [place.num_tokens for place in intent.breakpoints if place.num_tokens > num_prompt_tokens]
    if behind:
        raise RequestError(f"a breakpoint after {behind[0]} tokens is behind the prompt, of {num_prompt_tokens} tokens")
    if intent.retention > 0 and not space.config.leases:
        raise RequestError("retention=1 needs EngineConfig(leases=True)")
