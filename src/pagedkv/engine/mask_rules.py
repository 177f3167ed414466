"""Which rule a mask function follows: full, window or chunk. Found out by asking it about positions.

Masks of transformers are functions of (batch, head, query, key); windows and chunks are closures in them. Such a
function is asked which keys some queries see. What fits no rule at every query asked is a real mask.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, assert_never

import torch

from pagedkv.engine.layer_specs import Rule

__all__ = ["NUM_POSITIONS", "rule_of_mask"]

NUM_POSITIONS: Final = 2**17
"""Positions at which mask functions are evaluated; longer windows count as full attention."""
FURTHER_QUERIES: Final = 12


def rule_of_mask(mask: Callable[..., Any], num_positions: int = NUM_POSITIONS) -> Rule | None:
    """Return the rule of a mask function; None if it follows none. O(positions) for each query.

    A function that looks up positions among the tokens of its pass is a real mask: it fails beyond them.
    """
    try:
        return _rule(mask, num_positions)
    except IndexError:
        return None


def _rule(mask: Callable[..., Any], num_positions: int) -> Rule | None:
    last = num_positions - 1
    first = _first_seen(mask, last)
    if first is None:
        return None
    if first == 0:
        return _if_everywhere(mask, Rule("full"), num_positions)
    window = _if_everywhere(mask, Rule("window", last - first + 1), num_positions)
    if window is not None:
        return window
    # Of a chunk's start all divisors may be its length: the true one ends where the keys seen begin anew.
    next_start = _first_seen(mask, first - 1)
    return None if next_start is None else _if_everywhere(mask, Rule("chunk", first - next_start), num_positions)


def _if_everywhere(mask: Callable[..., Any], rule: Rule, num_positions: int) -> Rule | None:
    for query in _queries(rule.extent, num_positions):
        if _first_seen(mask, query) != _first_of_rule(rule, query):
            return None
    return rule


def _first_of_rule(rule: Rule, query: int) -> int:
    match rule.kind:
        case "full":
            return 0
        case "window":
            return max(0, query - rule.extent + 1)
        case "chunk":
            return query // rule.extent * rule.extent
        case _:
            assert_never(rule.kind)


def _queries(extent: int, num_positions: int) -> Iterator[int]:
    yield from (0, 1, num_positions // 3, num_positions // 2)
    for near in range(extent - 2, extent + FURTHER_QUERIES - 2):
        if 0 <= near < num_positions:
            yield near


def _first_seen(mask: Callable[..., Any], query: int) -> int | None:
    """Return the first key that a query sees, if it sees exactly the keys from there to its own position."""
    zero = torch.tensor(0)
    keys = torch.arange(query + 3)
    seen = torch.as_tensor(mask(zero, zero, torch.tensor(query), keys)).expand(len(keys))
    first = int(seen.int().argmax())
    expected = (keys >= first) & (keys <= query)
    return first if bool(seen.any()) and torch.equal(seen, expected) else None
