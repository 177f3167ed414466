"""A prompt goes from one process's memory to another's by NIXL: its answer, what is refused, and what is freed."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.engine import LLM, HandOff, Intent, NixlLink, SamplingParams
from pagedkv.errors import ConfigurationError, MissingExtraError
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, compare, poison, reference

HAS_NIXL: Final = importlib.util.find_spec("nixl") is not None
needs_nixl: Final = pytest.mark.skipif(not HAS_NIXL, reason="no NIXL here: make test-nixl")
NUM_NEW: Final = 6
PARAMS: Final = SamplingParams(max_tokens=NUM_NEW)
LONG: Final = list(range(20, 90))
ROOMY: Final = replace(CONFIG, num_blocks=60, max_tokens=100, max_batched_tokens=64, warm_up=False)
PATIENCE_S: Final = 60.0
PREFILL: Final = """
import json, sys
from dataclasses import asdict
from pagedkv.engine import LLM, Intent, NixlLink, SamplingParams
from tests.engine.families import make_model
from tests.engine.test_nixl_link import LONG, ROOMY
llm, link = LLM(make_model(sys.argv[1]), ROOMY), NixlLink()
llm.generate([LONG], SamplingParams(max_tokens=1), Intent(salt=b"a"))
print(json.dumps(asdict(llm.hand_over(LONG, salt=b"a", link=link))), flush=True)
for _ in sys.stdin:
    print(json.dumps(link.num_waiting), flush=True)
"""


@contextmanager
def prefilled(family: str) -> Iterator[tuple[HandOff, "subprocess.Popen[str]"]]:
    """Compute the prompt in another process, which stays alive; return its hand-off."""
    command = [sys.executable, "-c", PREFILL, family]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None
        yield HandOff(**next(json.loads(line) for line in process.stdout if line.startswith("{"))), process
    finally:
        process.kill()
        process.communicate()


def num_waiting(process: "subprocess.Popen[str]") -> int:
    """Ask the other process how many prompts wait to be taken."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    waiting: int = json.loads(process.stdout.readline())
    return waiting


@needs_nixl
@pytest.mark.parametrize(("family", "num_tokens"), [("llama", 68), ("gemma3_text", 68), ("lfm2", 64)])
def test_a_prompt_goes_from_memory_to_memory(family: str, num_tokens: int) -> None:
    model = make_model(family)
    llm = LLM(model, ROOMY)
    poison(llm)
    link = NixlLink()
    with prefilled(family) as (hand_off, process):
        assert (hand_off.num_tokens, hand_off.runs) == (num_tokens, {})
        assert num_waiting(process) == 1
        with pytest.raises(ConfigurationError, match="pass a link"):
            llm.take_over(hand_off, LONG, salt=b"a")
        with pytest.raises(ConfigurationError, match="no prefix of this prompt"):
            llm.take_over(hand_off, LONG[1:], salt=b"a", link=link)
        with pytest.raises(ConfigurationError, match="salt"):
            llm.take_over(hand_off, LONG, salt=b"b", link=link)
        other = LLM(make_model("mistral"), ROOMY)
        with pytest.raises(ConfigurationError, match="both need the same weights"):
            other.take_over(hand_off, LONG, salt=b"a", link=link)
        llm.core.space.check()
        assert llm.core.space.num_cached_blocks() == 0, "whatever was refused has changed nothing"
        assert num_waiting(process) == 0, "it was read, and is gone"
    with prefilled(family) as (hand_off, process):
        assert llm.take_over(hand_off, LONG, salt=b"a", link=link) == num_tokens
        until = time.monotonic() + PATIENCE_S
        while num_waiting(process):
            assert time.monotonic() < until
    (request,) = llm.submit([LONG], PARAMS, Intent(salt=b"a"))
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    compare([request], reference(model, [LONG], NUM_NEW))
    assert request.num_cached_tokens == num_tokens
    link.close()


@needs_nixl
def test_an_engine_that_has_ended_is_an_error_and_not_a_wait() -> None:
    llm, link = LLM(make_model("llama"), ROOMY), NixlLink()
    with prefilled("llama") as (hand_off, _):
        pass
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="the hand-off"):
        llm.take_over(hand_off, LONG, salt=b"a", link=link, timeout_s=5.0)
    assert time.monotonic() - began < PATIENCE_S
    llm.core.space.check()


@needs_nixl
def test_what_waits_is_bounded_and_the_oldest_goes_first() -> None:
    link, reader = NixlLink(most_nbytes=1000), NixlLink()
    first, second, third = (link.offer([bytes([fill]) * 400]) for fill in (1, 2, 3))
    assert link.num_waiting == 2
    assert bytes(reader.fetch(second, PATIENCE_S)) == b"\x02" * 400
    assert bytes(reader.fetch(third, PATIENCE_S)) == b"\x03" * 400
    until = time.monotonic() + PATIENCE_S
    while link.num_waiting:
        assert time.monotonic() < until
    with pytest.raises(ConfigurationError, match="raise most_nbytes"):
        link.offer([bytes(1001)])
    places: list[Any] = [None, {}, {**second, "more": 1}, {**second, "nbytes": 0}, {**second, "metadata": "AAAA"}]
    for place in places:
        with pytest.raises(ConfigurationError, match="hand-off"):
            reader.fetch(place, PATIENCE_S)
    with pytest.raises(ConfigurationError, match=r"NIXL has no plug-in 'NONE': it has .*UCX"):
        NixlLink(backend="NONE")
    assert first["ticket"] != second["ticket"]
    link.close()


@needs_nixl
def test_nothing_cached_is_nothing_to_take() -> None:
    llm, link = LLM(make_model("llama"), ROOMY), NixlLink()
    hand_off = llm.hand_over(LONG, link=link)
    assert (hand_off.num_tokens, hand_off.direct) == (0, None)
    assert llm.take_over(HandOff(**json.loads(json.dumps(asdict(hand_off)))), LONG, link=link) == 0


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is here")
def test_without_nixl_the_error_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"needs nixl: pip install '\.\[nixl\]'"):
        NixlLink()
