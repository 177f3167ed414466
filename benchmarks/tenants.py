"""What caps and floors cost: prompts through a full pool, without tenant, for one at its cap, and beside a floor."""

from collections.abc import Iterator
from typing import Final

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, FULL, NUM_BLOCKS, allocated, prompt, run_step
from pagedkv import BlockSpace, SpaceConfig, TenantLimits

__all__ = ["OPERATIONS"]

NUM_TOKENS: Final = 1_008  # 63 blocks
NUM_PROMPTS: Final = 64
LIMITS: Final = {
    "capped": TenantLimits(cap=NUM_BLOCKS // 10),
    "promised": TenantLimits(floor=NUM_BLOCKS // 10),
}


def prompts_of_tenants() -> Iterator[Row]:
    """Allocate, compute and free new prompts in a full pool, without tenants and with two."""
    for tenants, tenant, name in (
        (None, None, "no tenants"),
        (LIMITS, "capped", "a tenant at its cap"),
        (LIMITS, None, "whoever names none, beside a floor"),
    ):
        timing = _prompts(tenants, tenant)
        yield Row(f"allocate, compute and free {NUM_TOKENS:,} tokens in a full pool; {name}", timing, "prompt")


def _prompts(tenants: dict[str, TenantLimits] | None, tenant: str | None) -> Timing:
    space = BlockSpace(SpaceConfig(FULL, num_blocks=NUM_BLOCKS, max_sequences=8, tenants=tenants))
    num_to_fill = NUM_BLOCKS * BLOCK_SIZE // NUM_TOKENS + 2
    seeds = iter(range(10**9))

    def serve(count: int, payer: str | None) -> None:
        for _ in range(count):
            row = allocated(space.allocate(prompt(NUM_TOKENS, next(seeds)), tenant=payer)).row
            run_step(space)
            space.free([row])

    if tenants is not None:
        serve(num_to_fill // 10, "promised")
    serve(num_to_fill, None)
    serve(num_to_fill // 10, tenant)
    before = space.statistics().pools[0].num_evictions
    timing = timed(lambda: serve(NUM_PROMPTS, tenant), num_runs=8)
    assert space.statistics().pools[0].num_evictions > before, "the pool is not full"
    space.check()
    return timing.divided_by(NUM_PROMPTS)


OPERATIONS = (prompts_of_tenants,)
