"""A capacity curve for humans: the counts of the trace, and tables with a row for each capacity."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from pagedkv.cli.tables import print_numbers, print_table, share, shown_parts
from pagedkv.models.memory import GIB
from pagedkv.planner.capacity.curve import MOST_FOR_ALL, OPTIMAL, POLICIES, CapacityCurve
from pagedkv.planner.capacity.model_curve import ModelCurve
from pagedkv.planner.capacity.tier_hits import TierCurve

__all__ = ["print_curve", "print_model_curve"]


MANY_GIB: Final = 1000
HEADINGS: Final = MappingProxyType({OPTIMAL: "optimal, offline"})
"""Headings of columns. The optimum could not run as a policy, since it depends on future requests."""


def print_curve(title: str, curve: CapacityCurve, read_as: str) -> None:
    """Print the curve of a trace, and the trace's format."""
    print_table(title, [("read as", read_as), *_facts(curve), *_left_out(curve)])
    _print_by_capacity("Hit ratio by block", curve, {name: partial(curve.hit_ratio, name) for name in curve.hits})
    _print_parts(curve)
    _print_gains(curve)
    gaps = {name: partial(curve.policy_gap, name) for name in curve.hits if name != OPTIMAL}
    title = "Policy gaps, to the offline optimum; and the capacity gap, from there to the ideal"
    _print_by_capacity(title, curve, {**gaps, "capacity gap": curve.capacity_gap})
    for tiers in curve.tiers:
        _print_tiers(curve, tiers)


def _print_tiers(curve: CapacityCurve, below: TierCurve) -> None:
    """Print the hits with tiers below the device: by medium for the first policy, in all for the others."""
    first, *others = below.device_hits
    num_refs = curve.num_block_refs
    media = [tier.medium for tier in below.tiers]
    sizes = " and ".join(f"{tier.medium} of {_gib(tier.nbytes)} GiB" for tier in below.tiers)
    rule = "" if below.tiers[0].admission == "always" else f", {below.tiers[0].admission}"
    title = f"Hit ratio by block with {sizes}{rule}; loads take no time; GiB written"
    rows = [
        (
            f"{capacity:,}",
            _gib(capacity * below.block_nbytes),
            f"{below.device_hits[first][capacity] / num_refs:.2%}",
            *(f"{count / num_refs:.2%}" for count in below.tier_hits[first][capacity]),
            *(f"{below.num_hits(policy, capacity) / num_refs:.2%}" for policy in (first, *others)),
            *(_gib(count * below.block_nbytes) for count in below.num_written[capacity]),
        )
        for capacity in curve.capacities
    ]
    together = [f"all, {policy}" for policy in (first, *others)]
    headings = ("blocks", "GiB", f"device, {first}", *media, *together, *(f"{medium} written" for medium in media))
    print_numbers(title, headings, rows, num_keys=2)


def _facts(curve: CapacityCurve) -> Iterator[tuple[str, str]]:
    yield "tokens a block", f"{curve.block_size:,}"
    yield "requests", f"{curve.num_requests:,}"
    yield "block references", f"{curve.num_block_refs:,}"
    yield "distinct blocks", f"{curve.num_unique_blocks:,}"
    if curve.num_answer_blocks:
        yield "of them blocks of answers", f"{curve.num_answer_blocks:,}"
    yield "ideal hit ratio by block", share(curve.ideal_block_ratio, curve.ideal_hits, curve.num_block_refs)
    yield "ideal hit ratio by token", share(curve.ideal_token_ratio, curve.ideal_hit_tokens, curve.num_prompt_tokens)
    yield "content ceiling, never seen before", f"{curve.content_ceiling:.2%}"
    for fraction, capacity in curve.capacity_for.items() if curve.ideal_hits else ():
        gib = "" if curve.token_nbytes is None else f"{_size_gib(curve, capacity)} GiB, "
        yield f"LRU reaches {float(fraction):.0%} of the ideal at", f"{gib}{capacity:,} block{'s'[: capacity > 1]}"


def _left_out(curve: CapacityCurve) -> Iterator[tuple[str, str]]:
    """Return the policies that were not measured because they take long."""
    left_out = [name for name in POLICIES if name not in curve.hits]
    if left_out and curve.num_requests > MOST_FOR_ALL:
        yield "policies left out", f"{', '.join(left_out)}, since there are many requests: --eviction selects others"


