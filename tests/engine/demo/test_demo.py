"""The demonstration: its language, its model, and questions served from too little memory."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pagedkv.engine import LLM, EngineCore, StepRecord
from pagedkv.engine.demo.serving import (
    ANSWER_LENGTH,
    BOS,
    DEMO_CONFIG,
    LONGEST,
    QUESTION,
    SHORTEST,
    VOCABULARY,
    Judged,
    Question,
    Served,
    answer_densely,
    decode,
    draw_document,
    draw_questions,
    encode,
    judge,
    serve,
)
from pagedkv.engine.demo.trained import FOLDER, load_trained
from pagedkv.errors import ConfigurationError
from pagedkv.probe import compat
from tests.cli.command import run
from tools.train_demo_model import CONFIG, NOT_JUDGED, Batch, copies, documents, recall, train

SMALL = replace(DEMO_CONFIG, num_blocks=90, num_host_blocks=40, max_batched_tokens=256, self_test=False)
"""Memory for three documents."""


@pytest.fixture(scope="module")
def model() -> compat.Model:
    return load_trained()


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return draw_questions(60, 6, seed=3)


@pytest.fixture(scope="module")
def served(model: compat.Model, questions: list[Question]) -> Served:
    return serve(LLM(model, SMALL), questions)


# The language


def test_text_and_tokens_are_each_other() -> None:
    document = draw_document(np.random.default_rng(0), 5)
    tokens = [*document.tokens().tolist(), *document.question(2).tolist(), *document.answer(2).tolist()]
    assert encode(decode(tokens)) == tokens
    assert len(set(VOCABULARY)) == len(VOCABULARY)


def test_a_document_says_where_each_thing_is_once() -> None:
    document = draw_document(np.random.default_rng(1), LONGEST)
    assert len({tuple(fact[:2]) for fact in document.facts.tolist()}) == LONGEST
    assert document.tokens()[0] == BOS
    assert document.question(7).tolist() == [QUESTION, *document.facts[7, :2]]


def test_questions_are_the_same_for_the_same_seed() -> None:
    first, again, other = ([each.prompt.tolist() for each in draw_questions(8, 3, seed)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


# The model


def test_the_model_recalls_facts_of_documents_that_it_never_saw(model: compat.Model) -> None:
    for num_facts in (SHORTEST, LONGEST):
        assert recall(model, seed=77, num_facts=num_facts, num_documents=50) >= 0.98


def test_an_untrained_model_recalls_nothing() -> None:
    torch.manual_seed(0)
    assert recall(compat.make_llama(CONFIG), seed=77, num_facts=8) <= 0.1


def test_the_model_is_small_and_what_transformers_reads_from_its_folder(model: compat.Model) -> None:
    read = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert 300_000 <= sum(each.numel() for each in read.parameters()) <= 1_000_000
    assert (FOLDER / "model.safetensors").stat().st_size <= 2 * 2**20
    tokens = torch.from_numpy(draw_document(np.random.default_rng(2), LONGEST).tokens()).long()[None]
    with torch.inference_mode():
        assert torch.equal(read(tokens).logits, model(tokens).logits)


def test_training_makes_the_model_that_is_shipped(model: compat.Model) -> None:
    assert {name: tensor.shape for name, tensor in compat.make_llama(CONFIG).state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }


def test_other_weights_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(
        ConfigurationError, match=r"its SHA-256 is [0-9a-f]{64}, not 2a79a8c2\w+\. Install pagedkv again"
    ):
        load_trained(folder)
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*Install pagedkv again"):
        load_trained(tmp_path)


@pytest.mark.parametrize("draw", [copies, documents])
def test_what_is_judged_in_training_can_be_known(draw: Callable[[np.random.Generator, int], Batch]) -> None:
    """The second copy of a random sequence, but its first token; the answers about a document."""
    tokens, judged = draw(np.random.default_rng(2), 40)
    for row, wanted in zip(tokens[:4].tolist(), judged[:4].tolist(), strict=True):
        places = [place for place, token in enumerate(wanted) if token != NOT_JUDGED]
        assert places
        for place in places:
            assert row[place] == wanted[place]
            assert row[place - 1 : place + 1] in [row[at - 1 : at + 1] for at in range(1, place)]


@pytest.mark.long
def test_some_seconds_of_training_teach_something() -> None:
    """The bar itself takes a GPU and a minute; here the loss on random words falls well below chance."""
    torch.manual_seed(2)
    model = compat.make_llama(CONFIG)
    tokens, judged = (torch.from_numpy(each) for each in documents(np.random.default_rng(9), 8))

    def loss() -> float:
        with torch.inference_mode():
            return float(model(input_ids=tokens[:64], labels=judged[:64]).loss)

    before = loss()
    assert train(model, seed=2, seconds=30) > 0
    assert loss() < 0.8 * before


# Serving


def test_all_answers_are_right_and_those_of_dense_generation(
    model: compat.Model, questions: list[Question], served: Served
) -> None:
    judged = judge(model, questions, served)
    assert judged.num_answers == 45 + 15 * 4
    assert judged.num_same == judged.num_answers
    assert judged.accuracy >= 0.98
    assert judged.failings == []


def test_everything_that_memory_is_short_for_happens(served: Served) -> None:
    numbers = asdict(served.measured) | {"num_hit_tokens": served.num_hit_tokens}
    wanted = ("num_hit_tokens", "num_chunked", "num_forked", "num_swapped", "num_recomputed", "num_evictions")
    assert {name for name in wanted if not numbers[name]} == set()
    assert served.measured.num_forked == 15 * 3
    assert 0 < served.measured.most_waste < 0.04
    assert served.measured.most_waste_of_blocks > 0
    assert served.measured.reserved_ratio > 1


# What is broken must show


def test_without_the_document_answers_are_wrong(model: compat.Model) -> None:
    questions = draw_questions(20, 2, seed=5)
    other = draw_document(np.random.default_rng(6), LONGEST).tokens()
    elsewhere = [replace(each, prompt=np.concatenate([other, each.prompt[-3:]])) for each in questions]
    answers = answer_densely(model, elsewhere)
    assert all(len(answer) == ANSWER_LENGTH for answer in answers)
    assert sum(answer == tuple(each.answer.tolist()) for answer, each in zip(answers, questions, strict=True)) <= 2


def poison(core: EngineCore) -> None:
    """Fill blocks in use with NaN."""
    _blocks(core)[_in_use(core)] = 0xFF


def exchange(core: EngineCore) -> None:
    """Let hits find other content: that of another block in use."""
    used = _in_use(core)
    blocks = _blocks(core)
    blocks[used] = blocks[used[1:] + used[:1]]


def _in_use(core: EngineCore) -> list[int]:
    return sorted({block for request in core.scheduler.running for block in core.space.block_ids(request.rows[0])})


def _blocks(core: EngineCore) -> torch.Tensor:
    (pool,) = core.executor.storage.pools.values()
    return pool.device_bytes.view(pool.num_blocks, pool.block_nbytes)


@pytest.mark.parametrize("harm", [poison, exchange])
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # NumPy's, where loops are plain Python
def test_memory_that_was_changed_shows_in_the_exit_code(
    harm: Callable[[EngineCore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = EngineCore.step

    def harmed(core: EngineCore) -> StepRecord:
        record = step(core)
        harm(core)
        return record

    monkeypatch.setattr(EngineCore, "step", harmed)
    result = run("demo", "--questions", 12, "--documents", 2)
    assert result.exit_code == 1
    assert "of the answers are right, where 98% must be" in result.stderr
    assert "answers are not those of dense generation" in result.stderr


@pytest.mark.parametrize(
    ("num_right", "num_same", "failings"),
    [
        (98, 100, []),
        (97, 100, ["97.00% of the answers are right, where 98% must be"]),
        (100, 99, ["1 of 100 answers are not those of dense generation"]),
    ],
)
def test_what_falls_short_is_told(num_right: int, num_same: int, failings: Sequence[str]) -> None:
    assert Judged(100, num_right, num_same, seconds=1.0, num_tokens=1).failings == failings


# The command


def test_the_command_tells_what_came_of_it_and_how_far_it_is() -> None:
    result = run("demo", "--questions", 20, "--documents", 2, "--json", "-")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["num_same_as_dense"] == document["num_answers"] == 35
    assert document["num_forked"] == 15
    assert document["most_waste"] < 0.04
    assert result.stderr.splitlines()[-1].startswith("20 of 20 answered; 0 running, 0 waiting, 0 swapped out; 0 of 199")


def test_the_command_prints_a_table() -> None:
    result = run("demo", "--questions", 8, "--documents", 2, "--num-blocks", 100)
    assert result.exit_code == 0
    for text in ("right answers", "14 of 14", "1,584 tokens in 99 blocks", "preempted", "padded generate"):
        assert text in result.stdout, text


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--questions", 0, "0 questions about 24 documents: draw at least 1 of each"),
        ("--documents", -1, "400 questions about -1 documents"),
        ("--num-blocks", 1, ""),
        ("--num-blocks", 8, "does not fit"),
    ],
)
def test_a_bad_number_gets_one_line(option: str, value: int, message: str) -> None:
    result = run("demo", option, value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pagedkv: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
