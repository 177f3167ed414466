"""Drives one space: calls its methods, writes what came of each call, and keeps what is needed for the next ones.

:mod:`benchmarks.side_by_side.operations` draws the calls. What is kept here of sequences comes from the answers of the
space, and suffices to draw calls that mostly succeed. It proves nothing.

Prompts continue the beginnings of earlier ones with few different tokens, so that they share prefixes, leave one
another inside and at the ends of blocks, and hit what is cached, evicted or still to be computed.
"""

import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TextIO, TypeAlias

from benchmarks.side_by_side.lives import FEW_EVENTS, MOST_PROMPT, Life
from benchmarks.side_by_side.observing import plain, state_of
from benchmarks.side_by_side.tally import BROKEN, DONE, MET
from pagedkv import (
    Allocation,
    BlockSpace,
    Load,
    MediaSpan,
    PagedKVError,
    PrefixGone,
    PrefixHit,
    Receipt,
    RequestKeys,
    Shortage,
    StepPlan,
    Ticket,
)

__all__ = ["NO_KEYS", "LifeOverError", "Options", "Player", "Prompt", "Sequence", "is_done"]

Prompt: TypeAlias = tuple[list[int], RequestKeys]
Options: TypeAlias = dict[str, Any]
"""Arguments by keyword."""

NO_KEYS: Final = RequestKeys()
KEYS: Final = (
    NO_KEYS,
    RequestKeys(salt=b"a"),
    RequestKeys(lora_name="a"),
    RequestKeys(lora_name="a", lora_version="2"),
    RequestKeys(media=(MediaSpan(1, 3, b"x"),)),
    RequestKeys(media=(MediaSpan(2, 3, b"x"), MediaSpan(9, 6, b"y"))),
    RequestKeys(salt=b"a", media=(MediaSpan(1, 3, b"y"),)),
)
NUM_TOKENS: Final = 3
"""Different tokens: few, so that prompts which go on otherwise soon meet again."""
MOST_PROMPTS: Final = 24
MOST_ANSWERS: Final = 8
MOST_LOOKAHEAD: Final = 4


class LifeOverError(Exception):
    """A call raised what is no error of ours: what the space holds now is anybody's guess."""


@dataclass(eq=False)
class Sequence:
    """A live row.

    Args:
        row: its number; keys: its extra keys.
        known: its tokens as far as they are known, drafts among them; num_draft: how many of the last are drafts.
        status: "running", "swapped" or "lost".
    """

    row: int
    keys: RequestKeys
    known: list[int]
    num_draft: int = 0
    status: str = "running"


