"""The demonstration's run: its language, documents and questions; serving, measuring and checking the answers.

The language has one token a word. A fact is a thing and its place, ``red kite: locker 7.``, in five tokens: two of the
thing, two of the place, a full stop. The token of a thing's noun includes the colon, so that the answer directly
follows the thing in the question. Places cannot be guessed, since they are drawn anew for every document: a right
answer was read from the document. Documents and questions are drawn by seed::

    <bos> red kite: locker 7. tiny drum: attic 31. ...  Where? tiny drum:      ->  attic 31.
    `----------------- a document -------------------'  `-- question -'          `- answer

A document has each thing at most once. Questions about one document share it as a prefix. Documents differ in length.
Most questions about a document come in one stretch of time, and some much later, so that prefixes are hit, evicted and
computed again. Some requests ask for several answers, which are forks of one prompt.

The KV memory holds a third of the documents, so prompts are computed in chunks, and sequences are forked. When forks
begin to write and no block is free, the last running request is preempted: it is swapped out, or recomputed if its
prompt was not complete or the host pool is full.

Waste is the share of slots without a token. It is measured after every step, over the block tables of sequences, where
a shared block counts once for each of them, and over the blocks in use, each counted once. For comparison the meter
also counts the slots that a reservation of ``max_tokens`` for each sequence would take. Answers are compared with the
facts, and with dense generation: 64 padded prompts at a time, in contiguous caches, without blocks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Final, TypeAlias, final

import numpy as np
import torch

from pagedkv.contract.answers import Allocation
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.core import EngineCore
from pagedkv.engine.llm import LLM
from pagedkv.engine.outputs import StepRecord
from pagedkv.engine.request import EngineRequest
from pagedkv.engine.sampling import SamplingParams
from pagedkv.errors import ConfigurationError
from pagedkv.probe import compat
from pagedkv.space import BlockSpace

NOTHING_HELD: Final = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a run.

    Args:
        num_steps: steps of the engine.
        num_chunked: prompts that were computed over several steps; num_forked: answers that began as forks.
        num_swapped, num_recomputed: preemptions by kind.
        num_evictions: cached blocks that were evicted.
        most_waste: the largest share, after any step, of slots without a token in the tables of running sequences.
        most_waste_of_blocks: the same share of the blocks in use, each counted once.
        reserved_ratio: slots of a reservation of ``max_tokens`` for each sequence, over slots of blocks in use; both
            summed over the steps.
    """

    num_steps: int
    num_chunked: int
    num_forked: int
    num_swapped: int
    num_recomputed: int
    num_evictions: int
    most_waste: float
    most_waste_of_blocks: float
    reserved_ratio: float


@final
class Meter:
    """Measures an engine, and does not change it.

    Args:
        core: the engine.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_steps = self._num_swapped = self._num_recomputed = 0
        self._chunked: set[int] = set()
        self._forked: dict[int, int] = {}
        self._most_waste = self._most_waste_of_blocks = NOTHING_HELD
        self._num_reserved = self._num_held = 0

    def note(self, record: StepRecord) -> None:
        """Add the measurements of a step; to be called after every step. O(running sequences)."""
        self._num_steps += 1
        self._num_swapped += record.num_swapped_out
        self._num_recomputed += record.num_recomputed
        for request in self._core.scheduler.running:
            if request.num_unscheduled:
                self._chunked.add(request.number)
            if len(request.rows) > 1:
                self._forked[request.number] = request.num_sequences - 1
        self._note_memory()

    def measured(self) -> Measured:
        """Return the measurements so far."""
        return Measured(
            num_steps=self._num_steps,
            num_chunked=len(self._chunked),
            num_forked=sum(self._forked.values()),
            num_swapped=self._num_swapped,
            num_recomputed=self._num_recomputed,
            num_evictions=sum(pool.num_evictions for pool in self._core.space.statistics().pools),
            most_waste=self._most_waste,
            most_waste_of_blocks=self._most_waste_of_blocks,
            reserved_ratio=self._num_reserved / max(1, self._num_held),
        )

    def _note_memory(self) -> None:
        space = self._core.space
        rows = [row for request in self._core.scheduler.running for row in request.rows]
        if not rows:
            return
        block_size = space.block_size()
        lengths, num_blocks = space.lengths(rows), space.num_blocks(rows)
        empty = num_blocks * block_size - lengths
        self._most_waste = max(self._most_waste, float(empty.sum() / (num_blocks.sum() * block_size)))
        # Empty slots are in a sequence's last block, which forks share until one of them writes.
        tails = space.block_table()[rows, num_blocks - 1]
        num_empty = sum(dict(zip(tails.tolist(), empty.tolist(), strict=True)).values())
        num_held = space.num_live_blocks() * block_size
        self._most_waste_of_blocks = max(self._most_waste_of_blocks, num_empty / num_held)
        self._num_reserved += len(rows) * space.config.max_tokens
        self._num_held += num_held


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


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One request.

    Args:
        prompt: int32 ``[tokens]``, a document and the question.
        answer: int32 ``[3]``, the right answer.
        num_answers: number of answers; all must be equal, since the most likely tokens are chosen.
    """

    prompt: Int32Array
    answer: Int32Array
    num_answers: int


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


