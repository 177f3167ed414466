"""The tiers of a replay, for humans: hits by medium, and the loads, sizes and writes of each tier."""

from collections.abc import Mapping
from typing import Any

from pagedkv.cli.tables import print_numbers
from pagedkv.models.memory import GIB
from pagedkv.simulation import ServingResult

__all__ = ["print_tiers"]


def print_tiers(result: ServingResult) -> None:
    """Print the tiers, if there are any."""
    if result.tiers is None:
        return
    if result.requests["num_with_content"]:
        rows = [
            (medium, f"{hits['num_tokens']:,}", f"{hits['share']:.2%}") for medium, hits in result.tiers["hits"].items()
        ]
        print_numbers("Prompt tokens that hit, by the medium that had them", ("medium", "tokens", "share"), rows)
    media = result.tiers["media"]
    print_numbers(
        "Loads from tiers, and loads left out since computing was predicted to be faster",
        ("tier", "loads", "tokens", "mean s", "computed instead", "tokens computed instead"),
        [(medium, *_loads(counts)) for medium, counts in media.items()],
    )
    print_numbers(
        "GiB of tiers: kept at the end, written, read; and evicted entries",
        ("tier", "kept", "written", "read", "evicted"),
        [(medium, *_bytes(counts)) for medium, counts in media.items()],
    )


def _loads(counts: Mapping[str, Any]) -> tuple[str, ...]:
    mean_s = counts["mean_load_s"]
    return (
        f"{counts['num_loads']:,}",
        f"{counts['num_loaded_tokens']:,}",
        "-" if mean_s is None else f"{mean_s:,.4f}",
        f"{counts['num_computed_instead']:,}",
        f"{counts['num_tokens_computed_instead']:,}",
    )


def _bytes(counts: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = (counts["nbytes"], counts["written_nbytes"], counts["read_nbytes"])
    return (*(f"{nbytes / GIB:,.2f}" for nbytes in sizes), f"{counts['num_evicted']:,}")
