"""Sequences as plain lists, and the groups' rules in plain positions: what a block space has to get right.

Written from the documentation of :mod:`pagedkv.contract.spec`; nothing here is taken from the core.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.spec import ChunkedLocal, CrossAttention, FullAttention, GroupSpec, RecurrentState, SlidingWindow

__all__ = ["GroupRule", "ModelSequence", "Prefixes", "Replayed", "Status"]


class Prefixes:
    """Numbers for prefixes: two prefixes have one number exactly when tokens and extra keys are all equal."""

    def __init__(self) -> None:
        """Start with the empty prefix, 0."""
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def follow(self, prefix: int, item: Hashable) -> int:
        """Number of the prefix that continues ``prefix`` by one item."""
        return self._numbers.setdefault((prefix, item), len(self._numbers) + 1)

    def root(self, keys: RequestKeys, generation: int) -> int:
        """Number of a request's prefix before its first token.

        Args:
            keys: the request's keys; what holds for all its tokens goes in here.
            generation: how often the cache was reset before the request: nothing older may hit.
        """
        adapter = None if keys.lora_name is None else (keys.lora_name, keys.lora_version)
        return self.follow(0, (generation, adapter, keys.salt))

    def extend(self, prefix: int, keys: RequestKeys, start: int, tokens: Iterable[int]) -> list[int]:
        """Numbers of the prefixes that end with each of ``tokens``, the first of which is at position ``start``."""
        numbers = []
        for position, token in enumerate(tokens, start):
            media = tuple(
                (span.digest, position - span.start)
                for span in keys.media
                if span.start <= position < span.start + span.num_tokens
            )
            prefix = self.follow(prefix, (token, media))
            numbers.append(prefix)
        return numbers


class Status(Enum):
    """Where a sequence is."""

    RUNNING = "running"
    SWAPPED = "swapped out"
    LOST = "lost in an aborted step"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the replay of a sequence's windows leaves (:mod:`tests.space.replay_model`).

    Args:
        ident: its number; start: the first position computed again.
        inexact: by window group, positions that hold something else than their prefix.
        sure: by window group, the first position of the blocks that the sequence may go back to.
    """

    ident: int
    start: int
    inexact: Mapping[int, range]
    sure: Mapping[int, int]


