"""Serve the demonstration's questions from too little memory.

The KV memory holds a third of the documents. So prefixes are hit and evicted, prompts are computed in chunks, and
sequences are forked. When forks begin to write and no block is free, the last running request is preempted: it is
swapped out, or recomputed if its prompt was not complete or the host pool is full.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Final, TypeAlias

from pagedkv.contract.answers import Allocation
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.engine import compat
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.demo.facts import ANSWER_LENGTH
from pagedkv.engine.demo.meter import Measured, Meter
from pagedkv.engine.demo.questions import Question, draw_questions
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.llm import LLM
from pagedkv.engine.records import StepRecord
from pagedkv.engine.sampling import SamplingParams
from pagedkv.space import BlockSpace

__all__ = ["DEMO_CONFIG", "Answer", "Served", "Watch", "compile_loops", "serve"]

DEMO_CONFIG: Final = EngineConfig(
    block_size=16,
    num_blocks=200,
    num_host_blocks=60,
    max_sequences=48,
    max_batched_tokens=512,
    max_tokens=512,
    preemption="swap",
    warm_up=False,
)
"""3,184 tokens of memory, for documents of 361 to 481 tokens each, and requests little longer.

:func:`compile_loops` compiles the loops that the demonstration runs, about half of an engine's.
"""

MOST_WAITING: Final = 64

Answer: TypeAlias = tuple[int, ...]

Watch: TypeAlias = Callable[[StepRecord, int], None]
"""Called with each step's record, and the number of answered questions."""


@dataclass(frozen=True, slots=True)
class Served:
    """The answers of a run, and its measurements.

    Args:
        answers: the tokens of each question's answers, in the questions' order.
        seconds: time of the whole run.
        num_prompt_tokens: tokens of all prompts; num_hit_tokens: those of them that hit.
        num_generated: tokens of all answers.
        measured: the meter's measurements.
    """

    answers: Sequence[Sequence[Answer]]
    seconds: float
    num_prompt_tokens: int
    num_hit_tokens: int
    num_generated: int
    measured: Measured

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' tokens that hit."""
        return self.num_hit_tokens / self.num_prompt_tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and answers a second, hits included."""
        return (self.num_prompt_tokens + self.num_generated) / self.seconds

    def as_dict(self) -> dict[str, object]:
        """Return all numbers for JSON, without the answers."""
        return {
            "seconds": self.seconds,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_hit_tokens": self.num_hit_tokens,
            "hit_ratio": self.hit_ratio,
            "num_generated": self.num_generated,
            "tokens_per_second": self.tokens_per_second,
            **asdict(self.measured),
        }


def serve(llm: LLM, questions: Sequence[Question], watch: Watch | None = None) -> Served:
    """Answer questions in order. The next one arrives whenever fewer than 64 requests wait.

    Raises:
        RequestError: a question does not fit the engine's memory, even alone.
    """
    begin, meter = perf_counter(), Meter(llm.core)
    coming, requests, num_finished = deque(questions), list[EngineRequest](), 0
    while coming or llm.core.has_work:
        while coming and llm.core.scheduler.num_waiting < MOST_WAITING:
            requests += _submit(llm, coming.popleft())
        record = llm.step()
        meter.note(record)
        num_finished += record.num_finished
        if watch is not None:
            watch(record, num_finished)
    seconds = perf_counter() - begin
    answers = [[each.token_ids for each in request.output().completions] for request in requests]
    return Served(
        answers=answers,
        seconds=seconds,
        num_prompt_tokens=sum(len(question.prompt) for question in questions),
        num_hit_tokens=sum(request.num_cached_tokens or 0 for request in requests),
        num_generated=sum(len(answer) for each in answers for answer in each),
        measured=meter.measured(),
    )


def compile_loops(model: compat.Model) -> None:
    """Serve a few questions on an engine of its own, so that the loops are compiled before anything is timed."""
    config = replace(DEMO_CONFIG, num_blocks=64, num_host_blocks=40, self_test=False)
    serve(LLM(model, config), draw_questions(12, 2, seed=0))
    _complete_a_block_twice()


def _complete_a_block_twice() -> None:
    """Have two forks compute a block of equal content, which the few questions of :func:`compile_loops` may not do."""
    space = BlockSpace(SpaceConfig((FullAttention(block_size=2),), 8, eviction=DEMO_CONFIG.eviction, explain=True))
    first = space.allocate([1])
    assert isinstance(first, Allocation), f"an empty space has no room for a token: {first}"
    space.acknowledge(space.plan_step().step_id)
    rows = [first.row, *space.fork(first.row)]
    space.append(rows, [2, 2])
    space.acknowledge(space.plan_step().step_id)


def _submit(llm: LLM, question: Question) -> list[EngineRequest]:
    params = SamplingParams(max_tokens=ANSWER_LENGTH)
    if question.num_answers > 1:  # several answers must be drawn; with top_k=1 all are the most likely tokens
        params = replace(params, n=question.num_answers, temperature=1.0, top_k=1)
    return llm.submit([question.prompt.tolist()], params)
