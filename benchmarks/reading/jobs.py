"""What executes of ``src/pagedkv`` in a few jobs: distinct lines, functions and files, with loops interpreted.

That is how much one reads when stepping through a job with a debugger. Each job is done twice, and the second time is
traced, since the first also builds what is kept. It runs in a process of its own, which finds its package by
``PYTHONPATH``:

    NUMBA_DISABLE_JIT=1 PYTHONPATH=SOURCE python -m benchmarks.reading.jobs

prints it as JSON.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

import httpx
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import pagedkv
from pagedkv import Allocation, BlockSpace, FullAttention, Shortage, SpaceConfig
from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.scheduling import Request, Scheduler, SchedulingConfig
from pagedkv.server import LocalEngine, OpenAccess, ServerConfig, Service, create_app

__all__ = ["JOBS", "Executed", "executed"]

Int32Array: TypeAlias = npt.NDArray[np.int32]

SOURCE: Final = str(Path(pagedkv.__file__).parent)
NUM_TOKENS: Final = 100


@dataclass(slots=True)
class Executed:
    """What was executed.

    Args:
        lines: by file and number; functions: by their code, comprehensions belong to the function around them.
    """

    lines: set[tuple[str, int]] = field(default_factory=set)
    functions: set[CodeType] = field(default_factory=set)

    def note(self, frame: FrameType) -> None:
        """Note the line that a frame executes next."""
        if not frame.f_code.co_name.startswith("<"):
            self.functions.add(frame.f_code)
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))

    @property
    def files(self) -> set[str]:
        """The files in which these lines are."""
        return {file for file, _ in self.lines}


@contextmanager
def executed() -> Iterator[Executed]:
    """Note every line of the package that executes within the block."""
    trace = Executed()

    def enter(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        return note if frame.f_code.co_filename.startswith(SOURCE) else None

    def note(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        if event == "line":
            trace.note(frame)
        return note

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield trace
    finally:
        sys.settrace(before)


def _new_space() -> BlockSpace:
    return BlockSpace(SpaceConfig((FullAttention(),), 1000))


def _prompt(number: int) -> Int32Array:
    return np.arange(number * NUM_TOKENS, (number + 1) * NUM_TOKENS, dtype=np.int32)


def _run(space: BlockSpace) -> None:
    space.acknowledge(space.plan_step().step_id)


def _row_of(answer: Allocation | Shortage) -> int:
    assert isinstance(answer, Allocation)
    return answer.row


def allocate() -> Executed:
    """Allocate a prompt in a space with default settings."""
    space = _new_space()
    space.allocate(_prompt(0))
    with executed() as trace:
        space.allocate(_prompt(1))
    return trace


def allocate_with_a_hit() -> Executed:
    """Allocate a prompt that is cached."""
    space = _new_space()
    for _ in range(2):
        space.allocate(_prompt(0))
        _run(space)
    with executed() as trace:
        answer = space.allocate(_prompt(0))
    assert isinstance(answer, Allocation)
    assert answer.num_hit_tokens
    return trace


def complete_a_block() -> Executed:
    """Append the token that completes a block."""
    space = _new_space()
    rows = [_row_of(space.allocate(_prompt(number)[:63])) for number in range(2)]
    _run(space)
    space.append([rows[0]], [5])
    with executed() as trace:
        space.append([rows[1]], [5])
    return trace


def free() -> Executed:
    """Free a sequence whose blocks are not shared."""
    space = _new_space()
    rows = [_row_of(space.allocate(_prompt(number))) for number in range(2)]
    _run(space)
    space.free(rows[0])
    with executed() as trace:
        space.free(rows[1])
    return trace


def admit_four() -> Executed:
    """Let the scheduler admit four requests, and plan the step that computes their prompts."""
    scheduler = Scheduler(SchedulingConfig(), _new_space())
    _add_four(scheduler, 0)
    scheduler.finish(scheduler.schedule(), np.zeros(4, np.int32))  # they end with their first token
    _add_four(scheduler, 4)
    with executed() as trace:
        assert len(scheduler.schedule().admitted) == 4
    return trace


def _add_four(scheduler: Scheduler, first: int) -> None:
    for number in range(first, first + 4):
        scheduler.add(Request(number, NUM_TOKENS, 1, partial(_load, number)))


def _load(number: int, _num_generated: int) -> Int32Array:
    return _prompt(number)


def _tiny_llm(tokenizer: Any = None) -> LLM:  # noqa: ANN401 - of transformers
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    return LLM(LlamaForCausalLM(config).eval(), EngineConfig(num_blocks=100, self_test=False), tokenizer=tokenizer)


def decode_step() -> Executed:
    """Let the engine decode one token of a request."""
    core = _tiny_llm().core
    core.add(np.arange(20, dtype=np.int32), SamplingParams(max_tokens=8, temperature=0))
    for _ in range(3):
        core.step()
    with executed() as trace:
        core.step()
    return trace


def chat_completion() -> Executed:
    """Let a server answer a conversation with two tokens; its engine runs in a thread of this process."""
    trace, is_on = Executed(), threading.Event()

    def enter(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        return note if frame.f_code.co_filename.startswith(SOURCE) else None

    def note(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        if event == "line" and is_on.is_set():
            trace.note(frame)
        return note

    async def converse(app: Any) -> None:  # noqa: ANN401 - of FastAPI
        body = {"model": "tiny", "messages": [{"role": "user", "content": "7 8 9 " * 12}], "max_tokens": 2}
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://a") as client,
        ):
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                is_on.set()
            is_on.clear()

    threading.settrace(enter)  # threads that begin from now on, the engine's among them
    sys.settrace(enter)
    try:
        vocabulary = {str(number): number for number in range(64)}
        words = Tokenizer(WordLevel(vocabulary, unk_token="0"))  # noqa: S106 - a word
        words.pre_tokenizer = WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        tokenizer.chat_template = "{% for each in messages %}{{ each.content }} {% endfor %}"
        llm = _tiny_llm(tokenizer)
        service = Service(LocalEngine(llm), ServerConfig("tiny"), OpenAccess(), tokenizer=tokenizer)
        asyncio.run(converse(create_app(service)))
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return trace


JOBS: Final[dict[str, Callable[[], Executed]]] = {
    "allocate 100 tokens": allocate,
    "the same, with a hit": allocate_with_a_hit,
    "append that completes a block": complete_a_block,
    "free": free,
    "admit 4 requests": admit_four,
    "a decode step of the engine": decode_step,
    "a chat completion": chat_completion,
}


def main() -> None:
    torch.manual_seed(0)
    results = {name: job() for name, job in JOBS.items()}
    print(json.dumps({name: [len(each.lines), len(each.functions), len(each.files)] for name, each in results.items()}))


if __name__ == "__main__":
    main()
