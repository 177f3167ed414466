"""Tiers of ``pagedkv replay``: what the options make of them, what is shown, and what bad input gets."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.cli.commands.curve import CurveTierOptions
from pagedkv.cli.options import parse_gib
from pagedkv.cli.serving import ServingOptions, TierOptions
from pagedkv.models.memory import GIB
from pagedkv.simulation import SimulatedTier
from tests.cli.command import run
from tests.cli.test_golden import TIERS, TURNS

REPLAY: Final = ("replay", TURNS, *TIERS)


def document_of(*more: object) -> dict[str, Any]:
    result = run(*REPLAY, *more, "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_the_defaults_are_those_of_a_bus_for_each_gpu_and_of_a_disk() -> None:
    options = ServingOptions(model="llama-3.1-8b", gpu="4xh100", tier=TierOptions(host_memory="64GiB", disk="1TB"))
    config, _ = options.configuration()
    assert config.tiers == (SimulatedTier("host", 64 * 2**30, 200e9), SimulatedTier("disk", 10**12, 3e9, 1e-4))
    assert config.entry_block_nbytes == [16 * 131_072]  # 32 layers, 8 KV heads of 128, keys and values in 16 bits


def test_without_a_model_a_token_has_256_kib() -> None:
    config, _ = ServingOptions(tier=TierOptions(disk="1TB")).configuration()
    assert config.entry_block_nbytes == [16 * 2**18]


@pytest.mark.parametrize("size", ["1", "1GiB", "1024MiB"])
def test_a_number_alone_is_gib_for_a_tier_as_for_the_device(size: str) -> None:
    (tier,) = TierOptions(host_memory=size).tiers()
    (curve_tier,) = CurveTierOptions(host_memory=size).settings()[0]
    assert tier.nbytes == curve_tier.nbytes == parse_gib(size) * GIB == 2**30


def test_the_tables_show_hits_by_medium_loads_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    hits = document_of()["tiers"]["hits"]
    shown = run(*REPLAY).stdout
    for medium in ("device", "host", "disk"):
        assert f"{hits[medium]['num_tokens']:,}" in shown
    assert "computed instead" in shown
    assert "written" in shown


def test_second_offer_writes_less() -> None:
    always, second = document_of(), document_of("--admission", "second-offer")
    for medium in ("host", "disk"):
        written = [each["tiers"]["media"][medium]["written_nbytes"] for each in (always, second)]
        assert 0 < written[1] < written[0]


def test_what_is_stored_before_its_eviction_is_less_than_all() -> None:
    always, victims = document_of(), document_of("--admission", "before-eviction")
    written = [each["tiers"]["media"]["disk"]["written_nbytes"] for each in (always, victims)]
    assert 0 < written[1] < written[0]


def test_tiers_of_no_size_change_nothing() -> None:
    pool = ("replay", TURNS, "--block-size", "512", "--num-blocks", "8", "--json", "-")
    without, none = json.loads(run(*pool).stdout), json.loads(run(*pool, "--host-memory", "0", "--disk", "0").stdout)
    assert without == none


def test_the_report_has_the_tiers(tmp_path: Path) -> None:
    page, document = tmp_path / "page.html", document_of()
    assert run("report", TURNS, *TIERS, "-o", page).exit_code == 0
    shown = page.read_text()
    assert "by the medium that had them" in shown
    assert f"{document['tiers']['hits']['disk']['num_tokens']:,}" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--host-memory", "much"),
            "--host-memory must be a size such as 16GiB or 500MB, or 16, which is GiB; got 'much'",
        ),
        (("--disk", "1TB", "--disk-bandwidth", "3"), "--disk-bandwidth 3 has no unit: write 3MB, 3GB"),
        (("--disk-bandwidth", "3GB"), "--disk-bandwidth and --disk-latency are those of a tier: give --disk"),
        (("--host-latency", "0.1"), "--host-bandwidth and --host-latency are those of a tier: give --host-memory"),
        (("--admission", "always"), "--admission and --load-rule are for tiers: give --host-memory or --disk"),
        (("--disk", "1TB", "--admission", "never"), "admission must be one of"),
        (("--disk", "1TB", "--load-rule", "never"), "loads must be one of"),
        (("--disk", "1TB", "--disk-latency", "-1"), "the latency_s of a disk tier must not be negative, got -1"),
        (("--engine", "--disk", "1TB"), "--engine serves without tiers here"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("replay", TURNS, *arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())