class Player:
    """One space, and what its caller has learnt from its answers.

    Args:
        life: which space; out: where each call is written, as a line of JSON.
    """

    def __init__(self, life: Life, out: TextIO) -> None:
        self.mix = life.mix
        self.random = life.random()
        self.config = life.config(self.random)
        self.space = BlockSpace(self.config)
        self.tally: Counter[str] = Counter()
        self.now_s = self.epoch = 0
        self.sequences: dict[int, Sequence] = {}
        self.prompts: deque[Prompt] = deque([([], NO_KEYS)], MOST_PROMPTS)
        self.matches: deque[tuple[Prompt, PrefixHit]] = deque(maxlen=MOST_ANSWERS)
        self.ended: deque[tuple[Prompt, Receipt]] = deque(maxlen=MOST_ANSWERS)
        self.in_flight: deque[StepPlan] = deque()
        self.loads: list[Load] = []
        self.tickets: list[Ticket] = []
        self.num_calls = 0
        self._life = life
        self._out = out

    # Drawing

    def chance(self, probability: float) -> bool:
        """Draw whether something happens, with this probability."""
        return self.random.random() < probability

    def tokens(self, most: int, least: int = 0) -> list[int]:
        """Draw some tokens."""
        return self.random.choices(range(NUM_TOKENS), k=self.random.randint(least, most))

    def prompt(self) -> Prompt:
        """Continue the beginning of a prompt seen before, or all of it, mostly with its extra keys."""
        tokens, keys = self.random.choice(self.prompts)
        cut = len(tokens) if self.chance(0.5) else self.random.randint(0, MOST_PROMPT)
        new = [*tokens[:cut], *self.tokens(8)][:MOST_PROMPT] or [0]
        return new, keys if self.chance(0.85) else self.random.choice(KEYS)

    def some(self, among: list[Sequence], most: int = 3) -> list[Sequence]:
        """Draw a few different sequences, in any order."""
        return self.random.sample(among, min(len(among), self.random.randint(1, most)))

    def lookahead(self) -> Options:
        """Draw slots to be reserved: mostly none."""
        count = self.random.choice((0, 0, 0, 0, 1, MOST_LOOKAHEAD))
        return {"num_lookahead": count} if count else {}

    def tenant(self) -> Options:
        """Draw the tenant to be charged, where there are tenants."""
        return {"tenant": self.mix.tenant(self.random.randrange(3))} if self.mix.tenants else {}

    # Sequences

    def of(self, status: str) -> list[Sequence]:
        """List the sequences that are running, swapped or lost."""
        return [each for each in self.sequences.values() if each.status == status]

    def length(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence, known or not."""
        return self.space.num_tokens(sequence.row)

    def room(self, sequence: Sequence) -> int:
        """Count the tokens by which a sequence may grow."""
        return self.config.max_tokens - self.length(sequence)

    def known(self) -> list[Sequence]:
        """List the running sequences whose tokens are all known."""
        return [each for each in self.of("running") if self.length(each) == len(each.known)]

    def unknown(self) -> list[Sequence]:
        """List the running sequences of which some tokens wait for a sample."""
        return [each for each in self.of("running") if self.length(each) > len(each.known)]

    def lose(self, rows: tuple[int, ...]) -> None:
        """Note that rows are lost."""
        for row in rows:
            self.sequences[row].status = "lost"

    # Calls

    def call(self, verb: str, *arguments: Any, kind: str = "", **options: Any) -> Any:  # noqa: ANN401 - any method's
        """Call a method of the space, and write the call, its result, and the visible state of the space after it.

        Args:
            verb, arguments, options: the method, and what it is given.
            kind: by what name it is counted; the method's when empty.

        Returns the answer, or the error that it raised.

        Raises:
            LifeOverError: it raised what is no error of ours.
        """
        asked = json.dumps([verb, *arguments, options], default=plain)
        answer = _attempt(getattr(self.space, verb), *arguments, **options)
        state = _attempt(state_of, self.space, drain=self.config.max_events > FEW_EVENTS)
        record = [self._life.number, self.num_calls, asked, answer, state]
        self._out.write(json.dumps(record, default=plain) + "\n")
        self.num_calls += 1
        self.tally[f"{kind or verb}: {_outcome(answer)}"] += 1
        self.tally.update(_met(answer))
        if _is_broken(answer) or isinstance(state, Exception):
            raise LifeOverError
        return answer


def _attempt(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - any method's
    """Give a method's answer, or what it raised: whatever that is, the other package has to raise it as well."""
    try:
        return method(*arguments, **options)
    except Exception as error:  # noqa: BLE001 - see above
        return error


def is_done(answer: object) -> bool:
    """Return whether an operation was carried out: it raised nothing, and returned no shortage."""
    return not isinstance(answer, Exception | Shortage | PrefixGone)


def _is_broken(answer: object) -> bool:
    return isinstance(answer, Exception) and not isinstance(answer, PagedKVError)


def _outcome(answer: object) -> str:
    """Name what came of a call."""
    if isinstance(answer, Exception):
        return BROKEN if _is_broken(answer) else "error"
    return DONE if is_done(answer) else "shortage"


def _met(answer: object) -> dict[str, int]:
    """Count what an answer shows to have happened, so that a run can show what it has met."""
    match answer:
        case Allocation():
            return {f"{MET}: hits": answer.num_hit_tokens > 0, f"{MET}: hit tokens": answer.num_hit_tokens}
        case PrefixHit():
            return {
                f"{MET}: replays": answer.num_replayed > 0,
                f"{MET}: hits inside blocks": len(answer.tails) > 0,
                f"{MET}: junctions": answer.junction > 0,
            }
        case StepPlan():
            moves = (*answer.swaps_out, *answer.swaps_in)
            return {
                f"{MET}: copied blocks": sum(len(each.src_ids) for each in answer.copies),
                f"{MET}: swapped blocks": sum(len(each.src_ids) for each in moves),
            }
    return {}