LEAST_RIGHT: Final = 0.98
"""Least share of right answers that passes."""
BATCH_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class Judged:
    """Counts of right answers, and the speed of dense generation.

    Args:
        num_answers: answers in all.
        num_right: answers that equal the fact in the document.
        num_same: answers that equal those of dense generation, token for token.
        seconds: time of dense generation, which answers each question once.
        num_tokens: tokens of its prompts and answers, without padding.
    """

    num_answers: int
    num_right: int
    num_same: int
    seconds: float
    num_tokens: int

    @property
    def accuracy(self) -> float:
        """Share of answers that are right."""
        return self.num_right / self.num_answers

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and answers a second, of dense generation."""
        return self.num_tokens / self.seconds

    @property
    def failings(self) -> list[str]:
        """A sentence for each condition that is not met; empty if all are."""
        failings = []
        if self.accuracy < LEAST_RIGHT:
            failings.append(f"{self.accuracy:.2%} of the answers are right, where {LEAST_RIGHT:.0%} must be")
        if self.num_same < self.num_answers:
            num_other = self.num_answers - self.num_same
            failings.append(f"{num_other:,} of {self.num_answers:,} answers are not those of dense generation")
        return failings

    def as_dict(self) -> dict[str, object]:
        """Return all numbers for JSON."""
        return {
            "num_answers": self.num_answers,
            "num_right": self.num_right,
            "accuracy": self.accuracy,
            "num_same_as_dense": self.num_same,
            "dense_seconds": self.seconds,
            "dense_tokens_per_second": self.tokens_per_second,
        }


def judge(model: compat.Model, questions: Sequence[Question], served: Served) -> Judged:
    """Compare all answers with the documents, and with dense generation, which is timed."""
    begin = perf_counter()
    dense = answer_densely(model, questions)
    seconds = perf_counter() - begin
    expected = zip(served.answers, questions, dense, strict=True)
    compared = [(answer, question, same) for answers, question, same in expected for answer in answers]
    return Judged(
        num_answers=len(compared),
        num_right=sum(answer == tuple(question.answer.tolist()) for answer, question, _ in compared),
        num_same=sum(answer == same for answer, _, same in compared),
        seconds=seconds,
        num_tokens=sum(len(question.prompt) + ANSWER_LENGTH for question in questions),
    )


def answer_densely(model: compat.Model, questions: Sequence[Question]) -> list[Answer]:
    """Answer each question once with ``generate`` of transformers, in padded batches."""
    answers: list[Answer] = []
    for first in range(0, len(questions), BATCH_SIZE):
        prompts = [torch.from_numpy(each.prompt).long() for each in questions[first : first + BATCH_SIZE]]
        answers += map(tuple, compat.generate_padded(model, prompts, ANSWER_LENGTH))
    return answers


SPECIAL: Final = ("<pad>", "<bos>", "<eos>", ".", "Where?")
BOS: Final = 1
EOS: Final = 2
FULL_STOP: Final = 3
QUESTION: Final = 4
_ADJECTIVES: Final = """
    red blue green grey black white brown pink amber ivory silver golden copper rusty shiny dusty wooden woollen paper
    glass leather velvet cotton rubber old new small large tiny huge round square long short heavy light soft hard warm
    cold dry wet clean stained striped spotted plain painted carved folded broken mended spare borrowed foreign local
    quiet noisy narrow wide curved straight sharp
""".split()
_NOUNS: Final = """
    kite lamp drum rope kettle ladder bucket basket bottle button needle hammer saddle pillow blanket carpet curtain
    mirror candle lantern compass anchor paddle whistle trumpet violin guitar piano flute bell clock watch ring crown
    mask glove scarf jacket boot sandal belt purse wallet satchel suitcase trunk barrel crate jar bowl plate cup spoon
    fork knife pan pot oven stove broom brush mop sponge towel razor comb scissors thimble spool loom wheel axle gear
    spring hinge latch lock bolt nail screw wrench pliers chisel saw drill file anvil bellows shovel rake hoe plough
    sickle scythe net hook reel sail mast oar canoe raft sled ski skate racket ball bat puck dart arrow bow quiver
    shield helmet lance banner flag map globe atlas ledger
""".split()
_PLACES: Final = """
    locker shelf drawer cabinet closet attic cellar garage shed barn tent wagon office kitchen hallway balcony