def _print_parts(curve: CapacityCurve) -> None:
    """Print the hits of each tenant and window in the common cache, by the first policy."""
    policy = next(iter(curve.hits))
    for kind in dict.fromkeys(part.kind for part in curve.parts):
        parts = [part for part in curve.parts if part.kind == kind]
        shown, note = shown_parts(parts, [part.num_block_refs for part in parts])
        sizes = [
            f"{capacity:,}" if curve.token_nbytes is None else f"{_size_gib(curve, capacity)} GiB"
            for capacity in curve.capacities
        ]
        headings = (kind, "requests", "prompt tokens", "ideal", *sizes)
        rows = [
            (
                part.name,
                f"{part.num_requests:,}",
                f"{part.num_prompt_tokens:,}",
                f"{part.ideal_token_ratio:.2%}",
                *(f"{part.hit_ratio(policy, capacity):.2%}" for capacity in curve.capacities),
            )
            for part in shown
        ]
        of = "blocks" if curve.token_nbytes is None else "memory"
        title = f"By {kind}: hit ratio by block of {policy}, by {of} of the cache; ideal by token{note}"
        print_numbers(title, headings, rows)


def _print_model_parts(curve: ModelCurve) -> None:
    """Print the hits of each tenant and window in the common memory, by the first policy."""
    policy = next(iter(curve.hits))
    for kind in dict.fromkeys(part.kind for part in curve.parts):
        parts = [part for part in curve.parts if part.kind == kind]
        shown, note = shown_parts(parts, [part.num_prompt_tokens for part in parts])
        headings = (
            kind,
            "requests",
            "prompt tokens",
            "ideal",
            *(f"{point.memory_gib:g} GiB" for point in curve.points),
        )
        rows = [
            (
                part.name,
                f"{part.num_requests:,}",
                f"{part.num_prompt_tokens:,}",
                f"{part.ideal_hit_tokens / max(1, part.num_prompt_tokens):.2%}",
                *(f"{part.hit_ratio(policy, place):.2%}" for place in range(len(curve.points))),
            )
            for part in shown
        ]
        print_numbers(f"By {kind}: hit ratio by token, of {policy}{note}", headings, rows)


def _print_gains(curve: CapacityCurve) -> None:
    """Print each policy's gain of more memory, if twice or four times a capacity was measured as well."""
    gains = curve.gains()
    if not gains:
        return
    policies = list(next(iter(gains.values())))
    rows = [
        (*_size_cells(curve, capacity), f"{factor}x", *(f"+{100 * by_policy[policy]:.2f}" for policy in policies))
        for (capacity, factor), by_policy in gains.items()
    ]
    headings = (*_size_headings(curve), "memory", *(HEADINGS.get(policy, policy) for policy in policies))
    num_keys = len(_size_headings(curve)) + 1
    print_numbers("Gain from more memory, in points of the hit ratio by block", headings, rows, num_keys=num_keys)


def _print_by_capacity(title: str, curve: CapacityCurve, columns: Mapping[str, Callable[[int], float]]) -> None:
    """Print shares of all references, a row for each capacity: each column with its heading and its function."""
    rows = [
        (*_size_cells(curve, capacity), *(f"{share_at(capacity):.2%}" for share_at in columns.values()))
        for capacity in curve.capacities
    ]
    headings = (*_size_headings(curve), *(HEADINGS.get(name, name) for name in columns))
    print_numbers(title, headings, rows, num_keys=len(_size_headings(curve)))


def _size_headings(curve: CapacityCurve) -> tuple[str, ...]:
    return ("blocks",) if curve.token_nbytes is None else ("GiB", "blocks")


def _size_cells(curve: CapacityCurve, capacity: int) -> tuple[str, ...]:
    blocks = f"{capacity:,}"
    return (blocks,) if curve.token_nbytes is None else (_size_gib(curve, capacity), blocks)


def _size_gib(curve: CapacityCurve, capacity: int) -> str:
    return f"{curve.gib(capacity) or 0.0:,.4g}"


def _gib(nbytes: int) -> str:
    """Return bytes in GiB, with four digits or all before the point."""
    gib = nbytes / GIB
    return f"{gib:,.0f}" if gib >= MANY_GIB else f"{gib:.4g}"


def print_model_curve(title: str, curve: ModelCurve, read_as: str) -> None:
    """Print the hits of a trace's prompts in the memory of a model, and the trace's format."""
    ideal, num_tokens = curve.ideal_hit_tokens, curve.num_prompt_tokens
    facts = (
        ("read as", read_as),
        ("requests", f"{curve.num_requests:,}"),
        ("prompt tokens", f"{num_tokens:,}"),
        ("ideal hit ratio", share(ideal / num_tokens, ideal, num_tokens)),
    )
    print_table(title, facts)
    rows = [
        (
            f"{point.memory_gib:g}",
            *(f"{num_blocks:,}" for num_blocks in point.num_blocks.values()),
            *(f"{curve.hit_ratio(policy, place):.2%}" for policy in curve.hits),
            f"{max(hits[place].num_unserved for hits in curve.hits.values()):,}",
        )
        for place, point in enumerate(curve.points)
    ]
    print_numbers("Hit ratio by token", ("GiB", *curve.points[0].num_blocks, *curve.hits, "not served"), rows)
    _print_model_parts(curve)