@dataclass(eq=False, slots=True)
class ModelSequence:
    """One live sequence.

    Args:
        row: its row.
        keys: its extra keys.
        prefixes: number of the prefix that ends at each position.
        tokens: its tokens.
        num_accepted: leading tokens that are no drafts.
        num_planned: leading tokens that a plan computes or has computed, or that were hit.
        sure_from: from here on it computes itself what is in no plan yet; others may compute what is before.
        planned_outside, sure_outside: the same in groups that stay out of prefix caching, where nothing is hit.
        planned_replayed, sure_replayed: the same in windows that can be computed again.
        replay: what its replay left, if it had one.
        is_planned: whether a plan saw it whole; before, what it hit may fall to it to compute.
        marked_steps: steps in flight when it was declared computed: aborting these does not concern it.
        tables: its block ids, one list a group, as the space returned them last.
        slots: the blocks of its draft states, one list a group, empty where the group keeps none.
        status: where it is; lost sequences stay ``on_host`` or not as they were.
        is_sharer: whether it began with blocks of another sequence.
        generation: how often the cache had been reset when it began.
        last_step: the last step whose plan computes anything for it.
        era: grows whenever the sequence does anything but grow.
        first_epoch: the epoch of the weights in force when it began; num_hit: tokens that it hit then; oldest_hit: the
            oldest weights that were found to have contributed to these.
        tenant: the tenant that its blocks are charged to.
        is_plain: no token of it was removed, so that its epochs can be compared exactly.
    """

    row: int
    keys: RequestKeys
    root: int
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_planned: int = 0
    sure_from: int = 0
    planned_outside: int = 0
    sure_outside: int = 0
    planned_replayed: int = 0
    sure_replayed: int = 0
    replay: Replayed | None = None
    is_planned: bool = False
    marked_steps: set[int] = field(default_factory=set)
    tables: list[list[int]] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    status: Status = Status.RUNNING
    on_host: bool = False
    is_sharer: bool = False
    generation: int = 0
    last_step: int = 0
    era: int = 0
    first_epoch: int = 0
    num_hit: int = 0
    oldest_hit: int = 2**31
    is_plain: bool = True
    tenant: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether an aborted step left its memory undefined."""
        return self.status is Status.LOST

    def extend(self, numbers: Prefixes, tokens: list[int], num_draft: int = 0) -> None:
        """Append tokens, the last ``num_draft`` of them guesses; all earlier ones are accepted thereby."""
        if not tokens:
            return
        last = self.prefixes[-1] if self.prefixes else self.root
        self.prefixes += numbers.extend(last, self.keys, len(self.tokens), tokens)
        self.tokens += tokens
        self.num_accepted = len(self.tokens) - num_draft

    def redraft(self, numbers: Prefixes, drafts: list[int]) -> None:
        """Replace the last drafts."""
        first, num_draft = len(self.tokens) - len(drafts), len(self.tokens) - self.num_accepted
        self.tokens, self.prefixes = self.tokens[:first], self.prefixes[:first]
        self.extend(numbers, drafts, min(num_draft, len(drafts)))
        self.num_accepted = len(self.tokens) - num_draft

    def cut(self, length: int) -> None:
        """Remove the tokens from ``length`` on; what remains is accepted."""
        self.era += length < len(self.tokens)
        self.is_plain &= length == len(self.tokens)
        self.tokens = self.tokens[:length]
        self.prefixes = self.prefixes[:length]
        self.num_accepted = length
        self.num_planned = min(self.num_planned, length)
        self.sure_from = min(self.sure_from, length)
        self.planned_outside = min(self.planned_outside, length)
        self.sure_outside = min(self.sure_outside, length)
        self.planned_replayed = min(self.planned_replayed, length)
        self.sure_replayed = min(self.sure_replayed, length)

    def plan_all(self) -> None:
        """Nothing is left that is in no plan."""
        self.num_planned = self.sure_from = self.planned_outside = self.sure_outside = len(self.tokens)
        self.planned_replayed = self.sure_replayed = len(self.tokens)

    def planned_in(self, group: "GroupRule") -> int:
        """Leading tokens that a plan computes or has computed in a group, or that were hit there."""
        if group.replays:
            return self.planned_replayed
        return self.planned_outside if group.stays_out else self.num_planned

    def sure_in(self, group: "GroupRule") -> int:
        """From where on it computes itself, in a group, what is in no plan yet."""
        if group.replays:
            return self.sure_replayed
        return self.sure_outside if group.stays_out else self.sure_from

    def is_inexact(self, group: "GroupRule", position: int) -> bool:
        """Whether a position holds something else than its prefix in a group, since a replay computed it."""
        return self.replay is not None and group.replays and position in self.replay.inexact[group.index]

    def number(self, group: "GroupRule", position: int, prefix: int) -> int:
        """What stands for a position in a group: its prefix, or what a replay made of it."""
        if self.replay is None or not self.is_inexact(group, position):
            return prefix
        return -2 - 64 * self.replay.ident - position

    def is_beyond_replay(self, group: "GroupRule", length: int) -> bool:
        """Whether a position reads nothing in a group that a replay left aside, or inexact for others."""
        if self.replay is None or not group.replays:
            return True
        return group.kept_blocks(length) * group.block_size >= self.replay.sure[group.index]

    def is_replaying(self, group: "GroupRule") -> bool:
        """Whether it holds anything that a replay left inexact for others."""
        if self.replay is None or not group.replays:
            return False
        first = -(-group.num_sink_tokens // group.block_size)
        return any(self.tables[group.index][first : self.replay.sure[group.index] // group.block_size])

    def sure_blocks(self, group: "GroupRule", table: list[int]) -> list[int]:
        """A table without the blocks that a replay left inexact."""
        if self.replay is None or not group.replays:
            return table
        first, stop = -(-group.num_sink_tokens // group.block_size), self.replay.sure[group.index] // group.block_size
        return [0 if first <= index < stop else block for index, block in enumerate(table)]

    def forked_replay(self, child: "ModelSequence") -> None:
        """A fork holds what the replay has left."""
        child.replay = self.replay
        child.planned_replayed = min(self.planned_replayed, len(child.tokens))
        child.sure_replayed = len(child.tokens)


class GroupRule:
    """One group's retention rule, spelled out in positions.

    Attributes:
        index: position among the groups; pool: name of its pool.
        is_state: whether a block holds a state instead of one slot a token.
        stays_out: whether prefix caching, which other groups have, leaves it aside.
        replay: how its windows can be computed again; replays: whether they can.
        num_draft_states: slots for states of positions that are not accepted; 0 if they are advanced in place.
        block_size: tokens a block. Without prefix caching one state block serves the whole sequence.
    """

    def __init__(self, index: int, spec: GroupSpec, *, caching: bool, max_tokens: int) -> None:
        """Describe group ``index``."""
        self.index = index
        self.spec = spec
        self.pool = spec.pool
        self.is_state = isinstance(spec, RecurrentState)
        self.stays_out = caching and not spec.prefix_caching
        is_one_state = self.is_state and not (caching and spec.prefix_caching)
        self.block_size = max_tokens if is_one_state else spec.block_size
        self.slots_per_block = 1 if self.is_state else spec.block_size
        self.num_draft_states = spec.num_draft_states if isinstance(spec, RecurrentState) else 0
        self.replay = spec.replay if isinstance(spec, SlidingWindow) else None
        self.replays = self.replay is not None
        self.num_sink_tokens = spec.num_sink_tokens if isinstance(spec, SlidingWindow) else 0

    def num_blocks(self, num_tokens: int, num_lookahead: int = 0) -> int:
        """Blocks for so many tokens and reserved slots (states reserve nothing)."""
        return -(-(num_tokens + self.num_reserved(num_lookahead)) // self.block_size)

    def num_reserved(self, num_lookahead: int) -> int:
        """Slots that the group reserves beyond a sequence's tokens."""
        return 0 if self.is_state else num_lookahead

    def first_kept(self, query: int) -> int:
        """First position, sinks apart, that computing position ``query`` reads."""
        match self.spec:
            case FullAttention():
                return 0
            case SlidingWindow(window=window):
                return max(0, query - window + 1)
            case ChunkedLocal(chunk_size=chunk_size):
                return query // chunk_size * chunk_size
            case RecurrentState():
                return max(0, query - 1)
            case CrossAttention():
                raise AssertionError("encoders have a machine of their own: test_cross_attention_machine.py")

    @property
    def has_own_start(self) -> bool:
        """Whether plans may begin elsewhere in it."""
        return self.stays_out or self.replays

    @property
    def first_kept_span(self) -> int:
        """How far back a window sees."""
        return self.spec.window - 1 if isinstance(self.spec, SlidingWindow) else 0

    def kept_blocks(self, query: int) -> int:
        """First logical block, sinks apart, that computing position ``query`` reads."""
        return self.first_kept(query) // self.block_size

    def kept(self, query: int) -> list[int]:
        """Positions before ``query`` that computing it reads."""
        first = self.first_kept(query)
        return [*range(min(self.num_sink_tokens, first)), *range(first, query)]

    def read(self, start: int, end: int) -> list[int]:
        """Positions that a step which computes ``[start, end)`` reads; a state reads only what is before."""
        return self.kept(start) if self.is_state else [*self.kept(start), *range(start, end)]

    def written(self, start: int, end: int) -> list[int]:
        """Positions whose content that step writes: each one, or the last one in each state block."""
        if not self.is_state:
            return list(range(start, end))
        boundaries = range((start // self.block_size + 1) * self.block_size, end, self.block_size)
        return [boundary - 1 for boundary in boundaries] + [end - 1]

    def written_by(self, start: int, end: int, first: int) -> tuple[list[int], list[int]]:
        """What that step writes to the table, and to slots: a state for each position from ``first`` on."""
        if not self.num_draft_states or end <= first:
            return self.written(start, end), []
        return self.written(start, first) if start < first else [], list(range(max(start, first), end))

    def present(self, table: list[int], num_tokens: int) -> list[int]:
        """Positions of a sequence of so many tokens whose content its blocks hold, once all is computed."""
        return [position for position in self.written(0, num_tokens) if table[self.slot(position)[0]]]

    def slot(self, position: int) -> tuple[int, int]:
        """Logical block of a position, and the offset in that block."""
        index, offset = divmod(position, self.block_size)
        return index, 0 if self.is_state else offset

    def indices(self, positions: Iterable[int]) -> set[int]:
        """Logical blocks in which positions lie."""
        return {position // self.block_size for position in positions}