""".split()
NUM_NUMBERS: Final = 64
VOCABULARY: Final = (
    *SPECIAL,
    *_ADJECTIVES,
    *(f"{noun}:" for noun in _NOUNS),
    *_PLACES,
    *(str(number) for number in range(NUM_NUMBERS)),
)
VOCABULARY_SIZE: Final = 288
"""Vocabulary of the model: a multiple of 32, whose last ids are not used."""
ADJECTIVES: Final = range(len(SPECIAL), len(SPECIAL) + len(_ADJECTIVES))
NOUNS: Final = range(ADJECTIVES.stop, ADJECTIVES.stop + len(_NOUNS))
PLACES: Final = range(NOUNS.stop, NOUNS.stop + len(_PLACES))
NUMBERS: Final = range(PLACES.stop, PLACES.stop + NUM_NUMBERS)


def decode(token_ids: Iterable[int]) -> str:
    """Write tokens as text, a space between words. Raises IndexError for ids beyond the vocabulary."""
    return " ".join(VOCABULARY[token] for token in token_ids).replace(" .", ".")


def encode(text: str) -> list[int]:
    """Read text as :func:`decode` writes it. Raises KeyError with the word that is not in the vocabulary."""
    ids = {word: token for token, word in enumerate(VOCABULARY)}
    return [ids[word] for word in text.replace(".", " .").split()]


FACT_LENGTH = 5
QUESTION_LENGTH = 3
ANSWER_LENGTH = 3


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Args:
        facts: int32 ``[facts, 5]``: adjective, noun, place, number, full stop.
    """

    facts: Int32Array

    def tokens(self) -> Int32Array:
        """Return the tokens of the document: int32 ``[1 + 5 x facts]``."""
        return np.concatenate([[BOS], self.facts.ravel()]).astype(np.int32)

    def question(self, fact: int) -> Int32Array:
        """Return the question about the place of one fact: int32 ``[3]``."""
        return np.array([QUESTION, *self.facts[fact, :2]], np.int32)

    def answer(self, fact: int) -> Int32Array:
        """Return the right answer to the question about one fact: int32 ``[3]``: place, number, full stop."""
        return self.facts[fact, 2:]


def draw_document(generator: np.random.Generator, num_facts: int) -> Document:
    """Draw a document of ``num_facts`` facts. Raises ValueError if there are fewer things than facts."""
    things = generator.choice(len(ADJECTIVES) * len(NOUNS), num_facts, replace=False)
    columns = (
        ADJECTIVES.start + things // len(NOUNS),
        NOUNS.start + things % len(NOUNS),
        generator.integers(PLACES.start, PLACES.stop, num_facts),
        generator.integers(NUMBERS.start, NUMBERS.stop, num_facts),
        np.full(num_facts, FULL_STOP),
    )
    return Document(np.stack(columns, axis=1).astype(np.int32))


SHORTEST: Final = 72
"""Fewest facts of a document: from 364 tokens on, a partly filled block of 16 tokens wastes less than 4%."""
LONGEST: Final = 96
"""Most facts of a document: four fifths of what the model was trained for."""
DOCUMENTS_AT_ONCE: Final = 4
SHARE_OF_LATE: Final = 0.2
"""Share of questions that are about any document, at any time."""
FORK_EVERY: Final = 4
NUM_FORKED_ANSWERS: Final = 4


def draw_questions(num_questions: int, num_documents: int, seed: int) -> list[Question]:
    """Draw questions in order of arrival; every fourth asks for four answers.

    Raises:
        ConfigurationError: a number below 1.
    """
    if min(num_questions, num_documents) < 1:
        raise ConfigurationError(f"{num_questions} questions about {num_documents} documents: draw at least 1 of each")
    generator = np.random.default_rng(seed)
    documents = [draw_document(generator, int(generator.integers(SHORTEST, LONGEST + 1))) for _ in range(num_documents)]
    questions = []
    for number in range(num_questions):
        document = documents[_choose(generator, number / num_questions, num_documents)]
        num_answers = 1 if (number + 1) % FORK_EVERY else NUM_FORKED_ANSWERS
        questions.append(_ask(document, generator, num_answers))
    return questions


def _choose(generator: np.random.Generator, progress: float, num_documents: int) -> int:
    """Choose a document: mostly one of the few of this stretch of time, sometimes any."""
    if generator.random() < SHARE_OF_LATE:
        return int(generator.integers(num_documents))
    first = int(progress * num_documents)
    return (first + int(generator.integers(DOCUMENTS_AT_ONCE))) % num_documents


def _ask(document: Document, generator: np.random.Generator, num_answers: int) -> Question:
    fact = int(generator.integers(len(document.facts)))
    prompt = np.concatenate([document.tokens(), document.question(fact)])
    return Question(prompt, document.answer(fact), num_answers)
