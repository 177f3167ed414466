"""Steps of a running server: those that its engine took, by its own records; and what is no server."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from aiohttp.test_utils import unused_port

from pagedkv.engine import StepRecord
from pagedkv.errors import ConfigurationError, RecordingError
from pagedkv.server import SharedKeys, StepLog
from pagedkv.simulation.calibration import read_steps
from pagedkv.simulation.calibration.running_server import _Answer, _overhead_s, measure_server
from tests.server.serving import Script, make_service, running

BLOCK_SIZE = 16


@dataclass
class Measured:
    """A server that needs the key "one", the records of its steps, and their log."""

    url: str
    log: Path
    records: list[StepRecord] = field(default_factory=list)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    service = make_service(Script(), SharedKeys(["one"]), longest=400)
    path = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    log = StepLog(path, BLOCK_SIZE)
    service.on_step.append(log.stepped)
    with running(service) as url:
        measured = Measured(url, path)
        service.on_step.append(measured.records.append)
        yield measured
    log.close()


def test_steps_are_those_that_the_engine_took(server: Measured) -> None:
    begun = len(server.records)
    steps = measure_server(f"{server.url}/v1/", 2.0, api_key="one")
    records = server.records[begun:]
    decoding = steps.num_new_tokens == steps.counts("num_sequences")
    assert decoding.any()
    assert set(steps.num_new_tokens[decoding]) <= {each.num_decoded for each in records if not each.num_prefilled}
    assert steps.num_new_tokens[decoding].max() >= 8  # a batch has decoded together
    of_prompts = steps.num_new_tokens == steps.counts("num_context_tokens")
    assert of_prompts.any()
    assert set(steps.num_new_tokens[of_prompts]) <= {each.num_prefilled for each in records if not each.num_decoded}
    longest = max(each.num_used_blocks for each in records) * BLOCK_SIZE
    assert steps.counts("num_context_tokens").max() <= longest
    assert (steps.seconds > 0).all()
    assert not any(each.num_hit_tokens for each in records), "prompts are random"


def test_a_step_log_has_the_steps_that_computed_tokens(server: Measured) -> None:
    begun = len(server.log.read_text().splitlines())
    measure_server(server.url, 1.0, api_key="one")
    computed = [each for each in server.records if each.num_tokens]
    assert len(computed) > begun
    steps = read_steps(str(server.log), block_size=1)  # which the log overrules
    assert steps.num_new_tokens.tolist() == [each.num_tokens for each in computed]
    assert steps.counts("num_context_tokens").tolist() == [BLOCK_SIZE * each.num_used_blocks for each in computed]
    assert f"{BLOCK_SIZE} tokens for each block" in steps.notes[0]


def test_what_is_not_measured_is_told(server: Measured, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="answered 401"):
        measure_server(server.url, 1.0)
    with pytest.raises(RecordingError, match="ClientConnectorError"):
        measure_server(f"http://127.0.0.1:{unused_port()}", 1.0)
    with pytest.raises(ConfigurationError, match="1 second or longer"):
        measure_server(server.url, 0.5)
    with pytest.raises(ConfigurationError, match="already exists: name a new file"):
        StepLog(server.log, BLOCK_SIZE)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        StepLog(tmp_path / "gone" / "log", BLOCK_SIZE)


def answer(num_prompt: int, first_s: float, gap_s: float) -> _Answer:
    return _Answer(
        5.0, is_alone=True, token_s=(5.0 + first_s + gap_s * np.arange(4)).tolist(), num_prompt=num_prompt, num_output=4
    )


def test_what_the_network_takes_is_what_short_prompts_take_beyond_a_step() -> None:
    answers = [answer(8, 0.013, 0.01), answer(9, 0.013, 0.01), answer(500, 0.2, 0.01), answer(2000, 0.8, 0.01)]
    assert _overhead_s(answers) == pytest.approx(0.003)
    assert _overhead_s([answer(8, 0.009, 0.01), answer(500, 0.2, 0.01)]) == 0.0
    assert _overhead_s([answer(8, 1.0, 0.01), answer(500, 0.2, 0.01)]) == pytest.approx(0.18)  # no step takes none
