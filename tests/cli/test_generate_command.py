"""``pagedkv generate``: answers, figures, comparison with dense, and what bad input gets."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from pagedkv.cli import generating
from pagedkv.engine.self_test import DenseAnswer, ask_dense
from tests.cli.command import run, start
from tests.engine.families import make_model
from tests.engine.serving import PROMPTS, reference
from tests.engine.words import UNKNOWN, make_tokenizer

PATIENCE_S = 300
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
POOL = ("--num-blocks", 200, "--block-size", 4, "--max-tokens", 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, with a tokenizer of numbers as words."""
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    words = {UNKNOWN: 0, **{f"w{number}": number for number in range(1, 150)}, "user": 150}
    make_tokenizer(words, TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": list(prompt)}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_answers_are_the_models_own(folder: Path, lines: Path, tmp_path: Path) -> None:
    output, result = tmp_path / "answers.jsonl", tmp_path / "result.json"
    ended = run(
        "generate", "--model", folder, "--input", lines, *POOL, "--verify", "--output", output, "--json", result
    )
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert "tokens a second" in ended.stdout
    assert "hit ratio by token" in ended.stdout
    assert "loaded from tier" not in ended.stdout
    assert re.search(r"GiB, at most \d+ of 199 blocks in use", ended.stdout)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    by_place = {row["index"]: row for row in rows}
    expected = reference(make_model("llama"), PROMPTS, 6)
    for place, answer in enumerate(expected):
        assert by_place[place]["where"] == f"{lines}:{place + 1}"
        found = by_place[place]["completions"][0]
        assert found["token_ids"][: answer.num_certain] == answer.token_ids[: answer.num_certain]
    document = json.loads(result.read_text())
    assert [row["index"] for row in document["outputs"]] == list(range(len(PROMPTS)))
    figures = document["figures"]
    assert figures["num_finished"] == figures["num_prompts"] == len(PROMPTS)
    assert figures["num_generated_tokens"] == 6 * len(PROMPTS)
    assert figures["num_prompt_tokens"] == sum(map(len, PROMPTS))
    assert figures["hit_ratio"] == figures["num_cached_tokens"] / figures["num_prompt_tokens"]
    assert 0 < figures["peak_used_blocks"] <= figures["num_blocks"] == 199
    assert document["verification"]["num_answers"] == len(PROMPTS)
    assert document["verification"]["num_certain_tokens"] > 0.9 * figures["num_generated_tokens"]


def test_guesses_change_no_answer_and_are_counted(folder: Path) -> None:
    ask = ("generate", "--model", folder, "--prompt", "w7 " * 17, *POOL, "--max-tokens", 40)
    plain, guessed = (run(*ask, *more, "--json", "-") for more in ((), ("--lookup", 4, "--verify")))
    assert (guessed.exit_code, guessed.stderr) == (0, "")
    answers = [json.loads(each.stdout)["outputs"][0]["completions"] for each in (plain, guessed)]
    assert answers[0] == answers[1]
    none, figures = (json.loads(each.stdout)["figures"] for each in (plain, guessed))
    assert (none["num_drafted_tokens"], none["acceptance"]) == (0, None)
    assert 0 < figures["num_accepted_tokens"] < figures["num_drafted_tokens"]
    assert figures["acceptance"] == figures["num_accepted_tokens"] / figures["num_drafted_tokens"]
    assert "guesses that were right" in run(*ask, "--lookup", 4).stdout
    assert "guesses that were right" not in run(*ask).stdout


def test_a_draft_model_changes_no_answer(folder: Path) -> None:
    ask = ("generate", "--model", folder, "--prompt", "w7 w8", *POOL, "--max-tokens", 20)
    plain, guessed = (run(*ask, *more, "--json", "-") for more in ((), ("--draft-model", folder, "--draft-tokens", 3)))
    assert (guessed.exit_code, guessed.stderr) == (0, "")
    answers = [json.loads(each.stdout)["outputs"][0]["completions"] for each in (plain, guessed)]
    assert answers[0] == answers[1]
    figures = json.loads(guessed.stdout)["figures"]
    assert figures["num_accepted_tokens"] == figures["num_drafted_tokens"] > 0
    assert figures["num_steps"] < json.loads(plain.stdout)["figures"]["num_steps"]


def test_prompts_are_texts_and_talks_and_ask_for_themselves(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"w5 w6"\n\n{"prompt": "w5 w6", "n": 2, "max_tokens": 3, "temperature": 1, "top_k": 1}\n'
        '{"messages": [{"role": "user", "content": "w5"}]}\n'
    )
    ended = run("generate", "--model", folder, "--prompt", "w5", "--chat", "--input", path, *POOL, "--json", "-")
    assert (ended.exit_code, ended.stderr) == (0, "")
    outputs = json.loads(ended.stdout)["outputs"]
    assert [each["prompt_token_ids"] for each in outputs] == [[150, 5], [5, 6], [5, 6], [150, 5]]
    assert [len(each["completions"]) for each in outputs] == [1, 1, 2, 1]
    assert outputs[2]["completions"][1]["token_ids"] == outputs[1]["completions"][0]["token_ids"][:3]
    assert outputs[3]["completions"] == outputs[0]["completions"]
    assert outputs[0]["completions"][0]["text"].startswith("w") or UNKNOWN in outputs[0]["completions"][0]["text"]


def test_a_folder_keeps_what_was_computed_for_the_next_call(folder: Path, tmp_path: Path) -> None:
    ask = ("generate", "--model", folder, "--prompt", "w7 w9 w3 " * 40, *POOL, "--tier", f"folder:{tmp_path}:16MiB")
    first, second = (json.loads(run(*ask, "--verify", "--json", "-").stdout) for _ in range(2))
    assert [each["figures"]["num_cached_tokens"] for each in (first, second)] == [0, 96]
    assert second["outputs"][0]["completions"] == first["outputs"][0]["completions"]
    assert second["outputs"][0]["num_loaded_tokens"] == second["figures"]["num_loaded_tokens"] == {"folder": 96}
    assert second["outputs"][0]["receipt"]["hits_by_medium"] == {"device": 0, "folder": 96}
    assert first["figures"]["num_loaded_tokens"] == {"folder": 0}
    assert second["outputs"][0]["tier_notes"][0]["cause"] == "loaded"
    shown = [line.split() for line in run(*ask).stdout.splitlines()]
    assert ["hits", "loaded", "from", "tier", "folder", "96", "tokens"] in shown
    wrong = run(*ask, "--tier", "disk:1GiB")
    assert wrong.exit_code == 2
    assert "a tier is host:SIZE, folder:PATH:SIZE, or a URL" in wrong.stderr
    scanned = json.loads(run(*ask, "--tier-rescan", "0.5", "--json", "-").stdout)
    assert scanned["outputs"][0]["num_loaded_tokens"] == {"folder": 96}
    wrong = run(*ask, "--tier-rescan", "-1")
    assert (wrong.exit_code, "--tier-rescan must be at least 0, got -1" in wrong.stderr) == (2, True)
    wrong = run("generate", "--model", folder, "--prompt", "w7", "--tier", "host:1MiB", "--tier-rescan", "5")
    assert (wrong.exit_code, "--tier-rescan needs a --tier that other processes may share" in wrong.stderr) == (2, True)


def test_tiers_write_through_a_codec_and_a_lossy_one_is_not_verified(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    ask = ("generate", "--model", folder, "--prompt", "w7 w9 w3 " * 40, *POOL, "--tier", f"folder:{tmp_path}:16MiB")
    for codec in ("zstd", f"aes-gcm:file:{key}", "fp8-e4m3"):
        more = ("--tier-codec", codec, "--tier-admission", "before-eviction", "--json", "-")
        loaded = [json.loads(run(*ask, *more).stdout)["figures"]["num_loaded_tokens"] for _ in range(2)]
        assert loaded == [{"folder": 0}, {"folder": 96}], codec
    refused = {
        ("--tier-codec", "fp8-e4m3", "--verify"): "which --tier-codec fp8-e4m3 changes",
        ("--tier-codec", "lz4"): "a codec is none, zstd",
        ("--tier-admission", "never"): "admission must be one of",
    }
    for options, told in refused.items():
        wrong = run(*ask, *options)
        assert (wrong.exit_code, told in " ".join(wrong.stderr.split())) == (2, True), wrong.stderr
    for option, value in (("--tier-codec", "zstd"), ("--tier-admission", "always")):
        wrong = run("generate", "--model", folder, "--prompt", "w7", option, value)
        assert (wrong.exit_code, f"{option} needs a --tier" in wrong.stderr) == (2, True)


def test_an_answer_that_differs_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where the model itself is made to say something else."""

    def lie(*arguments: Any) -> DenseAnswer:  # noqa: ANN401 - as they are
        answer = ask_dense(*arguments)
        return DenseAnswer((*answer.token_ids[:2], answer.token_ids[2] + 1, *answer.token_ids[3:]), answer.num_certain)

    monkeypatch.setattr("pagedkv.cli.generating.ask_dense", lie)
    ended = run("generate", "--model", folder, "--prompt", "w5 w6 w7", *POOL, "--verify")
    assert ended.exit_code == 1
    (line,) = ended.stderr.splitlines()
    assert "1 of 1 answers differ from the model's own" in line
    assert "answer 0 to prompt 0, at token 2" in line


BROKEN = {
    "no JSON": ('{"prompt": "w1"}\n{"prompt": \n', ":2: is no JSON"),
    "two prompts": ('{"prompt": "w1", "token_ids": [1]}', ":1: has prompt, token_ids"),
    "no prompt": ('\n{"text": "w1"}', ":2: has no prompt"),
    "a number": ("17", ":1: is '17'"),
    "a prompt that is none": ('{"prompt": 5}', ':1: "prompt" is 5'),
    "a strange wish": ('{"prompt": "w1", "beams": 5}', ":1: has unknown fields: beams"),
    "a wish that cannot be": ('{"prompt": "w1", "max_tokens": 0}', ":1: max_tokens must be at least 1, got 0"),
    "an empty file": ("\n", ": has no prompt"),
    "an empty prompt": ('"w1"\n{"token_ids": []}', ":2: a prompt needs at least one token"),
    "a long prompt": (f'"w1"\n{{"token_ids": {[5] * 510}}}', ":2: a prompt of 510 tokens and 6 new"),
    "an unknown token": ('{"token_ids": [1, 199]}', ":1: token ids must be from 0 to 198, got 199"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_is_named(folder: Path, tmp_path: Path, what: str) -> None:
    text, message = BROKEN[what]
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    ended = run("generate", "--model", folder, "--input", path, *POOL, "--output", tmp_path / "out.jsonl")
    assert (ended.exit_code, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"pagedkv: {path}{message}")
    assert not (tmp_path / "out.jsonl").exists()


def test_what_cannot_be_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "never_heard_of"}')
    ask = ("generate", "--prompt", "w1")
    for arguments, message in (
        (("generate", "--model", folder), "there is no prompt: give --prompt TEXT, or --input FILE"),
        ((*ask, "--model", tmp_path / "gone"), "gone' is no folder: name one with a config.json"),
        ((*ask, "--model", tmp_path / "empty"), "is a folder without a config.json"),
        ((*ask, "--model", tmp_path / "strange"), "strange' cannot be run: "),
        ((*ask, "--model", tmp_path / "encoder"), "encoder' cannot be "),
        ((*ask, "--model", folder, "--dtype", "int3"), "--dtype must be one of float32"),
        ((*ask, "--model", folder, "--memory", 1_000_000), "--memory 1,000,000.00 GiB is more than the"),
        ((*ask, "--model", folder, "--memory", 0), "--memory must be over 0"),
        ((*ask, "--model", folder, "--num-blocks", 1), ""),
        ((*ask, "--model", folder, "--lookup", -1), "num_tokens of a lookup"),
        ((*ask, "--model", folder, "--draft-tokens", 2), "--draft-tokens needs --draft-model"),
        ((*ask, "--model", folder, "--draft-model", tmp_path / "gone"), "gone' is no folder"),
        ((*ask, "--model", folder, "--draft-model", folder, "--lookup", 2), "a draft model and --lookup both guess"),
        ((*ask, "--model", folder, "--draft-model", folder, "--draft-tokens", 65), "--draft-tokens must be at most 64"),
        (
            (*ask, "--model", folder, "--num-blocks", 4, "--samples", 9, "--temperature", 1),
            "--prompt 1: a prompt of 1 tokens with 9",
        ),
        ((*ask, "--model", folder, "--prompt", ""), "--prompt 2: a prompt needs at least one token"),
        ((*ask, "--model", folder, "--max-tokens", 600), "--prompt 1: a prompt of 1 tokens and 600 new ones"),
        ((*ask, "--model", folder, "--verify", "--temperature", 1), "--verify compares the most likely tokens"),
        ((*ask, "--model", folder, "--input", tmp_path / "no.jsonl"), "no.jsonl: cannot be read"),
        ((*ask, "--model", folder, "--output", "-", "--json", "-"), "--output and --json both go to -"),
        ((*ask, "--model", folder, "--output", tmp_path / "no" / "x"), "there is no folder"),
    ):
        ended = run(*arguments)
        assert (ended.exit_code, ended.stdout) == (2, ""), arguments
        (line,) = ended.stderr.splitlines()
        assert line.startswith("pagedkv: "), arguments
        assert message in line, arguments


def test_a_model_that_is_not_supported_is_refused_with_its_reason(tmp_path: Path) -> None:
    make_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}).save_pretrained(
        tmp_path
    )
    ended = run("generate", "--model", tmp_path, "--prompt", "w1")
    assert (ended.exit_code, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "rope_type is 'dynamic'" in line
    assert "Set rope_type to 'default'" in line


def test_too_little_memory_at_the_start_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes")

    monkeypatch.setattr(generating, "LLM", refuse)
    ended = run("generate", "--model", folder, "--prompt", "w1")
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == ["pagedkv: not enough memory: use fewer or smaller blocks, or fewer sequences"]


def test_the_help_has_examples() -> None:
    shown = run("generate", "--help").stdout
    assert "pagedkv generate --model ./my-llama --prompt" in shown
    assert "--verify" in shown


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_signal_ends_with_the_results_so_far(number: signal.Signals, code: int, folder: Path, tmp_path: Path) -> None:
    """The first answer, which is short, says that the others, which take hours, are under way."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"token_ids": [5], "max_tokens": 1}] + [
        {"token_ids": [7], "max_tokens": 400, "n": 8, "temperature": 1}
    ] * 200
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tmp_path / "result.json"
    process = start("generate", "--model", folder, "--input", path, "--output", "-", "--json", result)
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert first["index"] == 0
    rest = [json.loads(line) for line in stdout.splitlines()]
    assert sorted(row["index"] for row in rest) == list(range(1, 201))
    assert rest[0]["completions"][0]["finish_reason"] == "aborted"
    assert 0 < len(rest[0]["completions"][0]["token_ids"]) < 400
    (line,) = stderr.decode().splitlines()
    assert line.startswith("pagedkv: interrupted: 1 of 201 prompts are answered")
    figures = json.loads(result.read_text())["figures"]
    assert (figures["num_finished"], figures["is_interrupted"]) == (1, True)


def test_the_demonstrations_model_has_a_name() -> None:
    prompt = "red kite: locker 7. blue lamp: shelf 12. Where? red kite:"
    ended = run("generate", "--model", "demo", "--prompt", prompt, "--max-tokens", 3, "--json", "-")
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["outputs"][0]["completions"][0]["text"] == "locker 7."
