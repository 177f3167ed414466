"""Usage: where the tokens of a request's prompts came from, counted once for all answers to a prompt.

``num_prompt = num_read + num_written + num_plain``, exactly, by what each prompt hit at its first admission. Tokens
that are recomputed after a preemption do not count as cached.

A client may also ask where its prompt's hit ended and why: it gets the explanation without other tenants' content.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pagedkv.contract.answers import Explanation, MissCause
from pagedkv.engine import RequestOutput
from pagedkv.server.access import Caller
from pagedkv.server.engines import EngineFacts

__all__ = ["Usage", "as_explanation", "usage_of"]

REPORTED_AS_NEVER_STORED: Final = frozenset(
    {
        MissCause.OTHER_SALT,
        MissCause.CHANGED_TOKENS,
        MissCause.OTHER_ADAPTER,
        MissCause.OTHER_MEDIA,
        MissCause.NEVER_STORED,
        MissCause.UNKNOWN,
    }
)
"""Causes that may depend on other tenants' cached content, where no token of the prompt hits."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Args:
        num_prompt: tokens of its prompts.
        num_read: prompt tokens that were cached.
        num_written: prompt tokens that the request computed and later prompts can hit: those of whole blocks.
        num_generated: tokens of its answers, including those that ended them.
        num_drafted: draft tokens that were computed for its answers.
        num_accepted: draft tokens that were accepted.
        num_loaded: of ``num_read``, tokens that tiers brought, by medium; empty if none did.
    """

    num_prompt: int
    num_read: int
    num_written: int
    num_generated: int
    num_drafted: int = 0
    num_accepted: int = 0
    num_loaded: Mapping[str, int] = field(default_factory=dict)

    @property
    def read_by_medium(self) -> dict[str, int]:
        """The read tokens by medium, with the device; they add up to ``num_read``. Empty if no tier brought any."""
        return {"device": self.num_read - sum(self.num_loaded.values()), **self.num_loaded} if self.num_loaded else {}

    @property
    def num_plain(self) -> int:
        """Prompt tokens that were computed and that no later prompt can hit."""
        return self.num_prompt - self.num_read - self.num_written

    @property
    def num_total(self) -> int:
        """Tokens of prompts and answers."""
        return self.num_prompt + self.num_generated


def usage_of(outputs: Sequence[RequestOutput], facts: EngineFacts) -> Usage:
    """Count the tokens of a request that has ended.

    Args:
        outputs: outputs of its prompts.
        facts: of the engine.
    """
    num_prompt = num_read = num_written = num_generated = 0
    for output in outputs:
        length = len(output.prompt_token_ids)
        whole = _num_hittable(length, facts)
        num_prompt += length
        num_read += output.num_cached_tokens
        num_written += max(0, whole - output.num_cached_tokens)
        num_generated += sum(len(completion.token_ids) for completion in output.completions)
    num_loaded: Counter[str] = Counter()
    for output in outputs:
        num_loaded.update(output.num_loaded_tokens)
    num_drafted = sum(output.num_drafted_tokens for output in outputs)
    num_accepted = sum(output.num_accepted_tokens for output in outputs)
    return Usage(num_prompt, num_read, num_written, num_generated, num_drafted, num_accepted, dict(num_loaded))


def _num_hittable(length: int, facts: EngineFacts) -> int:
    """Return how many leading tokens of a computed prompt a longer one can hit.

    Recurrent states are kept at the ends of intervals, and before the last token of the prompt.
    """
    if not facts.is_caching:
        return 0
    at_end = (length - 1) // facts.alignment * facts.alignment
    return max(at_end, length // facts.block_size * facts.block_size)


def as_explanation(explanation: Explanation | None, caller: Caller) -> dict[str, Any] | None:
    """Return where a prompt's hit ended and why, without revealing other tenants' content.

    The answer never contains the cached token that differs from the prompt's. Where no token hits, all causes that
    compare the prompt with other content, and those of content without a record, are reported as "never stored" at
    position 0.
    """
    if explanation is None:
        return None
    cause = explanation.cause
    if not caller.has_no_tenant and explanation.num_hit_tokens == 0 and cause in REPORTED_AS_NEVER_STORED:
        return {
            "num_prompt_tokens": explanation.num_tokens,
            "num_hit_tokens": 0,
            "cause": MissCause.NEVER_STORED.value,
            "position": 0,
        }
    return {
        "num_prompt_tokens": explanation.num_tokens,
        "num_hit_tokens": explanation.num_hit_tokens,
        "cause": cause.value,
        "position": explanation.position,
    }
