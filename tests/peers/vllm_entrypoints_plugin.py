"""A pytest plugin under which vLLM's own tests of its HTTP server run, as they are, against ``pagedkv serve``.

It is loaded into a process of its own (:mod:`.test_vllm_entrypoints`), in which ``tests`` is vLLM's folder, so it
imports nothing of ours. It stands in for `tests.utils`: a server that their tests start is ours, with a random Llama
under the name that they ask for. What they ask the hub for lies in a folder in the hub's form.
"""

import contextlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

import anthropic
import openai
import pytest
import requests
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm.model_executor.model_loader import weight_utils

HUB: Final = Path(os.environ["HF_HOME"]) / "hub"
REVISION: Final = "0" * 40
KEY: Final = "token-abc123"
"""What their clients send where a server takes any key."""
START_S: Final = 900
OK: Final = 200
VALUED: Final = {
    "--served-model-name": "--served-model-name",
    "--tool-call-parser": "--tool-call-parser",
    "--reasoning-parser": "--reasoning-parser",
    "--chat-template": "--chat-template",
    "--root-path": "--root-path",
    "--api-key": "--api-key",
    "--max-model-len": "--max-length",
    "--max_model_len": "--max-length",
    "--max-num-seqs": "--max-sequences",
    "--port": "--port",
}
"""Their options with a value that ours have too, and ours; others choose how vLLM computes, and are left out."""
FLAGS: Final = frozenset(
    {"--enable-force-include-usage", "--enable-tokenizer-info-endpoint", "--return-tokens-as-token-ids"}
)
"""Their options without a value that ours has too."""
ADAPTERS: Final = "--lora-modules"
CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
WIDTH: Final = 64
POSITIONS: Final = 16_384
NUM_TEXTS: Final = 60
ADAPTERS_NAMED_OTHERWISE: Final = frozenset({"charent/self_cognition_Alice"})
NUM_TOKENS: Final = 8_000
"""Tokens of the vocabulary: their tests ask for some by id."""


