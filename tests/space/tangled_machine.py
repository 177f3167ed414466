"""A state machine for rows that are tangled: they hit one another's blocks while these are still to be computed.

All prompts of a tangle are beginnings of one text, so that each continues the others; they are admitted, grown and
forked within one open step, in pools with room for all, and leave it in any order. What a row holds may then be
computed by any of several others, or be cached, or be a duplicate: errors in the choice of the computing row show here.

One rule draws a *tangle*: prompts that are computed first, actions that tie rows to one another in the open step,
actions by which they part, and what becomes of the steps. Short lists on few rows find more than long ones, and shrink
to the actions that matter. It is the only rule, since a run of which some rules are left out is no tangle.
"""

from collections import Counter
from typing import Final, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from pagedkv.contract.keys import NO_KEYS
from tests.space.mixes import Mix
from tests.space.operations import Prompt, Sabotage, SpaceOperations
from tests.space.sequence_model import ModelSequence

__all__ = ["Action", "TangledMachine", "tangled_machine_of"]

NUM_TEXTS: Final = 6
LENGTH: Final = 40
OTHER: Final = NUM_TEXTS * LENGTH  # a token that is in no text
MOST_IN_FLIGHT: Final = 3
NUM_PARTS: Final = 6  # of an aborted step, that may have been carried out: from none to all five
NUM_VACANT: Final = 4  # rows that a tangle finds vacant


class Action(NamedTuple):
    """Something that happens to one row, or to a new one.

    Args:
        verb: the method that does it.
        place: which of the running rows, counted from the latest; what happens to rows together, happens to later ones
            as well.
        num_tokens: how many tokens; the verb defines their use.
    """

    verb: str
    place: int
    num_tokens: int


NUM_TOKENS: Final = st.integers(1, 14)
TYING: Final = ("admit", "grow", "draft", "fork", "branch")
TOGETHER: Final = ("leave together", "swap together", "return together")
PARTING: Final = (
    *("leave",) * 3,
    "admit",
    "grow",
    "try",
    "redraft",
    "swap",
    "roll back",
    "return",
    "declare",
    "plan",
    "branch",
    *TOGETHER,
)
STEPPING: Final = ("plan", "run", "acknowledge", "abort")


def actions(verbs: tuple[str, ...]) -> st.SearchStrategy[list[Action]]:
    """Draw a few actions, of certain verbs."""
    return st.lists(st.builds(Action, st.sampled_from(verbs), st.integers(0, 2), NUM_TOKENS), min_size=1, max_size=6)


def text_of(number: int) -> tuple[int, ...]:
    """One of the texts."""
    return tuple(range(number * LENGTH, (number + 1) * LENGTH))


