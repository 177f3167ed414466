"""Prefixes as files: another engine continues them, and whatever is wrong with a file is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

from pagedkv.engine import LLM, Intent, SamplingParams
from pagedkv.errors import ConfigurationError
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, compare, poison, reference, serve

PARAMS: Final = SamplingParams(max_tokens=6)
LONG: Final = list(range(20, 90))
ROOMY: Final = replace(CONFIG, num_blocks=60, max_tokens=100, max_batched_tokens=64, warm_up=False)


@pytest.mark.parametrize(("family", "num_tokens"), [("llama", 68), ("gemma3_text", 68), ("mistral", 68), ("lfm2", 64)])
def test_another_engine_continues_a_prefix(family: str, num_tokens: int, tmp_path: Path) -> None:
    model, path = make_model(family), tmp_path / "prefix"
    first = LLM(model, ROOMY)
    assert first.export(LONG, path) == 0
    assert not path.exists()
    first.generate([LONG], PARAMS, Intent(salt=b"a"))
    assert first.export(LONG, path, salt=b"a") == num_tokens
    second = LLM(model, ROOMY)
    poison(second)
    assert second.import_(path, salt=b"a") == num_tokens
    assert second.import_(path, salt=b"a") == num_tokens  # and it is there already
    second.core.space.check()
    requests = second.submit([LONG], PARAMS, Intent(salt=b"a"))
    while second.core.has_work:
        second.step()
    compare(requests, reference(model, [LONG], 6))
    assert requests[0].num_cached_tokens == num_tokens
    others, _ = serve(second, [LONG], PARAMS)
    assert others[0].num_cached_tokens == 0
    assert [each.name for each in tmp_path.iterdir()] == ["prefix"]


def test_of_a_file_without_an_end_no_more_is_read_than_there_are_blocks(tmp_path: Path) -> None:
    """All of it was read, whatever it was."""
    model, path = make_model("llama"), tmp_path / "prefix"
    llm = LLM(model, ROOMY)
    with pytest.raises(ConfigurationError, match="is not a prefix of this model: foreign"):
        llm.import_("/dev/zero")
    llm.generate([LONG], PARAMS)
    llm.export(LONG, path)
    path.write_bytes(path.read_bytes()[:16] + (2**62).to_bytes(8, "little") + bytes(200))
    with path.open("ab") as file:
        file.truncate(2**40)  # all of it is a hole
    assert llm.import_(path) == 0


def test_what_is_wrong_with_a_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, path = make_model("llama"), tmp_path / "prefix"
    llm = LLM(model, ROOMY)
    llm.generate([LONG], PARAMS)
    llm.export(LONG, path)
    content = path.read_bytes()
    llm.reset_prefix_cache()
    nbytes = int.from_bytes(content[16:24], "little")
    damaged = {
        "it is empty": b"",
        "foreign": b"x" * 500,
        "truncated": content[:-64],
        "truncated: ": content + content[:100],
        "damaged": content[:-1] + bytes([content[-1] ^ 1]),
        "key": content + content[:nbytes],
        "another chain|another key": content[nbytes:],
    }
    for message, wrong in damaged.items():
        path.write_bytes(wrong)
        with pytest.raises(ConfigurationError, match=message):
            llm.import_(path)
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="salt"):
        llm.import_(path, salt=b"another")
    with pytest.raises(ConfigurationError, match="layout"):
        LLM(model, replace(ROOMY, block_size=8)).import_(path)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    weight.data.mul_(2.0)
    with pytest.raises(ConfigurationError, match="model: the frame has another model"):
        llm.import_(path)
    weight.data.mul_(0.5)
    assert llm.import_(path) == 68
    short = LLM(model, replace(ROOMY, num_blocks=10))
    assert short.import_(path) == 0
    short.core.space.check()
