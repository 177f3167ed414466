"""What is swept: the settings that follow from lists as typed."""

from typing import Any

import pytest

from pagedkv.cli.plan_axes import PlanAxes
from pagedkv.cli.serving import TierRates
from pagedkv.errors import ConfigurationError
from pagedkv.simulation import ServingConfig, SimulatedTier

MEAN, LONGEST = 2000.0, 8000
HOST = "host memory 64GiB"


def configs(axes: PlanAxes) -> list[ServingConfig]:
    return [each.point.config for each in axes.points(MEAN, LONGEST, has_content=True)]


def nbytes_of(config: ServingConfig) -> dict[str, int]:
    blocks = config.space_config(is_watched=False).blocks_by_pool()
    return {pool: count * config.block_nbytes[pool] for pool, count in blocks.items()}


def test_of_one_number_of_gpus_half_and_twice_as_many_are_tried_where_the_weights_fit() -> None:
    points = PlanAxes("llama-3.1-70b", gpus="4xh100", loads="1").points(MEAN, LONGEST, has_content=True)
    assert list(dict.fromkeys(each.choices["gpu"] for each in points)) == ["4xh100", "2xh100", "8xh100"]
    small = PlanAxes("llama-3.1-70b", gpus="2xh100", loads="1").points(MEAN, LONGEST, has_content=True)
    assert list(dict.fromkeys(each.choices["gpu"] for each in small)) == ["2xh100", "4xh100"]
    assert len({each.point.config.cost_model_name for each in points}) == 3


def test_of_one_memory_half_and_twice_as_much_are_tried_with_the_seconds_of_the_gpu() -> None:
    axes = PlanAxes("llama-3.1-8b", gpus="h100", memory="8", loads="1")
    points = axes.points(MEAN, LONGEST, has_content=True)
    assert list(dict.fromkeys(each.choices["memory"] for each in points)) == ["8 GiB", "4 GiB", "16 GiB"]
    assert {each.point.config.cost_model_name for each in points} == {"llama-3.1-8b/h100"}
    assert not axes.is_cost_model_assumed


def test_all_combinations_come_in_the_order_of_the_axes() -> None:
    axes = PlanAxes("llama-3.1-8b", memory="8,4", max_sequences="64,128", loads="1,3")
    points = axes.points(MEAN, LONGEST, has_content=True)
    assert len(points) == 2 * 2 * 2 * 2 * 2
    assert [each.load for each in points[:4]] == [1, 3, 1, 3]
    assert dict(points[0].choices) == {
        "memory": "8 GiB",
        "block size": "block 16",
        "policy": "lru",
        "sequences": "64 sequences",
    }
    assert points[1].point.config.load == 3


def test_a_split_moves_memory_between_pools_and_keeps_the_sum() -> None:
    by_need, less, most = configs(
        PlanAxes("gemma-3-27b", memory="40,50", block_sizes="16", evictions="lru", splits="need,0.5,100", loads="1")
    )[:3]
    assert nbytes_of(less)["full"] == pytest.approx(nbytes_of(by_need)["full"] / 2, rel=0.01)
    for config in (less, most):
        assert sum(nbytes_of(config).values()) == pytest.approx(sum(nbytes_of(by_need).values()), rel=0.01)
    assert nbytes_of(most)["full"] < 0.99 * sum(nbytes_of(by_need).values())


def test_without_content_policies_are_the_same() -> None:
    points = PlanAxes("llama-3.1-8b", memory="8,4").points(MEAN, LONGEST, has_content=False)
    assert {each.point.config.eviction for each in points} == {"lru"}


def test_bounds_are_held_against_the_fastest_hardware() -> None:
    assert PlanAxes("llama-3.1-8b", gpus="l4,h100", tpot_s=0.02).points(MEAN, LONGEST, has_content=True)
    with pytest.raises(ConfigurationError, match=r"`tpot_s=0\.001` cannot be met: by the cost model llama-3\.1-8b"):
        PlanAxes("llama-3.1-8b", gpus="l4,h100", tpot_s=0.001).points(MEAN, LONGEST, has_content=True)


def test_tiers_are_axes() -> None:
    axes = PlanAxes(
        "llama-3.1-8b",
        memory="8,4",
        block_sizes="16",
        evictions="lru",
        host_memory="0, 64GiB",
        disk="1TB",
        admissions="always,second-offer",
        rates=TierRates(disk_bandwidth="2GB"),
        loads="1",
    )
    points = axes.points(MEAN, LONGEST, has_content=True)
    assert len(points) == 2 * 2 * 2
    assert [each.choices.get("host memory") for each in points[:3]] == ["no host memory", "no host memory", HOST]
    assert points[0].choices["admission"] == "always"
    assert "disk" not in points[0].choices
    assert points[0].point.config.tiers == (SimulatedTier("disk", 10**12, 2e9, 1e-4),)
    assert [each.medium for each in points[3].point.config.tiers] == ["host", "disk"]
    assert {each.admission for each in points[3].point.config.tiers} == {"second-offer"}
    assert points[0].point.as_dict() != points[1].point.as_dict()  # they are stored apart


@pytest.mark.parametrize(
    ("option", "text"), [("host_memory", "64,64"), ("disk", "much"), ("admissions", "always,never")]
)
def test_a_list_of_tiers_out_of_range_is_refused(option: str, text: str) -> None:
    given: dict[str, Any] = {"disk": "1TB", option: text}
    with pytest.raises(ConfigurationError):
        PlanAxes("llama-3.1-8b", memory="8", loads="1", **given).points(MEAN, LONGEST, has_content=True)