def make_model(folder: Path, texts: Sequence[Path]) -> None:
    """Write a random Llama with a byte-level tokenizer, whose answers end after some tokens.

    Args:
        folder: to write into; texts: what the tokenizer is trained on.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train([str(text) for text in texts], trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet))
    bpe.add_special_tokens([*SPECIAL])  # behind all others
    named = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **named)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = CHATML
    tokenizer.model_max_length = POSITIONS
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    line_end = tokenizer.convert_tokens_to_ids("Ċ")
    with torch.no_grad():  # one coordinate is the same for all tokens: by it the end is likelier than others
        model.lm_head.weight.normal_(std=0.3)
        model.model.embed_tokens.weight[:, 0] = 0.02
        model.model.embed_tokens.weight[:, 1] = 0
        model.model.embed_tokens.weight[line_end, 1] = 0.05  # as a prompt of a chat ends: no answer is empty
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:2] = 0
            layer.mlp.down_proj.weight[:2] = 0
        model.lm_head.weight[end, 0] = 4.0
        model.lm_head.weight[end, 1] = -10.0
    model.save_pretrained(folder)


def make_adapter(folder: Path, model: str) -> None:
    """Write a random adapter for that model, in PEFT's form."""
    folder.mkdir(parents=True)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": 8, "lora_alpha": 16,
        "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    draw = torch.Generator().manual_seed(len(str(folder)))
    tensors = {}
    for layer in range(2):
        for name, width in (("q_proj", WIDTH), ("v_proj", WIDTH // 2)):
            head = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{head}.lora_A.weight"] = torch.randn(8, WIDTH, generator=draw) * 0.1
            tensors[f"{head}.lora_B.weight"] = torch.randn(width, 8, generator=draw) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")


def snapshot(name: str) -> Path:
    """Return where the hub's cache keeps a repository."""
    return HUB / f"models--{name.replace('/', '--')}" / "snapshots" / REVISION


def provide(name: str, make: Callable[[Path], None]) -> None:
    """Put a repository into the hub's cache, unless it is there."""
    folder = snapshot(name)
    if folder.exists():
        return
    refs = folder.parents[1] / "refs"
    refs.mkdir(parents=True, exist_ok=True)
    (refs / "main").write_text(REVISION)
    folder.parent.mkdir(parents=True, exist_ok=True)
    make(folder)


class RemoteServer:
    """Stands in for their `RemoteOpenAIServer`: starts ours, and ends it.

    Args:
        model: the name, or a folder.
        arguments: of ``vllm serve``; those that ours knows are handed on.
        env_dict: further variables of its environment.
    """

    num_started = 0

    def __init__(
        self, model: str, arguments: Sequence[str] = (), *, env_dict: dict[str, str] | None = None, **_more: object
    ) -> None:
        type(self).num_started += 1
        self.host, self.port, self.uds = "127.0.0.1", _free_port(), None
        self.show_hidden_metrics = False
        keys = ["--api-key", env_dict["VLLM_API_KEY"]] if env_dict and "VLLM_API_KEY" in env_dict else []
        given, adapters = _translated([*arguments, *keys])
        folder = Path(model) if Path(model).is_dir() else snapshot(model)
        names = [] if "--served-model-name" in given else ["--served-model-name", model]
        command = [
            *(os.environ["PAGEDKV_PYTHON"], "-m", "pagedkv", "serve", str(folder), "--host", self.host),
            *([] if "--port" in given else ["--port", str(self.port)]),
            *names,
            *given,
            *(part for each in adapters for part in ("--lora", each)),
        ]
        if "--port" in given:
            self.port = int(given[given.index("--port") + 1])
        environment = {**os.environ, **(env_dict or {}), "PYTHONPATH": os.environ["PAGEDKV_SOURCE"]}
        with Path(os.environ["PAGEDKV_SERVER_LOG"]).open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            self.proc = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self) -> None:
        for _ in range(START_S * 4):
            if self.proc.poll() is not None:
                raise RuntimeError(f"pagedkv serve ended with {self.proc.returncode}: see its log")
            with contextlib.suppress(OSError):
                if requests.get(self.url_for("health"), timeout=5).status_code == OK:
                    return
            time.sleep(0.25)
        raise RuntimeError("pagedkv serve did not begin")

    def __enter__(self) -> Self:
        """Return itself: it runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the server."""
        self.proc.terminate()
        try:
            self.proc.wait(40)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self) -> str:
        """The server's address."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """Return the address of a path."""
        return "/".join((self.url_root, *(part.strip("/") for part in parts if part)))

    DUMMY_API_KEY = KEY

    def get_client(self, **options: Any) -> openai.OpenAI:  # noqa: ANN401 - of the client
        """Return OpenAI's client of the server."""
        return openai.OpenAI(base_url=self.url_for("v1"), **_client_options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:  # noqa: ANN401 - of the client
        """Return OpenAI's asynchronous client of the server."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **_client_options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:  # noqa: ANN401 - of the client
        """Return Anthropic's client of the server."""
        return anthropic.Anthropic(base_url=self.url_root, **_client_options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:  # noqa: ANN401 - of the client
        """Return Anthropic's asynchronous client of the server."""
        return anthropic.AsyncAnthropic(base_url=self.url_root, **_client_options(options))


def _client_options(options: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": KEY, "max_retries": 0, "timeout": 600, **options}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _translated(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of ours, and the adapters as ``name=path``."""
    given: dict[str, list[str]] = {}
    adapters: list[str] = []
    flags: list[str] = []
    place = 0
    while place < len(arguments):
        name, _, joined = arguments[place].partition("=")
        place += 1
        values = [joined] if joined else []
        while place < len(arguments) and not arguments[place].startswith("--"):
            values.append(arguments[place])
            place += 1
        if name in VALUED and values:
            given[VALUED[name]] = values
        elif name == ADAPTERS:
            adapters += [_adapter(each) for each in values]
        elif name in FLAGS:
            flags.append(name)
    options = [part for name, values in given.items() for value in values for part in (name, value)]
    return [*options, *flags], adapters


def _adapter(each: str) -> str:
    if not each.startswith("{"):
        return each
    read = json.loads(each)
    return f"{read['name']}={read['path']}"


NAMED: Final = re.compile(r'"([\w.-]+/[\w.-]+)"')
ADAPTED: Final = "lora"


def provide_all(files: Sequence[str]) -> None:
    """Put what their files name into the hub's cache: the model, or an adapter of it.

    Args:
        files: of theirs, from the folder of the distribution, as pytest gets them.
    """
    home, vllm = HUB.parent, Path(os.environ["PAGEDKV_VLLM"])
    if not (home / "model").exists():
        make_model(home / "model", sorted((vllm / "docs").rglob("*.md"))[:NUM_TEXTS])
    sources = [*map(Path, files), vllm / "tests" / "entrypoints" / "conftest.py"]
    for name in {name for source in sources for name in NAMED.findall(source.read_text())}:
        if ADAPTED in name.lower() or name in ADAPTERS_NAMED_OTHERWISE:
            provide(name, lambda folder: make_adapter(folder, "model"))
        else:
            provide(name, lambda folder: folder.symlink_to(home / "model"))


def pytest_configure(config: pytest.Config) -> None:
    """Put the stand-in in the place of their module before any of their tests is imported."""
    provide_all([file.partition("::")[0] for file in config.args])
    utils = ModuleType("tests.utils")
    on_gpus = pytest.mark.skip(reason="needs GPUs")
    vars(utils).update(
        RemoteOpenAIServer=RemoteServer,
        VLLM_PATH=Path(os.environ["PAGEDKV_VLLM"]),
        ROCM_EXTRA_ARGS=[],
        ROCM_ENGINE_KWARGS={},
        multi_gpu_only=lambda **_: on_gpus,
        requires_fp8=on_gpus,
    )
    sys.modules["tests.utils"] = utils
    assets = ModuleType("tests.conftest")
    vars(assets)["LocalAssetServer"] = object  # of tests with images
    sys.modules["tests.conftest"] = assets
    looked_for = ModuleType("gpt_oss")  # one file looks whether it is there, and calls nothing of it
    looked_for.__spec__ = ModuleSpec("gpt_oss", None)
    sys.modules["gpt_oss"] = looked_for
    weight_utils.download_weights_from_hf = lambda name, **_: str(snapshot(name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what asks no server: it tests classes of vLLM."""
    asks = [item for item in items if _asks_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asks])
    items[:] = asks


def _asks_a_server(item: pytest.Item) -> bool:
    """Whether a test has a fixture that starts a server, or starts one itself."""
    assert isinstance(item, pytest.Function)
    definitions = [d for each in item._fixtureinfo.name2fixturedefs.values() for d in each]
    sources = [item.function, *(d.func for d in definitions)]
    return any("RemoteOpenAIServer(" in _source(each) for each in sources)


def _source(function: Any) -> str:  # noqa: ANN401 - of a test or a fixture
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Note what became of each case, a line of JSON each."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        path = item.nodeid.partition("entrypoints/")[2] or item.nodeid
        why = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        line = {"case": path, "outcome": report.outcome, "when": report.when, "why": why[:2000]}
        with Path(os.environ["PAGEDKV_OUTCOMES"]).open("a") as out:
            out.write(json.dumps(line) + "\n")
