"""AsyncLLM: many callers, which leave, have deadlines, wait for room, and get errors of failures.

Where a test depends on what happens during a step, a gate is put before the model's pass: the engine's thread signals
its arrival, and waits until the test lets it through.
"""

import asyncio
import gc
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from pagedkv.engine import LLM, AnswerStream, AsyncLLM, RequestOutput, SamplingParams
from pagedkv.engine.async_llm import Close
from pagedkv.engine.outputs import FinishReason
from pagedkv.errors import ConfigurationError, EngineError, QueueFullError, RequestError
from tests.engine.serving import CONFIG, PROMPTS as ALL_PROMPTS, reference

NUM_NEW = 6
PROMPTS = ALL_PROMPTS[:4]
ROOMY = replace(CONFIG, num_blocks=200)
PARAMS = SamplingParams(max_tokens=NUM_NEW)
PATIENCE_S = 300.0


class Gate:
    """Stands before every pass of a model that the engine's thread makes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._arrivals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.num_passes = 0
        self._handle = model.register_forward_pre_hook(lambda *_: self._pass())

    def _pass(self) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # a probe
        self.num_passes += 1
        if not self._is_open:
            self._arrivals.put(None)
            assert self._permits.acquire(timeout=PATIENCE_S)

    async def arrival(self) -> None:
        """Wait until a pass is about to begin."""
        await asyncio.to_thread(self._arrivals.get, timeout=PATIENCE_S)

    def let_through(self) -> None:
        """Let one pass begin."""
        self._permits.release()

    def open(self) -> None:
        """Let this pass begin, and all after it."""
        self._is_open = True
        self._permits.release()

    def remove(self) -> None:
        """Take the gate away."""
        self.open()
        self._handle.remove()


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return it."""
        return self.now


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel) -> list[tuple[int, ...]]:
    return [tuple(each.token_ids) for each in reference(model, PROMPTS, NUM_NEW)]


@pytest.fixture
def llm(model: PreTrainedModel) -> LLM:
    return LLM(model, ROOMY)


