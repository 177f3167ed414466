"""The scripts in examples/ run, and what they say of themselves is true."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from pagedkv import BlockSpace, FullAttention, SpaceConfig

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
NAMES: Final = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def example(name: str) -> ModuleType:
    """Import a script without running it."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_examples() -> None:
    """Or the test below would pass on nothing."""
    assert NAMES == ["beam_search", "paged_transformer", "router", "small_engine"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_and_says_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_small_engine_preempts_in_both_ways() -> None:
    module = example("small_engine")
    groups = (FullAttention(block_size=module.BLOCK),)
    engine = module.Engine(SpaceConfig(groups, 16, num_host_blocks=8, max_sequences=8, max_tokens=64, watermark=0.1))
    requests = [module.Request([*range(8), *range(10 * n, 10 * n + 6)], num_wanted=32) for n in range(5)]
    prompts = [list(request.tokens) for request in requests]
    engine.waiting.extend(requests)
    for _ in range(200):
        engine.step()
        engine.space.check()
    assert (len(engine.waiting), len(engine.running), len(engine.swapped)) == (0, 0, 0)
    assert engine.num_swaps > 0
    assert engine.num_recomputes > 0
    assert engine.num_hit_tokens > 0
    for prompt, request in zip(prompts, requests, strict=True):
        while len(prompt) < request.num_wanted:
            prompt.append(module.next_token(prompt))
        assert request.tokens == prompt


def test_a_device_that_forgets_to_copy_is_noticed_by_the_beam_search(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("beam_search")
    search = module.BeamSearch(list(range(30)))
    for _ in range(40):
        search.step()
    assert search.texts[0] == module.without_cache(list(range(30)), 40)
    search.space.check()

    monkeypatch.setattr(module.StepPlan, "copies", ())
    forgetful = module.BeamSearch(list(range(30)))
    for _ in range(40):
        forgetful.step()
    assert forgetful.texts[0] != search.texts[0]


def test_the_paged_transformer_reads_the_prefix_that_another_request_left() -> None:
    """What it hits is in blocks alone: without these keys it says something else."""
    module = example("paged_transformer")
    model, texts = module.Model(), []
    for forgets in (False, True):
        config = SpaceConfig((FullAttention(module.BLOCK),), num_blocks=40, max_sequences=4, max_tokens=64)
        engine = module.Engine(model, config)
        engine.admit(range(20))
        engine.step()
        if forgets:
            engine.executor.storage.keys(0, 0).zero_()
        late = engine.admit([*range(17), 40])
        for _ in range(12):
            engine.step()
            engine.space.check()
        assert engine.num_hit_tokens == 16
        texts.append(engine.leave(late))
    assert texts[0] == module.without_paging(model, [*range(17), 40], 12) != texts[1]


def test_routing_by_events_hits_more_than_routing_in_turn() -> None:
    module = example("router")
    assert module.hit_ratio(by_cache=True) > module.hit_ratio(by_cache=False) + 0.1


def serve(space: BlockSpace, prompt: list[int]) -> None:
    space.allocate(prompt)
    space.acknowledge(space.plan_step().step_id)


def test_the_router_knows_what_is_cached_after_a_gap_and_after_a_reset() -> None:
    module = example("router")
    space = BlockSpace(SpaceConfig((FullAttention(block_size=16),), 100, events=True, max_events=4))
    router = module.Router(1)
    prompts = [list(range(start, start + 50)) for start in (0, 100, 200)]
    serve(space, prompts[0])
    router.follow(0, space)
    assert [router.cached_tokens(0, prompt) for prompt in prompts] == [48, 0, 0]
    serve(space, prompts[1])
    serve(space, prompts[2])
    router.follow(0, space)  # six events, of which two are lost
    assert [router.cached_tokens(0, prompt) for prompt in prompts] == [48, 48, 48]
    space.reset_prefix_cache()
    router.follow(0, space)
    assert [router.cached_tokens(0, prompt) for prompt in prompts] == [0, 0, 0]
