"""What is compiled ahead is all that spaces reach, and nothing is compiled after."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pagedkv.compilation.requests import Request
from pagedkv.compilation.targets import TARGETS, own_processor
from pagedkv.errors import ConfigurationError
from pagedkv.warming import (
    ATTENTION,
    ROUTING,
    make_ready,
    of_curves,
    of_model_curves,
    of_spaces,
    of_stores,
    warm_up,
)
from pagedkv.warming.recording import recorded
from pagedkv.warming.rehearsal import rehearse
from pagedkv.warming.rehearsals import NO_FEATURES, Rehearsal, all_of
from pagedkv.warming.warm_up import compile_all
from tests.compiling import TESTED_POLICIES, needs_compiled_loops

OF_FEATURES = {
    "epochs",
    "explaining",
    "ghosts",
    "leasing",
    "partial_hits",
    "releasing",
    "sweeps",
    "tenant_charges",
    "victims",
}
"""Modules with loops that spaces without features do not reach; of ``releasing`` those of leases."""


@cache
def recorded_once(rehearsal: Rehearsal) -> list[Request]:
    """Record a rehearsal, for all tests that look at what it reached."""
    return recorded([rehearsal])


@pytest.mark.interpreted
@pytest.mark.parametrize("eviction", TESTED_POLICIES)
def test_a_rehearsal_leaves_its_spaces_in_order(eviction: str) -> None:
    rehearse(eviction)  # it checks them itself


@pytest.mark.interpreted
def test_a_rehearsal_without_features_leaves_its_spaces_in_order() -> None:
    rehearse("lru", NO_FEATURES)


@pytest.mark.plain_only
def test_what_is_recorded_without_features_is_of_pools_that_have_none() -> None:
    plain, all_of_them = recorded_once(of_spaces("lru", has_features=False)), recorded_once(of_spaces("lru"))
    assert any("PoolArrays" in str(each.kinds) for each in plain)
    assert not any("FeaturedArrays" in str(each.kinds) for each in plain)
    assert any("FeaturedArrays" in str(each.kinds) for each in all_of_them)
    missing = {(each.module, each.name) for each in all_of_them} - {(each.module, each.name) for each in plain}
    assert {module.rpartition(".")[2] for module, _ in missing} <= OF_FEATURES, missing
    assert of_spaces("fifo", has_features=False) == of_spaces("fifo")


@pytest.mark.plain_only
def test_what_is_recorded_names_each_loop_once_and_depends_on_the_policy() -> None:
    lru, hazard = recorded_once(of_spaces("lru")), recorded_once(of_spaces("hazard"))
    assert len(lru) == len(set(lru)) > 100
    own = {(each.module, each.name) for each in hazard} - {(each.module, each.name) for each in lru}
    assert all(module.startswith("pagedkv.blocks.eviction.hazard.") for module, _ in own)
    assert {(each.module, each.name) for each in lru} <= {(each.module, each.name) for each in hazard}
    assert any("HazardArrays" in str(each.kinds) for each in hazard)
    assert not any("HazardArrays" in str(each.kinds) for each in lru)


def test_an_unknown_policy_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigurationError, match="must be one of"):
        warm_up(["oldest"])


def test_an_unknown_target_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigurationError, match=r"target must be one of .* got 'x86-64-v9'"):
        warm_up(target="x86-64-v9")


@pytest.mark.long
@needs_compiled_loops
def test_who_interrupts_a_warm_up_waits_for_the_loops_under_way_alone() -> None:
    told: list[tuple[int, int]] = []

    def interrupt(*numbers: int) -> None:
        told.append((numbers[0], numbers[1]))
        if len(told) == 2:  # the first loop is compiled
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        warm_up(num_processes=2, on_progress=interrupt)
    assert 2 <= len(told) < told[0][1] / 2


@pytest.mark.long
def test_random_operations_reach_no_loop_that_the_rehearsal_lacks() -> None:
    """By the types of their arguments; policies other than LRU have the same loops with other arrays."""
    rehearsed = {*recorded_once(of_spaces("lru")), *recorded_once(of_spaces("lru", has_features=False))}
    reached = recorded([Rehearsal("tests.warming.driving")])
    assert any(each.name == "branch_row" for each in reached)
    others = ("AdaptiveArrays", "FifoArrays", "HazardArrays")
    new = [each for each in reached if each not in rehearsed and ".eviction." not in each.module]
    assert [each for each in new if not any(name in str(each.kinds) for name in others)] == []


@pytest.mark.plain_only
def test_curves_and_attention_have_loops_of_their_own() -> None:
    of_blocks, in_a_model, attention = (
        {each.name for each in recorded_once(rehearsal)}
        for rehearsal in (of_curves("lru"), of_model_curves("lru"), ATTENTION)
    )
    assert {
        "_serve_prompts",
        "_serve_all",
        "_insert",
        "_fill_table",
        "_use_prompts",
        "_mark_distances",
        "_count_within",
    } <= of_blocks
    assert "write_path" in in_a_model
    assert attention == {"write_tokens", "decode_attention"}


def test_all_that_can_be_reached_is_warmed_up_and_nothing_that_lacks_a_package() -> None:
    spaces = [of_spaces("lru"), of_spaces("lru", has_features=False)]
    lru, attention = [*spaces, of_curves("lru"), of_model_curves("lru"), of_stores("lru"), ROUTING], ATTENTION
    assert all_of("lru") == (*lru, attention)
    assert replace(attention, needs="no_such_package").can_be_run is False


COUNTING = """
import json
import sys
from pagedkv.compilation import loop