@pytest.fixture
def gate(model: PreTrainedModel) -> Iterator[Gate]:
    gate = Gate(model)
    yield gate
    gate.remove()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine, which is not to hang."""
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def reasons(output: RequestOutput) -> list[str | None]:
    return [each.finish_reason for each in output.completions]


def require_nothing_left(llm: LLM) -> None:
    llm.core.space.check()
    assert not llm.core.has_work
    assert llm.core.space.num_live_blocks() == 0


async def listen(stream: AnswerStream) -> tuple[list[int], list[FinishReason | None]]:
    """Collect the outputs of a stream of one answer."""
    tokens: list[int] = []
    ends = []
    async for update in stream:
        tokens += update.token_ids
        ends.append(update.finish_reason)
    return tokens, ends


def test_callers_together_get_what_each_gets_alone(llm: LLM, answers: Sequence[tuple[int, ...]]) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
            heard = await asyncio.gather(*map(listen, streams))
            outputs = await asyncio.gather(*(stream.output() for stream in streams))
        assert [tuple(tokens) for tokens, _ in heard] == [output.token_ids for output in outputs] == answers
        assert all(ends == [None] * (len(ends) - 1) + ["length"] for _, ends in heard)
        assert max(len(ends) for _, ends in heard) == NUM_NEW  # a token at a time

    run(main)
    require_nothing_left(llm)


def test_an_output_can_be_had_without_its_updates(llm: LLM, answers: Sequence[tuple[int, ...]]) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            output = await engine.generate(PROMPTS[0], replace(PARAMS, n=3, temperature=1.0, top_k=1)).output()
            assert [each.token_ids for each in output.completions] == [answers[0]] * 3

    run(main)


def test_a_cancelled_task_ends_its_request_and_no_other(
    llm: LLM, gate: Gate, answers: Sequence[tuple[int, ...]]
) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS[:2]]
            task = asyncio.create_task(streams[0].output())
            await gate.arrival()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            assert (await streams[1].output()).token_ids == answers[1]
            ended = await streams[0].output()
            assert reasons(ended) == ["aborted"]
            assert ended.token_ids == answers[0][: len(ended.token_ids)]
            assert len(ended.token_ids) < NUM_NEW

    run(main)
    require_nothing_left(llm)


@pytest.mark.parametrize("is_closed", [True, False])
def test_who_leaves_a_stream_ends_its_request(llm: LLM, gate: Gate, *, is_closed: bool) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            stream: AnswerStream | None = engine.generate(PROMPTS[0], PARAMS)
            gate.let_through()
            gate.let_through()
            assert stream is not None
            async for _ in stream:
                break
            if is_closed:
                await stream.aclose()
            else:
                stream = None
                gc.collect()
            gate.open()
            await engine.aclose(drain=True)  # which would wait for all the tokens

    run(main)
    require_nothing_left(llm)
    assert gate.num_passes < NUM_NEW


def test_a_deadline_ends_a_request_with_what_it_has(llm: LLM, gate: Gate, answers: Sequence[tuple[int, ...]]) -> None:
    clock = Clock()

    async def main() -> None:
        async with AsyncLLM(llm, clock=clock) as engine:
            late = engine.generate(PROMPTS[2], PARAMS, deadline_s=5.0)
            await gate.arrival()
            other = engine.generate(PROMPTS[1], PARAMS, deadline_s=6.0)
            clock.now = 4.9
            gate.let_through()
            await gate.arrival()
            clock.now = 5.0
            gate.open()
            output = await late.output()
            assert (output.token_ids, reasons(output)) == (answers[2][:2], ["deadline"])
            tokens, ends = await listen(late)
            assert (tuple(tokens), ends[-1]) == (answers[2][:2], "deadline")
            assert reasons(await other.output()) == ["length"]

    run(main)
    require_nothing_left(llm)


def test_who_is_past_its_deadline_at_the_door_has_an_output_too(model: PreTrainedModel, gate: Gate) -> None:
    clock = Clock()
    llm = LLM(model, replace(ROOMY, max_sequences=1))

    async def main() -> None:
        async with AsyncLLM(llm, max_waiting=1, clock=clock) as engine:
            first = engine.generate(PROMPTS[0], PARAMS)
            await gate.arrival()
            second, third = (engine.generate(PROMPTS[1], PARAMS, deadline_s=given) for given in (9.0, 3.0))
            clock.now = 4.0
            gate.let_through()
            output = await third.output()
            assert (output.token_ids, reasons(output)) == ((), ["deadline"])
            await gate.arrival()
            gate.open()
            assert [reasons(await each.output()) for each in (first, second)] == [["length"]] * 2

    run(main)
    require_nothing_left(llm)


def test_a_full_queue_lets_callers_wait_in_their_order(model: PreTrainedModel, gate: Gate) -> None:
    llm = LLM(model, replace(ROOMY, max_sequences=1))

    async def main() -> None:
        async with AsyncLLM(llm, max_waiting=2) as engine:
            streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
            accepted = [asyncio.create_task(stream.accepted()) for stream in streams]
            await gate.arrival()
            gate.let_through()
            await gate.arrival()  # the letters of the step before have come
            await asyncio.sleep(0)
            assert llm.core.scheduler.num_waiting == 2
            assert [task.done() for task in accepted][3:] == [False]
            gate.open()
            outputs = await asyncio.gather(*(stream.output() for stream in streams))
            assert [output.number for output in outputs] == list(range(len(PROMPTS)))
            await asyncio.gather(*accepted)

    run(main)
    require_nothing_left(llm)


def test_a_full_queue_refuses_where_it_was_told_to(model: PreTrainedModel, gate: Gate) -> None:
    llm = LLM(model, replace(ROOMY, max_sequences=1))

    async def main() -> None:
        async with AsyncLLM(llm, max_waiting=1, when_full="refuse") as engine:
            first = engine.generate(PROMPTS[0], PARAMS)
            await gate.arrival()  # it has been admitted
            second, third = (engine.generate(prompt, PARAMS) for prompt in PROMPTS[1:3])
            gate.open()
            with pytest.raises(QueueFullError, match="1 requests wait, and no more may"):
                await third.accepted()
            outputs = await asyncio.gather(first.output(), second.output())
            assert [reasons(output) for output in outputs] == [["length"]] * 2
            again = await engine.generate(PROMPTS[2], PARAMS).output()
            assert reasons(again) == ["length"]

    run(main)


@pytest.mark.parametrize("drain", [False, True])
def test_closing_ends_who_is_under_way_and_draining_serves_them(
    llm: LLM, gate: Gate, answers: Sequence[tuple[int, ...]], *, drain: bool
) -> None:
    async def main() -> None:
        engine = AsyncLLM(llm)
        streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS[:2]]
        await gate.arrival()
        engine._thread.send_if_running(Close(drain))  # before the step is over
        with pytest.raises(EngineError, match="the engine is closed"):  # or draining might never end
            engine.generate(PROMPTS[0])
        gate.open()
        await engine.aclose(drain=drain)
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.generate(PROMPTS[0])
        engine.close()  # again
        for stream, answer in zip(streams, answers, strict=False):
            output = await stream.output()
            assert reasons(output) == (["length"] if drain else ["aborted"])
            assert output.token_ids == answer[: len(output.token_ids)]
            assert (len(output.token_ids) == NUM_NEW) is drain

    run(main)
    require_nothing_left(llm)


def test_who_waits_at_the_door_hears_that_the_engine_is_closed(model: PreTrainedModel, gate: Gate) -> None:
    llm = LLM(model, replace(ROOMY, max_sequences=1))

    async def main() -> None:
        engine = AsyncLLM(llm, max_waiting=1)
        streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS[:3]]
        await gate.arrival()
        gate.open()
        await engine.aclose()
        outcomes = await asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True)
        assert isinstance(outcomes[-1], EngineError | RequestOutput)
        assert all(isinstance(outcome, EngineError | RequestOutput) for outcome in outcomes)

    run(main)
    require_nothing_left(llm)


def test_an_engine_that_fails_tells_everybody(model: PreTrainedModel, gate: Gate) -> None:
    llm = LLM(model, replace(ROOMY, max_sequences=1))

    async def main() -> None:
        async with AsyncLLM(llm, max_waiting=1) as engine:
            streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS[:4]]
            await gate.arrival()
            handle = model.register_forward_pre_hook(
                lambda *_: (_ for _ in ()).throw(AssertionError("a fault of ours"))
            )
            gate.open()
            try:
                for stream in streams:
                    with pytest.raises(EngineError, match="AssertionError: a fault of ours"):
                        await stream.output()
                    with pytest.raises(EngineError, match="AssertionError: a fault of ours"):
                        await listen(stream)
            finally:
                handle.remove()
            with pytest.raises(EngineError, match="AssertionError: a fault of ours"):
                engine.generate(PROMPTS[0])

    run(main)


class Moody:
    """A tokenizer that fails on some texts, and cannot write what it gets."""

    def encode(self, text: str) -> list[int]:
        """Number letters, unless there is an x."""
        if "x" in text:
            raise OSError("no x today")
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Write as many letters."""
        return "y" * len(token_ids)


