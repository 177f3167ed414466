"""Every number of a table or tile is one that was measured, or follows from such by arithmetic done here again."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from pagedkv.report import ReportRun
from pagedkv.report.capacity import capacity_section
from tests.report.page_reader import Page, read_page
from tests.report.rendering import words_of
from tests.report.sample_runs import sample_run

pytestmark = pytest.mark.plain_only

NUMBER: Final = re.compile(r"(-?[\d,]+(?:\.(\d+))?)(%| GiB| ms| us| s|)")
SCALES: Final = {"%": 0.01, " GiB": 2.0**30, " ms": 1e-3, " us": 1e-6, " s": 1.0, "": 1.0}


def leaves(value: object) -> Iterator[float]:
    """All numbers inside a document."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, int | float):
        yield value


def derived(run: ReportRun) -> Iterator[float]:
    """What follows from the numbers of the documents, and is shown."""
    preemptions = run.replay["preemptions"]
    yield preemptions["num_recompute"] + preemptions["num_swap"]
    pools = list(run.replay["pools"].values())
    yield sum(pool["num_live"]["peak"] or 0 for pool in pools)
    yield sum((pool["num_live"]["peak"] or 0) * (pool["block_nbytes"] or 0) for pool in pools)
    for pool in pools:
        blocks = [pool["num_blocks"]]
        blocks += [level[what] for level in (pool["num_live"], pool["num_cached"], pool["num_free"]) for what in level]  # type: ignore[literal-required]
        yield from (number * (pool["block_nbytes"] or 0) for number in blocks)
    misses = run.replay["misses"]
    yield from (number / max(1, misses["num_tokens"]) for number in misses["by_cause"].values())
    if run.curve is not None:
        for by_capacity in run.curve["policies"].values():
            for capacity, num_hits in by_capacity.items():
                yield int(capacity)
                yield int(capacity) * run.curve["block_size"]
                yield num_hits / run.curve["num_block_refs"]


def strangers(page: Page, known: list[float]) -> list[str]:
    """Texts with a number that is none of the known ones, as far as its digits tell."""
    found = []
    for text in (*page.texts("td"), *page.texts("dd", class_="value")):
        match = NUMBER.fullmatch(text)
        if match is None:
            continue
        scale = SCALES[match.group(3)]
        half_digit = 0.501 * scale * 10 ** -len(match.group(2) or "")
        value = float(match.group(1).replace(",", "")) * scale
        if not any(abs(value - number) <= half_digit for number in known):
            found.append(text)
    return found


def known_of(run: ReportRun) -> list[float]:
    """All numbers that a page of the run may show."""
    return [*leaves(run.replay), *leaves(run.curve), *derived(run)]


@cache
def run_and_page() -> tuple[ReportRun, Page]:
    """A run with figures that are easy to tell apart, and its page."""
    run = sample_run(pools=("full", "window"), num_intervals=4, seed=3)
    run.replay["sharing"] = {"mean_saving": 0.123456, "num_decode_steps": 70_811}
    run.replay["latency"]["first_token_s"] = {"mean": 1.5, "p50": 0.0, "p90": 0.000013, "p99": 0.25, "max": 12345.6}
    pool = run.replay["pools"]["full"]
    pool["hits_by_age"]["num_blocks"] = list(range(15))
    pool["evictions_by_age"]["num_blocks"] = list(range(100, 115))
    return run, words_of(run)


def test_numbers_of_tables_and_tiles_were_measured() -> None:
    run, page = run_and_page()
    assert strangers(page, known_of(run)) == []
    assert len([text for text in page.texts("td") if NUMBER.fullmatch(text)]) > 150
    assert page.texts("dd", class_="value")[-1] == "12.35%"


def test_a_number_that_was_not_measured_is_found() -> None:
    run, page = run_and_page()
    changed = read_page(page.source.replace(">507,212<", ">507,213<"))
    assert strangers(changed, known_of(run)) == ["507,213"]


def test_latencies_are_written_in_a_unit_that_suits_them() -> None:
    _, page = run_and_page()
    assert page.row("first token") == ["1.50 s", "0 s", "13 us", "250.0 ms", "12,346 s"]


def test_settings_are_listed_those_inside_others_too() -> None:
    _, page = run_and_page()
    assert page.row("cost_model.name") == ["roofline"]
    assert page.row("cost_model.flops_s") == ["4e+14"]
    assert page.row("num_blocks") == ["262,144"]
    assert page.row("num_samples") == ["none"]


def test_ages_are_listed_by_range() -> None:
    _, page = run_and_page()
    assert page.row("0") == ["0", "100"]
    assert page.row("2-5") == ["3", "103"]
    assert page.row("> 10,000") == ["14", "114"]


def test_gaps_are_told_at_the_capacity_nearest_to_the_pool() -> None:
    # 262,143 blocks of 16 tokens are 8,192 of 512; of the measured capacities, 9,699 is nearest.
    here, others, _ = capacity_section(sample_run(num_intervals=1)).sentences
    assert here == (
        "With 9,699 blocks of 512 tokens (the measured size nearest to the 8,192 blocks of the replay's pool) lru hits "
        "20.57% of the block references; no cache hits more than 36.64%, since 63.36% are to content never seen before "
        "(the content ceiling)."
    )
    assert others.endswith(
        "An optimum that knows the requests to come would hit 16.07% more at this size (the policy gap), and a cache "
        "without bounds another 0.00% (the capacity gap)."
    )


def test_what_more_memory_brings_the_policy_of_the_run_comes_first() -> None:
    run = sample_run(num_intervals=1)
    assert run.curve is not None
    run.curve["gains"] = [
        {"capacity": 9699, "factor": factor, "by_policy": {"lru": 0.0667 * factor, "lookahead": 0.0, "optimal": 0.5}}
        for factor in (2, 4)
    ]
    sentence = capacity_section(run).sentences[0]
    assert sentence.startswith(
        "2x the memory brings +13.34 points, 4x the memory brings +26.68 points of the hit ratio"
    )
    run.curve["gains"][0]["by_policy"]["lru"] = 0.0
    assert capacity_section(run).sentences[0].startswith("2x the memory brings 0 points, 4x")


def test_several_pools_have_no_capacity_in_common() -> None:
    sentence = capacity_section(sample_run(pools=("full", "window"), num_intervals=1)).sentences[0]
    assert sentence.startswith("With 9,699 blocks of 512 tokens (the middle one of the measured sizes) lru hits 20.57%")
