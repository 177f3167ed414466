"""What is compiled ahead is all that spaces reach, and nothing is compiled after."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.pool.eviction.registry import POLICIES
from pagedkv.warming import rehearse, warm_up
from pagedkv.warming.recording import recorded


@pytest.mark.interpreted
@pytest.mark.parametrize("eviction", POLICIES)
def test_a_rehearsal_leaves_its_spaces_in_order(eviction: str) -> None:
    rehearse(eviction)  # it checks them itself


def test_what_is_recorded_names_each_loop_once_and_depends_on_the_policy() -> None:
    lru, hazard = recorded(["lru"]), recorded(["hazard"])
    assert len(lru) == len(set(lru)) > 100
    own = {(each.module, each.name) for each in hazard} - {(each.module, each.name) for each in lru}
    assert all(module.startswith("pagedkv.pool.eviction.hazard.") for module, _ in own)
    assert {(each.module, each.name) for each in lru} <= {(each.module, each.name) for each in hazard}
    assert any("HazardArrays" in str(each.kinds) for each in hazard)
    assert not any("HazardArrays" in str(each.kinds) for each in lru)


def test_an_unknown_policy_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigurationError, match="must be one of"):
        warm_up(["oldest"])


SERVE = """
import json
import sys
from pagedkv.compilation import loop
from pagedkv.pool.eviction.registry import POLICIES
from pagedkv.warming import warm_up

compiled = []
entry_of = loop.entry_of

def noted(piece, **kws):
    compiled.append(f"{piece.fndesc.modname}.{piece.fndesc.qualname}{piece.signature.args}"[:300])
    return entry_of(piece, **kws)

loop.entry_of = noted
told = []
done = warm_up(tuple(POLICIES), told=lambda *numbers: told.append(numbers))

from tests.space.mixes import MIXES
from tests.space.test_state_machine import drive

for mix in MIXES:
    drive(mix, 2, "quick")
print(json.dumps({"num_loops": done.num_loops, "told": told[-1], "compiled": compiled}))
"""


def test_steps_of_every_kind_compile_nothing_after_a_warm_up() -> None:
    """Of all mixes of groups, features and policies that the state machines drive."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.conftest import *\n" + SERVE],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"NUMBA_DISABLE_JIT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["compiled"] == []
    assert answer["told"] == [answer["num_loops"]] * 2