BAD: dict[str, tuple[Any, SamplingParams, type[Exception], str]] = {
    "empty": ([], PARAMS, RequestError, "empty"),
    "too long": ([1] * 75, PARAMS, RequestError, "more than the 80"),
    "unknown token": ([199], PARAMS, RequestError, "from 0 to 198"),
    "no prompt": (object(), PARAMS, RequestError, "must be a text"),
    "a tokenizer that fails": ("fax", PARAMS, OSError, "no x today"),
}


def test_a_bad_request_is_its_callers_alone(model: PreTrainedModel, answers: Sequence[tuple[int, ...]]) -> None:
    llm = LLM(model, ROOMY, tokenizer=Moody())

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            good = [engine.generate(prompt, PARAMS) for prompt in PROMPTS[:3]]
            bad = [(engine.generate(prompt, params), kind, match) for prompt, params, kind, match in BAD.values()]
            good += [engine.generate(prompt, PARAMS) for prompt in PROMPTS[3:]]
            for stream, kind, match in bad:
                with pytest.raises(kind, match=match):
                    await stream.output()
                with pytest.raises(kind, match=match):
                    await stream.accepted()
            outputs = [await stream.output() for stream in good]
            assert [output.token_ids for output in outputs] == answers
            assert {output.completions[0].text for output in outputs} == {"y" * NUM_NEW}

    run(main)
    require_nothing_left(llm)


def test_a_loop_that_is_gone_takes_its_requests_along(llm: LLM, gate: Gate, answers: Sequence[tuple[int, ...]]) -> None:
    engine = AsyncLLM(llm)
    kept: list[AnswerStream] = []

    async def leave() -> None:
        kept.append(engine.generate(PROMPTS[0], PARAMS))
        await gate.arrival()

    async def ask() -> None:
        stream = engine.generate(PROMPTS[1], PARAMS)
        gate.open()
        assert (await stream.output()).token_ids == answers[1]
        await engine.aclose(drain=True)

    asyncio.run(leave())
    asyncio.run(ask())
    require_nothing_left(llm)
    assert gate.num_passes <= NUM_NEW + 4  # the prompts of both, the tokens of one


@pytest.mark.parametrize("bad", [{"max_waiting": 0}, {"when_full": "explode"}])
def test_settings_that_cannot_work_are_refused(llm: LLM, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        AsyncLLM(llm, **bad)


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(llm: LLM, deadline_s: float) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            with pytest.raises(RequestError, match="deadline_s must be seconds from now"):
                engine.generate(PROMPTS[0], deadline_s=deadline_s)

    run(main)


def test_work_between_steps_is_answered_and_its_fault_is_its_callers_alone(llm: LLM) -> None:
    entered: list[int] = []
    llm.core.on_entered.append(lambda request: entered.append(request.number))

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            stream = engine.generate(PROMPTS[0], PARAMS)
            await stream.accepted()
            numbers = await engine.between_steps(lambda llm: [each.number for each in llm.core.requests])
            assert set(numbers) <= set(entered) == {0}
            with pytest.raises(ZeroDivisionError):
                await engine.between_steps(lambda _: 1 // 0)
            await stream.output()
            assert not await engine.between_steps(lambda llm: len(llm.core.requests))
        with pytest.raises(EngineError, match="closed"):
            await engine.between_steps(lambda _: None)

    run(main)
