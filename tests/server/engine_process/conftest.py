"""Servers of a small random model, whose engine has a process of its own, and the same in one process."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.cli.server_building import Replicas, Serving, applied
from pagedkv.engine import EngineConfig
from pagedkv.server import (
    ApiKeys,
    Caller,
    LocalEngine,
    OpenAccess,
    ServedEngine,
    ServerConfig,
    Service,
)
from pagedkv.server.engine_process import EventEndpoints, ProcessEngine, ProcessSpec
from pagedkv.server.engines import build_engine, tokenizer_of
from tests.server.serving import END_ID, TOKENIZER, VOCABULARY_SIZE, running

CONFIG = EngineConfig(num_blocks=400, max_sequences=8, self_test=False)
LOCAL = "tcp://127.0.0.1:*"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose tokens are bytes."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY_SIZE, max_position_embeddings=4096, eos_token_id=END_ID, **sizes)  # type: ignore[arg-type]
    )
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Args:
        url: its address; engine: in its own process.
    """

    url: str
    engine: ProcessEngine


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[Served]:
    """Run a server whose engine has a process of its own, and publishes its events."""
    spec = ProcessSpec(str(folder), "float32", CONFIG, tool_parser="hermes", events=EventEndpoints(LOCAL, LOCAL, "kv"))
    with ProcessEngine(spec) as engine:
        config = ServerConfig("small", max_waiting=3, tool_parser="hermes")
        with running(Service(engine, config, OpenAccess(), tokenizer=tokenizer_of(str(folder)))) as url:
            yield Served(url, engine)


@pytest.fixture(scope="session")
def local(folder: Path) -> Iterator[str]:
    """Run the same server with the engine in this process; yield its address."""
    llm, tokenizer = build_engine(str(folder), "float32", CONFIG, None)
    config = ServerConfig("small", max_waiting=3, tool_parser="hermes")
    with running(Service(LocalEngine(llm), config, OpenAccess(), tokenizer=tokenizer)) as url:
        yield url


KEYS = ApiKeys(
    {
        hashlib.sha256(name.encode()).hexdigest(): Caller(name, name.encode() * 8, name == "root")
        for name in ("a", "root")
    }
)
"""The tenant "a", and "root", an administrator."""
SHOWN = ServerConfig("small", max_waiting=64)


@dataclass(frozen=True)
class Shown:
    """Two servers with keys and an inspector that shows texts.

    Args:
        url: of the one whose engine has a process of its own; process: that engine.
        local_url: of the one with the engine in this process; local: that engine.
    """

    url: str
    process: ProcessEngine
    local_url: str
    local: LocalEngine

    @property
    def urls(self) -> tuple[str, str]:
        """The addresses of both."""
        return self.url, self.local_url


@pytest.fixture(scope="session")
def shown(folder: Path) -> Iterator[Shown]:
    """Run two servers, built as the command builds them, that differ only in the place of their engine."""
    with ExitStack() as stack:

        def built(*, has_own_process: bool) -> tuple[str, ServedEngine]:
            serving = Serving(str(folder), "float32", CONFIG, SHOWN, KEYS, has_own_process=has_own_process)
            app, service = stack.enter_context(applied(serving, Replicas(), inspects=True, has_texts=True))
            return stack.enter_context(running(service, app)), service.engine

        (url, process), (local_url, local) = (built(has_own_process=place) for place in (True, False))
        assert isinstance(process, ProcessEngine)
        assert isinstance(local, LocalEngine)
        yield Shown(url, process, local_url, local)