compiled = []
entry_of = loop.entry_of

def noted(piece, **kws):
    compiled.append(f"{piece.fndesc.modname}.{piece.fndesc.qualname}{piece.signature.args}"[:300])
    return entry_of(piece, **kws)

loop.entry_of = noted
"""
SERVE = """
from tests.conftest import *
from tests.space.mixes import MIXES
from tests.space.test_state_machine import drive

for mix in MIXES:
    drive(mix, 2, "quick")
"""
MEASURE = """
from pathlib import Path
from tempfile import TemporaryDirectory
from pagedkv.cli.app import app
from typer.testing import CliRunner

with TemporaryDirectory() as folder:
    trace = Path(folder, "trace.jsonl")
    prompts = [[0, 1, 2], [0, 1, 3], [4, 5], list(range(10, 2600)), [0, 1, 2], [4, 5]]
    lines = [{"timestamp": 10 * at, "input_length": 4 * len(each), "output_length": 2, "hash_ids": each}
             for at, each in enumerate(prompts)]
    trace.write_text("".join(json.dumps(line) + "\\n" for line in lines))
    chosen = ["curve", str(trace), "--trace-block-size", "4", "--json", "-", *sys.argv[1:]]
    for more in ([], ["--model", "gemma-3-27b", "--memory", "4"]):
        result = CliRunner().invoke(app, [*chosen, *more])
        assert result.exit_code == 0, result.output
"""
STORE = """
from tests.compiling import TESTED_POLICIES
from tests.tiers.faults.machine import FaultMachine
from pagedkv.tiers.core import rehearse

for policy in TESTED_POLICIES:
    rehearse(policy)
for seed in range(3):
    FaultMachine(seed, fault_rate=0.2).run(3000)
"""
ROUTE = """
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.cluster import Kills, Network, VirtualCluster
from pagedkv.simulation.cost import CostModel
from pagedkv.planner.traces.request import TokenizedRequest
import numpy as np

config = ServingConfig(num_blocks=200, block_size=4)
cluster = VirtualCluster(config, CostModel(), 3, network=Network(0.01, 0.3), kills=Kills(((1.0, "r0"),)))
tokens = np.arange(400, dtype=np.int32)
cluster.run([TokenizedRequest(0.1 * n, tokens[: 20 * (n % 20 + 1)], tokens[:4], salt="ab"[n % 2]) for n in range(40)])
cluster.check()
"""
ANSWER = """
from transformers import LlamaConfig, LlamaForCausalLM
from pagedkv.engine import EngineConfig, LLM, SamplingParams

