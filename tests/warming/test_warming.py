"""What is compiled ahead is all that Python calls, and nothing is compiled after."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType
from typing import Any, cast

import numba
import pytest

import pagedkv.blocks
import pagedkv.space
from pagedkv import BlockSpace, FullAttention, SpaceConfig
from pagedkv.blocks.eviction.registry import POLICIES
from pagedkv.compilation.targets import TARGETS, own_processor
from pagedkv.errors import ConfigurationError
from pagedkv.warming import (
    ON_CPU,
    ROUTING,
    make_ready,
    of_curves,
    of_model_curves,
    of_spaces,
    of_stores,
    warm_up,
)
from pagedkv.warming.parts import Entry, all_of, sections, type_of
from pagedkv.warming.warm_up import compile_all
from tests.compiling import TESTED_POLICIES, needs_compiled_loops
from tests.warming.recorder import recorded

ALL = {part for policy in POLICIES for part in all_of(policy)}


def loop_of(entry: Entry) -> FunctionType:
    """Find the function of an entry's loop."""
    module, _, name = entry.loop.rpartition(".")
    found = getattr(import_module(f"pagedkv.{module}"), name)
    function: FunctionType = getattr(found, "py_func", found)
    return function


@pytest.mark.interpreted
def test_each_line_of_the_list_is_a_loop_with_so_many_arguments() -> None:
    for entry in {entry for part in ALL for entry in part.entries()}:
        assert len(entry.arguments) == loop_of(entry).__code__.co_argcount, entry.loop
        assert all(type_of(argument, entry.pool) is not None for argument in entry.arguments)


@pytest.mark.interpreted
def test_no_line_of_the_list_occurs_twice_nor_belongs_to_no_part() -> None:
    used = {name for part in ALL for name in part.sections if name in sections()}
    assert used == sections().keys() - {""}
    for part in ALL:
        lines = [" ".join(line) for name in part.sections for line in sections().get(name, ())]
        assert len(lines) == len(set(lines))


@pytest.mark.interpreted
def test_each_loop_that_says_what_it_takes_is_listed() -> None:
    listed = {entry.loop for entry in of_spaces("lru").entries()}
    for room in (pagedkv.space, pagedkv.blocks):
        for module in (import_module(found.name) for found in iter_modules(room.__path__, f"{room.__name__}.")):
            for name, loop in vars(module).items():
                if callable(loop) and hasattr(loop, "takes"):
                    home = getattr(loop, "__module__", module.__name__).removeprefix("pagedkv.")
                    assert f"{home}.{name}" in listed


@pytest.mark.interpreted
def test_what_a_space_takes_is_what_the_list_says() -> None:
    """By examples of each kind of argument, in a space with features and in one without."""
    for config in (
        SpaceConfig((FullAttention(),), 9),
        SpaceConfig((FullAttention(),), 9, explain=True),
        SpaceConfig((FullAttention(),), 9, eviction="hazard"),
    ):
        (part,) = (part for part in ALL if part == of_spaces(config.eviction, has_features=config.has_features))
        for like, example in BlockSpace(config)._state.loops.examples.items():
            assert cast("Any", numba).typeof(example) == type_of(like.name, part.pool), like


def test_entries_are_for_the_arrays_of_the_policy_and_of_features() -> None:
    plain, featured, hazard = (
        {entry.loop: entry for entry in part.entries()}
        for part in (of_spaces("lru", has_features=False), of_spaces("lru"), of_spaces("hazard"))
    )
    assert plain.keys() < featured.keys()
    assert all(name.startswith("blocks.eviction.hazard.") for name in hazard.keys() - featured.keys())
    assert {entry.pool for entry in plain.values()} == {"", "blocks.record.PoolArrays"}
    assert {entry.pool for entry in featured.values()} == {"", "blocks.record.FeaturedArrays"}
    assert {entry.pool for entry in hazard.values()} == {"", "blocks.eviction.hazard.policy.HazardArrays"}
    assert of_spaces("fifo", has_features=False) == of_spaces("fifo")


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
def test_random_operations_call_nothing_that_the_list_lacks() -> None:
    """Also prints the lines that are missing, with the class of arrays for POOL, GROUP and the like."""
    loops, missing = recorded("tests.warming.driving")
    assert "space.forking.branch_row" in loops
    assert missing == []


def test_all_that_can_be_reached_is_warmed_up_and_nothing_that_lacks_a_package() -> None:
    spaces = [of_spaces("lru"), of_spaces("lru", has_features=False)]
    lru, attention = [*spaces, of_curves("lru"), of_model_curves("lru"), of_stores("lru"), ROUTING], ON_CPU
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

for policy in TESTED_POLICIES:
    for seed in range(3):
        FaultMachine(seed, fault_rate=0.2, eviction=policy).run(3000)
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
def test_nothing_is_compiled_after_a_warm_up() -> None:
    """Neither by steps of all mixes that the state machines drive, nor by stores, routers, curves and an engine.

    All are driven by one process, since each imports for seconds; what is compiled names its module.
    """
    options = [option for name in TESTED_POLICIES for option in ("--eviction", name)]
    assert compiled_by(SERVE + STORE + ROUTE + MEASURE + ANSWER, *options) == []


COMPILE_ATTENTION = """
from pagedkv.compilation.targets import target_named
from pagedkv.warming import ON_CPU
from pagedkv.warming.warm_up import compile_all
compile_all([ON_CPU], {target})
"""
ATTEND = """
from pagedkv.warming import ON_CPU, make_ready
from pagedkv.warming import ready
ready.compile_all = lambda _: compiled.append("all anew")
make_ready(ON_CPU)
ON_CPU.compile()
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
