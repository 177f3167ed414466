"""The list of eviction policies: whoever offers or checks policies has these names, and no other."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import pytest

from pagedkv import BlockPool, BlockSpace, FullAttention, RecurrentState, SpaceConfig, TenantLimits
from pagedkv.blocks import eviction
from pagedkv.blocks.eviction import registry
from pagedkv.blocks.eviction.fifo import FIFO
from pagedkv.blocks.eviction.policy import EvictionPolicy
from pagedkv.blocks.eviction.registry import DEFAULT, POLICIES, policy_named
from pagedkv.blocks.record import PLAIN, PoolArrays, PoolFeatures
from pagedkv.contract import space_config as space_config_module
from pagedkv.errors import ConfigurationError
from pagedkv.planner.capacity import curve
from pagedkv.simulation import ServingConfig
from pagedkv.space.state import SpaceState
from tests.cli.command import run
from tests.compiling import TESTED_POLICIES
from tests.space.spaces import prefill

NOT_POLICIES = {"__init__", "policy", "registry", "rings"}
FOLDER = Path(eviction.__path__[0])
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "docs" / "for-cache-researchers.md"
NUMBA_IS_OFF: Final = os.environ.get("NUMBA_DISABLE_JIT") == "1"
FEATURES = PoolFeatures(9, True, True, True, ((1, 2),), ((9, 0), (9, 0)), 5, True, 2, True)  # noqa: FBT003 - one of each
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def space_config(name: str) -> SpaceConfig:
    return SpaceConfig((FullAttention(block_size=4),), num_blocks=9, eviction=name)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", TESTED_POLICIES)
def test_every_policy_serves_by_its_name(name: str) -> None:
    space = BlockSpace(space_config(name))
    for start in (0, 100, 0, 200, 300, 0):
        space.free(prefill(space, list(range(start, start + 17))))
        space.check()
    assert policy_named(name).name == ServingConfig(100, eviction=name).eviction == name


@pytest.mark.parametrize(
    "build", [lambda: BlockSpace(space_config("oldest")), lambda: ServingConfig(100, eviction="oldest")]
)
def test_a_name_that_is_not_in_the_list_is_refused_with_the_list(build: Callable[[], object]) -> None:
    told = f"eviction policy must be one of {tuple(POLICIES)}, got 'oldest'"
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        build()


def test_a_policy_that_is_not_in_the_list_is_refused() -> None:
    for foreign in (EvictionPolicy("oldest", PoolArrays), replace(DEFAULT, new_state=FIFO.new_state)):
        with pytest.raises(ConfigurationError, match=f"eviction policy '{foreign.name}' is not in the list"):
            BlockPool("device", 9, policy=foreign)


def test_loops_know_the_policy_of_a_pool_by_the_class_of_its_arrays() -> None:
    pools = [BlockPool("device", 9, policy=policy, features=FEATURES) for policy in POLICIES.values()]
    assert [type(pool.arrays) for pool in pools] == [policy.arrays for policy in POLICIES.values()]
    assert len({policy.arrays for policy in POLICIES.values()}) == len(POLICIES)
    assert [pool.policy for pool in pools] == list(POLICIES.values())


def test_a_pool_without_features_that_evicts_by_lru_runs_code_without_any() -> None:
    assert type(BlockPool("device", 9).arrays) is PoolArrays
    assert type(BlockPool("device", 9, policy=FIFO).arrays) is FIFO.arrays
    for name, value in FEATURES._asdict().items():
        pool = BlockPool("device", 9, features=PLAIN._replace(**{name: value}))
        assert type(pool.arrays) is (PoolArrays if name == "num_in_sets" else DEFAULT.arrays), name


KEPT: dict[str, dict[str, object]] = {
    "ghosts": {"explain": True},
    "epochs": {"weights_epoch": 0},
    "leases": {"leases": True},
    "links of siblings": {"min_partial_hit": 1},
    "events": {"events": True},
    "tenants": {"tenants": {"a": TenantLimits(cap=4)}},
    "bounds": {"groups": (FullAttention(block_size=4), RecurrentState(4, pool="device", max_checkpoints=2))},
    "another policy": {"eviction": "fifo"},
}


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_what_a_configuration_keeps_is_what_all_pools_of_its_space_run(options: dict[str, object]) -> None:
    plain = replace(space_config("lru"), num_host_blocks=5)
    kinds = {}
    for config in (plain, replace(plain, **cast("Any", options))):
        state = SpaceState(config)
        kinds[config.has_features] = {type(pool.arrays) for pool in state.all_pools}
        assert len(state.all_pools) == 2
    assert kinds == {False: {PoolArrays}, True: {POLICIES[str(options.get("eviction", "lru"))].arrays}}


def test_every_file_of_the_package_is_in_the_list() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} | {path.parent.name for path in FOLDER.glob("*/policy.py")}
    assert {*(files - NOT_POLICIES), DEFAULT.name} == set(POLICIES)


def test_the_first_is_the_default_everywhere() -> None:
    assert next(iter(POLICIES)) == DEFAULT.name
    assert SpaceConfig((FullAttention(),), num_blocks=9).eviction == ServingConfig(100).eviction == DEFAULT.name


def test_the_curve_and_the_help_have_all_of_them() -> None:
    assert list(curve.POLICIES) == [*POLICIES, curve.OPTIMAL]
    words = " ".join(run("replay", "--help").stdout.replace("│", " ").split())
    assert f"Eviction policy: {', '.join(POLICIES)}." in words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_no_policy_that_is_not_there(page: Path) -> None:
    named = re.findall(r'(?:eviction="|--eviction )(\w+)', page.read_text(encoding="utf-8"))
    assert set(named) <= set(POLICIES)
    assert named or page != RECIPE


def recipe() -> tuple[str, str]:
    """What the page shows of a policy of one's own: its file, and the list with its name."""
    section = RECIPE.read_text(encoding="utf-8").partition("## A policy of your own")[2].partition("\n## ")[0]
    file, listed = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return file, listed


def test_the_list_that_the_recipe_shows_is_that_of_the_sources_and_one_name() -> None:
    _, listed = recipe()
    assert listed.replace("    REUSED,\n", "") in (FOLDER / "registry.py").read_text(encoding="utf-8")


@pytest.mark.interpreted
@pytest.mark.skipif(not NUMBA_IS_OFF, reason="loops would be compiled for a policy that is not in the list")
def test_the_policy_of_the_recipe_keeps_what_was_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "reused"}
    exec(recipe()[0], names)  # noqa: S102 - our own page
    policies = {**POLICIES, "reused": names["REUSED"]}
    monkeypatch.setattr(registry, "POLICIES", policies)
    monkeypatch.setattr(space_config_module, "EVICTION_POLICIES", tuple(policies))
    space = BlockSpace(space_config("reused"))
    for start in (0, 0, 100, 200):
        space.free(prefill(space, list(range(start, start + 13))))
        space.check()
    num_hits = [space.match(list(range(start, start + 13))).num_tokens for start in (0, 100, 200)]
    assert num_hits == [12, 4, 12]  # LRU: 4, 12, 12
