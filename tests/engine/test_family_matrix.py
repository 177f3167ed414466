"""docs/families.md is what a run over all types recorded, and what was recorded is so still."""

from collections import Counter
from dataclasses import replace

import pytest
import transformers
from transformers import PreTrainedModel

from tests.engine.families import CONFIGS, MORE
from tests.engine.family_matrix.page import PAGE, page_of
from tests.engine.family_matrix.record import Record, all_types, read_record
from tests.engine.family_matrix.trying import CONFIGS as MATRIX_CONFIGS, Outcome, try_type
from tests.engine.serving import Reference, reference

RECORD = read_record()
NAMED = ("laguna", "afmoe", "longcat_flash", "olmo_hybrid", "mimo_v2_flash", "whisper", "qwen3_5_moe")
ONLY_WITHIN_ITS_WINDOW = {"moshi"}
"""Its default window is longer than any prompt of the tests; in the matrix it is short, and its masks have none."""


def test_the_page_is_made_of_the_record() -> None:
    assert page_of(RECORD) == PAGE.read_text(encoding="utf-8")


def test_the_engine_s_page_tells_the_same_numbers() -> None:
    kinds = Counter(outcome.kind for outcome in RECORD.outcomes.values())
    words = " ".join((PAGE.parent / "engine.md").read_text(encoding="utf-8").split())
    assert (
        f"all {len(RECORD.outcomes)} types that transformers 5.23 makes decoders of: {kinds['equal']} are equal, "
        f"{kinds['refused']} refused with a reason, {kinds['not tried']} could not be tried"
    ) in words


def test_the_page_tells_every_type_once_with_what_became_of_it() -> None:
    rows = [line.split("|") for line in page_of(RECORD).splitlines() if line.startswith("| ")]
    listed = [name.strip() for row in rows for name in (*row[1].split(","), *row[2].split(",")) if name.strip()]
    assert {name: listed.count(name) for name in RECORD.outcomes} == dict.fromkeys(RECORD.outcomes, 1)


def test_a_type_that_differs_has_a_place_on_the_page_too() -> None:
    broken = Record("0", {**RECORD.outcomes, "llama": Outcome("differs", "LlamaForCausalLM", ("full",), "request 3")})
    assert "## Differs\n\n| types | why |\n|---|---|\n| llama | request 3 |\n" in page_of(broken)


@pytest.mark.skipif(transformers.__version__ != RECORD.transformers, reason=f"recorded with {RECORD.transformers}")
def test_every_type_of_transformers_is_recorded() -> None:
    assert sorted(RECORD.outcomes) == all_types()


def test_no_type_answers_otherwise_without_being_refused() -> None:
    assert {outcome.kind for outcome in RECORD.outcomes.values()} == {"equal", "refused", "not tried"}
    assert all(outcome.reason for outcome in RECORD.outcomes.values() if outcome.kind != "equal")


def test_families_of_other_tests_and_of_reports_are_equal() -> None:
    kinds = {name: RECORD.outcomes[name].kind for name in {*CONFIGS, *MORE, *NAMED} - ONLY_WITHIN_ITS_WINDOW}
    assert kinds == dict.fromkeys(kinds, "equal")


@pytest.mark.skipif(transformers.__version__ != RECORD.transformers, reason=f"recorded with {RECORD.transformers}")
@pytest.mark.parametrize(
    "name",
    [*("laguna", "whisper", "bloom"), *(pytest.param(name, marks=pytest.mark.long) for name in RECORD.outcomes)],
)
def test_what_was_recorded_is_so_still(name: str) -> None:
    outcome, recorded = try_type(name), RECORD.outcomes[name]
    assert outcome.kind == recorded.kind
    if outcome.kind == "equal":
        assert outcome == recorded


def test_an_answer_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the model itself answers otherwise."""

    def other(model: PreTrainedModel, prompts: list[list[int]]) -> list[Reference]:
        answers = reference(model, prompts)
        return [replace(each, token_ids=[*each.token_ids[:-1], each.token_ids[-1] ^ 1]) for each in answers]

    monkeypatch.setattr("tests.engine.family_matrix.trying.reference", other)
    outcome = try_type("llama", MATRIX_CONFIGS[:1])
    assert (outcome.kind, outcome.reason) == ("differs", "request 0, answer 0")
