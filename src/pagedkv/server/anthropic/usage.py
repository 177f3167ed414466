"""Usage in Anthropic's form: plain, read and created tokens, which add up to the prompt exactly.

Without breakpoints, the tokens that a request writes to the cache are reported as plain input. With breakpoints, the
tokens that it computed up to the last one, in whole blocks, are reported as created, by the requested lifetime.
"""

from collections.abc import Sequence
from typing import Any

from pagedkv.engine import Breakpoint
from pagedkv.server.anthropic.breakpoints import HOUR_S
from pagedkv.server.usage import Usage

__all__ = ["as_usage"]


def as_usage(usage: Usage, breakpoints: Sequence[Breakpoint]) -> dict[str, Any]:
    """Return the numbers of tokens of a request that has ended.

    Args:
        usage: tokens of the request.
        breakpoints: breakpoints of its prompt that became leases.
    """
    created = {False: 0, True: 0}
    begin, end = usage.num_read, usage.num_read + usage.num_written
    for each in sorted(breakpoints, key=lambda place: place.num_tokens):
        place = min(each.num_tokens, end)
        created[each.keep_for_s >= HOUR_S] += max(0, place - begin)
        begin = max(begin, place)
    num_created = sum(created.values())
    return {
        "input_tokens": usage.num_prompt - usage.num_read - num_created,
        "cache_read_input_tokens": usage.num_read,
        "cache_creation_input_tokens": num_created,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created[False],
            "ephemeral_1h_input_tokens": created[True],
        },
        "output_tokens": usage.num_generated,
    }