def continuation(tokens: list[int], num_tokens: int) -> list[int]:
    """So many tokens that follow a beginning of a text; other ones, if it is none."""
    text = text_of(tokens[0] // LENGTH)
    follows = text[len(tokens) :] if text[: len(tokens)] == tuple(tokens) else (OTHER,) * LENGTH
    return list(follows[:num_tokens])


class TangledMachine(SpaceOperations):
    """Draws tangles."""

    @initialize(size=st.sampled_from((0, 5)))
    def build(self, size: int) -> None:
        """Build a space, with either eviction policy."""
        self.build_space(size)

    @rule(
        text=st.integers(0, NUM_TEXTS - 1),
        computed=st.tuples(st.integers(0, 14), st.integers(0, 3)),
        tied=actions(TYING),
        parted=actions(PARTING),
        stepped=actions(STEPPING),
        settled=st.booleans(),
    )
    def tangle(  # noqa: PLR0913 - one draw for each part of a tangle
        self,
        text: int,
        computed: tuple[int, int],
        tied: list[Action],
        parted: list[Action],
        stepped: list[Action],
        *,
        settled: bool,
    ) -> None:
        """Compute a long and a short beginning of a text; then let rows tie themselves to one another, and part."""
        self.text = text_of(text)
        oldest = list(self.model.sequences.values())
        surplus = oldest[: max(0, NUM_VACANT - self.model.num_vacant)]
        if surplus:
            self.free_rows(surplus)
            self._look()
        for num_tokens in filter(None, computed):
            self.allocate_prompt(self._beginning(num_tokens))
            self._look()
        if any(computed):
            self.settle()
            self._look()
        if self.mix.replays:
            self.lose_windows()
        for action in (*tied, *parted, *([] if settled else stepped)):
            self._act(action)
            self._look()
            self.seen["tangled steps"] += 1
        if settled:
            self.settle()

    def _look(self) -> None:
        """All counts agree, and what explains misses has seen what was dropped."""
        self.model.check()
        self.explaining.follow(self.history[-1])

    def _beginning(self, num_tokens: int) -> Prompt:
        return self.text[:num_tokens], NO_KEYS

    def _act(self, action: Action) -> None:
        """Carry one action out, if there is a row or a step for it."""
        among = self.model.running
        if action.verb in {"return", "return together"}:
            among = self.model.swapped
        elif action.verb in {"try", "redraft"}:
            among = self._drafting
        if action.verb in STEPPING:
            self._step(action)
        elif action.verb == "admit":
            self._admit(action)
        elif among:
            place = len(among) - 1 - action.place % len(among)
            if action.verb in TOGETHER:
                self._act_together(among[place:], action)
            else:
                self._act_on(among[place], action)

    def _step(self, action: Action) -> None:
        """Plan a step, or let one in flight run, be over or fail."""
        in_flight = self.model.in_flight
        match action.verb:
            case "plan" if len(in_flight) < MOST_IN_FLIGHT:
                self.plan_step()
            case "run" if self.model.planned:
                self.run_step()
            case "acknowledge" if self.model.ran:
                self.acknowledge_step()
            case "abort" if in_flight:
                garbage = action.num_tokens % 2 > 0
                self.abort_step(action.place % len(in_flight), action.num_tokens % NUM_PARTS, garbage=garbage)

    def _admit(self, action: Action) -> None:
        """Admit a beginning of the text: of so many tokens, or as long as a row and a little more."""
        running = self.model.running
        num_tokens = action.num_tokens
        if action.place < len(running):
            num_tokens = len(running[-1 - action.place].tokens) + num_tokens % 3
        prompt = self._beginning(min(num_tokens, LENGTH))
        self.allocate_prompt(prompt, tenant=self.mix.tenant(action.num_tokens))

    def _act_together(self, rows: list[ModelSequence], action: Action) -> None:
        match action.verb:
            case "leave together":
                self.free_rows(rows)
            case "swap together" if self.model.host_pools:
                self.swap_rows_out(rows)
            case "return together":
                self.swap_rows_in(rows, [1] * len(rows))

    def _act_on(self, row: ModelSequence, action: Action) -> None:
        match action.verb:
            case "grow":
                self.append_tokens([row], [continuation(row.tokens, action.num_tokens)])
            case "draft" | "redraft" | "try":
                self._draft(row, action)
            case "fork":
                self.fork_row(row, 1)
            case "branch" if self.model.num_vacant and len(row.tokens) > 1:
                self.branch_row(row, 1, max(1, len(row.tokens) - action.num_tokens))
            case "leave":
                self.free_rows([row])
            case "swap" if self.model.host_pools:
                self.swap_rows_out([row])
            case "return":
                self.swap_rows_in([row], [1])
            case "roll back":
                self.truncate_rows([row], [max(1, len(row.tokens) - action.num_tokens)])
            case "declare":
                self.declare_computed([row])

    @property
    def _drafting(self) -> list[ModelSequence]:
        """Rows that have drafts of which no plan computes any."""
        return [row for row in self.model.running if len(row.tokens) > row.num_accepted >= row.num_planned]

    def _draft(self, row: ModelSequence, action: Action) -> None:
        """Append tokens, half of them drafts; let a fork accept them, and end; or give unplanned ones other ids."""
        if action.verb == "draft":
            new = continuation(row.tokens, action.num_tokens)
            self.append_tokens([row], [new], num_drafts=((len(new) + 1) // 2,))
        elif action.verb == "try" and self.model.num_vacant:
            self.fork_row(row, 1)
            if (fork := self.model.running[-1]) is not row:
                self.append_tokens([fork], [continuation(fork.tokens, 1)])
                self.free_rows([fork])
        elif action.verb == "redraft":
            num_drafts = min(len(row.tokens) - row.num_accepted, action.num_tokens)
            self.replace_drafts([row], [[OTHER] * num_drafts])


def tangled_machine_of(mix: Mix, seen: Counter[str], sabotage: Sabotage | None = None) -> type[TangledMachine]:
    """Make the class of machines for one mix, as Hypothesis wants it: without arguments."""

    class Machine(TangledMachine):
        def __init__(self) -> None:
            super().__init__(mix.roomy, seen, sabotage)

    return Machine
