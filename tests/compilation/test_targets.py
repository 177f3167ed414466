"""Kinds of processors: what each asks for, and whose machine code a processor takes."""

import re

import pytest

from pagedkv.compilation.targets import (
    EXACTLY,
    TARGETS,
    V3,
    Processor,
    Target,
    own_processor,
    runnable,
    target_named,
)
from pagedkv.errors import ConfigurationError

pytestmark = pytest.mark.interpreted

LINUX = "x86_64-unknown-linux-gnu"
X86_64 = {target.name: target for target in TARGETS["x86_64"]}


def processor_with(features: tuple[str, ...]) -> Processor:
    """Make a processor of x86-64 that has these features, and lacks one that no target asks for."""
    return LINUX, "some", ",".join(("-sse4a", *(f"+{feature}" for feature in features)))


@pytest.mark.parametrize("target", X86_64.values(), ids=lambda target: target.name)
def test_a_target_runs_where_all_its_features_are_and_nowhere_else(target: Target) -> None:
    assert target.runs_on(processor_with((*target.features, "sha")))
    for missing in target.features:
        assert not target.runs_on(processor_with(tuple(each for each in target.features if each != missing))), missing


def test_a_target_without_features_runs_everywhere() -> None:
    [target] = TARGETS["aarch64"]
    assert target.runs_on(("aarch64-unknown-linux-gnu", "neoverse-n1", ""))


def test_levels_contain_one_another() -> None:
    v4, v3, v2 = (set(target.features) for target in TARGETS["x86_64"])
    assert v2 < v3 < v4


def test_own_code_goes_before_that_of_targets_and_those_that_ask_for_more_before_others() -> None:
    own = processor_with((*X86_64["x86-64-v4"].features, "sha"))
    assert [name for _, name, _ in runnable(own)] == ["some", "x86-64-v4", "x86-64-v3", "x86-64-v2"]
    assert [name for _, name, _ in runnable(processor_with(V3))] == ["some", "x86-64-v3", "x86-64-v2"]
    assert list(runnable(("riscv64-unknown-linux-gnu", "some", "+v"))) == [("riscv64-unknown-linux-gnu", "some", "+v")]


def test_a_target_is_its_own_processor_once() -> None:
    own = X86_64["x86-64-v3"].processor(LINUX)
    assert [name for _, name, _ in runnable(own)] == ["x86-64-v3", "x86-64-v2"]


def test_whoever_warms_up_takes_no_code_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXACTLY, "1")
    assert len(list(runnable(processor_with(V3)))) == 1


def test_an_unknown_target_is_refused_with_those_that_are_known() -> None:
    known = sorted(target.name for target in TARGETS[own_processor()[0].partition("-")[0]])
    with pytest.raises(ConfigurationError, match=re.escape(f"target must be one of {', '.join(known)}")):
        target_named("x86-64-v9")
    assert target_named(known[0]).name == known[0]