config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, max_position_embeddings=64)
llm = LLM(LlamaForCausalLM(config).eval(), EngineConfig(num_blocks=40, block_size=4, max_sequences=4))
answers = llm.generate([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))
assert [len(answer.completions[0].token_ids) for answer in answers] == [6, 6]
"""


def compiled_by(program: str, *arguments: str, **environment: str) -> list[str]:
    """Run a program in a process of its own; give what that compiles."""
    done = subprocess.run(
        [sys.executable, "-c", f"{COUNTING}{program}\nprint(json.dumps(compiled))", *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"NUMBA_DISABLE_JIT": "0"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled: list[str] = json.loads(done.stdout.splitlines()[-1])
    return compiled


@pytest.fixture(scope="module")
def _warm() -> None:
    """Warm up for the policies of these tests; `make test` has done so, and then it takes no time."""
    for policy in TESTED_POLICIES:
        make_ready(*all_of(policy))


def test_each_loop_that_is_done_is_reported() -> None:
    told: list[tuple[int, int]] = []
    done = compile_all([of_curves("lru")], on_progress=lambda *numbers: told.append(numbers))
    assert (told[0], told[-1]) == ((0, done.num_loops), (done.num_loops, done.num_loops))
    assert len(told) == done.num_loops + 1 > 2


@pytest.mark.usefixtures("_warm")
def test_steps_of_every_kind_compile_nothing_after_a_warm_up() -> None:
    """Of all mixes of groups, features and policies that the state machines drive."""
    assert compiled_by(SERVE) == []


@pytest.mark.usefixtures("_warm")
def test_curves_compile_nothing_after_a_warm_up() -> None:
    options = [option for name in TESTED_POLICIES for option in ("--eviction", name)]
    assert compiled_by(MEASURE, *options) == []


@pytest.mark.usefixtures("_warm")
def test_routers_compile_nothing_after_a_warm_up() -> None:
    assert compiled_by(ROUTE) == []


@pytest.mark.usefixtures("_warm")
def test_stores_compile_nothing_after_a_warm_up() -> None:
    assert compiled_by(STORE) == []


@pytest.mark.usefixtures("_warm")
def test_an_engine_on_a_cpu_compiles_nothing_after_a_warm_up() -> None:
    assert compiled_by(ANSWER) == []


COMPILE_ATTENTION = """
from pagedkv.compilation.targets import target_named
from pagedkv.warming import ATTENTION
from pagedkv.warming.warm_up import compile_all
compile_all([ATTENTION], {target})
"""
ATTEND = """
from pagedkv.warming import ATTENTION, make_ready
from pagedkv.warming import ready
ready.compile_all = lambda _: compiled.append("all anew")
make_ready(ATTENTION)
ATTENTION.run()
"""
TARGET = next((target for target in TARGETS["x86_64"] if target.runs_on(own_processor())), None)


@pytest.mark.long
@pytest.mark.skipif(TARGET is None, reason="no target of this processor")
def test_what_is_warmed_up_for_a_target_serves_every_processor_of_that_kind_and_no_other(tmp_path: Path) -> None:
    assert TARGET is not None
    here = {"NUMBA_CACHE_DIR": str(tmp_path)}
    program = COMPILE_ATTENTION.format(target=f"target_named({TARGET.name!r})")
    assert compiled_by(program, **here) == []  # workers do
    for name in ({}, {"NUMBA_CPU_NAME": "skylake"}):
        assert compiled_by(ATTEND, **here, **name) == []
    lacking = ",".join(f"+{feature}" for feature in TARGET.features[:-1])
    elsewhere = compiled_by(ATTEND, **here, NUMBA_CPU_NAME="skylake", NUMBA_CPU_FEATURES=lacking)
    assert elsewhere[0] == "all anew"
    assert len(elsewhere) == 3


@pytest.mark.long
@pytest.mark.skipif(TARGET is None, reason="no target of this processor")
def test_a_warm_up_without_a_target_is_for_the_processor_at_hand_whatever_else_is_there(tmp_path: Path) -> None:
    assert TARGET is not None
    for target in (f"target_named({TARGET.name!r})", "None"):
        compiled_by(COMPILE_ATTENTION.format(target=target), NUMBA_CACHE_DIR=str(tmp_path))
        names = [file.name for file in tmp_path.rglob("*.nbc") if not file.name.startswith("all-loops")]
    assert len(names) == 4
