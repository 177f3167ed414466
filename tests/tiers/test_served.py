"""Hits by medium of one request: each token of its hit counts once, whatever loads brought before its admission."""

import pytest

from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.spec import FullAttention
from pagedkv.simulation.tiers import Medium, VirtualStore
from pagedkv.tiers import StoreConfig
from pagedkv.tiers.entry_blocks import EntryLayout
from pagedkv.tiers.served import RequestLoads, ServedTier


def _hits(brought: list[tuple[str, int, int]], num_hit_tokens: int) -> dict[str, int]:
    stores = {medium: VirtualStore(StoreConfig(2**20, 10), Medium(1e9, 0.0), [1]) for medium, _, _ in brought}
    tiers = {medium: ServedTier(medium, medium, "always", 1.0, store) for medium, store in stores.items()}
    loads = RequestLoads(EntryLayout((FullAttention(16),), [1]).new_chain(NO_KEYS))
    loads.brought = [(tiers[medium], start, end) for medium, start, end in brought]
    loads.admitted(num_hit_tokens)
    loads.computed()
    assert loads.num_hit_tokens == {name: tier.num_hit_tokens for name, tier in tiers.items() if tier.num_hit_tokens}
    return loads.num_hit_tokens


@pytest.mark.plain_only
@pytest.mark.parametrize(
    ("brought", "num_hit_tokens", "expected"),
    [
        ([("host", 16, 32), ("disk", 32, 64)], 64, {"host": 16, "disk": 32}),
        ([("host", 16, 32), ("disk", 32, 64)], 40, {"host": 16, "disk": 8}),
        ([("host", 0, 64), ("host", 0, 64)], 64, {"host": 64}),
        ([("host", 0, 64), ("disk", 32, 64)], 64, {"host": 32, "disk": 32}),
        ([("host", 0, 64), ("disk", 0, 32)], 64, {"disk": 32}),
        ([("host", 32, 64)], 32, {}),
    ],
    ids=["two tiers", "a hit that ends inside", "evicted and loaded again", "a tail", "all but a tail", "no hit of it"],
)
def test_promise_29_a_token_that_was_loaded_twice_is_hit_once(
    brought: list[tuple[str, int, int]], num_hit_tokens: int, expected: dict[str, int]
) -> None:
    assert _hits(brought, num_hit_tokens) == expected
