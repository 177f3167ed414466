"""The types that all other rooms share: ids, group rules, sequences, statuses.

Holds no state and no algorithm. A *group* is the set of layers that share one retention rule
and one block table; there are five rules:

==================  ==============================================  =============================
rule                what a query at position q still needs          a prefix hit of L tokens needs
==================  ==============================================  =============================
FullAttention       every earlier block                             every block below L
SlidingWindow       positions > q - window, and the sinks           the last window, and the sinks
ChunkedLocal        positions from the start of q's chunk           the chunk in which L lies
CrossAttention      every block of the encoder's tokens             nothing: it is outside prefix caching
RecurrentState      the state after token q - 1: one block          the checkpoint at L
==================  ==============================================  =============================
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NewType, TypeAlias, assert_never

from pagedkv.contract.arguments import TokenIds, check_count, check_flag, require, short_repr

__all__ = [
    "AllocStatus",
    "ChunkedLocal",
    "CrossAttention",
    "FullAttention",
    "GroupSpec",
    "RecurrentState",
    "Replay",
    "Row",
    "Sequence",
    "SequenceGroup",
    "SlidingWindow",
    "StepId",
    "TokenIds",
    "is_cross",
    "keeps_state",
    "keeps_whole_prefix",
    "most_checkpoints",
    "most_positions",
    "num_ahead",
    "num_draft_states",
    "num_sink_tokens",
    "refuse_ahead",
    "replay_of",
]

Row = NewType("Row", int)
"""Row of the tables that serves one live sequence."""

StepId = NewType("StepId", int)
"""Number of a planned step; each is one more than the one before."""

DEFAULT_POOL: Final = "device"


class AllocStatus(Enum):
    """Answer to "does this fit": now (OK), after other sequences have freed blocks (LATER), or never (NEVER)."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


def _check_group(spec: object, *counts: str) -> None:
    for name in counts:
        check_count(spec, name, least=0 if name in {"num_sink_tokens", "num_ahead"} else 1)
    pool = getattr(spec, "pool", None)
    require(isinstance(pool, str), f"pool must be a name, got {pool!r}")
    check_flag(spec, "prefix_caching")


def _check_ahead(spec: "FullAttention | SlidingWindow") -> None:
    """Check the tokens ahead of a group's blocks, which are counted already."""
    require(
        spec.num_ahead <= spec.block_size,
        f"num_ahead must be at most block_size = {spec.block_size}, got {spec.num_ahead}: take larger blocks",
    )
    require(
        not spec.num_ahead or spec.prefix_caching,
        f"num_ahead = {spec.num_ahead} is for the names of blocks, but prefix_caching is False: leave it out",
    )


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers that attend to every earlier token.

    Args:
        block_size: tokens a block.
        pool: name of the block pool the group draws from; groups may share one.
        prefix_caching: False keeps the group out of prefix caching: its blocks are never named or hit, and it limits
            no hit. After a hit, the sequence's leading tokens must be computed in this group alone
            (:meth:`StepPlan.compute_in <pagedkv.StepPlan.compute_in>`). That is possible where the group's layers are a
            model of their own, such as a draft model. Every rule takes this argument.
        num_ahead: tokens behind a position on which its entries depend: 1 for a draft layer of EAGLE or MTP, which
            computes position i from the target's hidden state at i and the token at i + 1; k for the k-th layer of a
            deeper MTP; at most ``block_size``. The name of a block covers so many tokens ahead, so a hit is exact. The
            block is named when they are known. Its last entries must be in memory once the step has run that computes
            position i + num_ahead - 1, with what it sampled as the last token: append that, and truncate it where the
            row is to go on otherwise. A row that loses computed tokens, but for refused drafts, names no further
            blocks. If set, the space takes no forks, loads and withdrawals, records no events and no explanations, and
            has no recurrent states, replays and partial hits.
    """

    block_size: int = 16
    pool: str = DEFAULT_POOL
    prefix_caching: bool = True
    num_ahead: int = 0
    kind: Literal["full"] = field(default="full", init=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check_group(self, "block_size", "num_ahead")
        _check_ahead(self)


@dataclass(frozen=True, slots=True)
class Replay:
    """How a window that is no longer cached is computed again, where full attention still has the prompt cached.

    The step computes the last tokens of the hit once more, but only in the layers with windows; layers of full
    attention read their cached keys. The first of these tokens lack the tokens before them, and every window layer
    carries this error on by one window. With n window layers one after another, the window before the hit's end is
    exact if ``num_tokens >= n * (window - 1)``. In that case the number is rounded up to whole blocks, so that every
    block kept of it is exact throughout. With fewer tokens the window is approximate: neither it nor anything that the
    sequence computes afterwards is published.

    Args:
        num_tokens: tokens to compute again, at least 1.
        num_layers: layers with windows that follow one another in the model, those of other groups included.
    """

    num_tokens: int
    num_layers: int

    def __post_init__(self) -> None:
        check_count(self, "num_tokens")
        check_count(self, "num_layers")


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers in which a query at position q attends to positions in ``(q - window, q]`` and the sinks.

    Args:
        window: tokens attended to, the query's own included; at least 1.
        num_sink_tokens: leading tokens that stay attended to (StreamingLLM); their blocks are kept.
        replay: how windows that are no longer cached may be computed again, where a match allows it
            (:meth:`BlockSpace.match <pagedkv.BlockSpace.match>`). None: never. If set, every group of the space with
            prefix caching must be full attention or a window with a replay.
        num_ahead: as in :class:`~pagedkv.FullAttention`; less than ``window``.
    """

    window: int
    block_size: int = 16
    num_sink_tokens: int = 0
    pool: str = DEFAULT_POOL
    prefix_caching: bool = True
    replay: Replay | None = None
    num_ahead: int = 0
    kind: Literal["window"] = field(default="window", init=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check_group(self, "block_size", "window", "num_sink_tokens", "num_ahead")
        _check_ahead(self)
        require(
            self.num_ahead < self.window,
            f"num_ahead must be less than window = {self.window}, got {self.num_ahead}: a block would leave the window "
            "before it has a name",
        )
        is_replay = self.replay is None or isinstance(self.replay, Replay)
        require(is_replay, f"replay must be a Replay or None, got {self.replay!r}")
        require(
            self.replay is None or self.prefix_caching,
            f"{self.replay!r} brings back what hits lack, but prefix_caching is False",
        )


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Layers in which a query attends only to its own chunk of ``chunk_size`` positions (Llama 4)."""

    chunk_size: int
    block_size: int = 16
    pool: str = DEFAULT_POOL
    prefix_caching: bool = True
    kind: Literal["chunk"] = field(default="chunk", init=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check_group(self, "block_size", "chunk_size")


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Layers of a decoder that attend to all tokens of an encoder (Whisper, T5, Llama 3.2 Vision).

    A sequence's blocks in such a group are those of its encoder's tokens
    (:meth:`BlockSpace.allocate <pagedkv.BlockSpace.allocate>`, ``num_encoder_tokens``). They are allocated with the
    sequence, written once, in the step that computes its first chunk, read by every step, and freed with it. They
    neither grow nor shrink with the sequence, and forks share all of them. The entries of the other groups depend on
    the encoder's tokens too, so keys must tell these apart where those groups have prefix caching. The group itself
    stays outside. Such groups come after all others.

    Args:
        max_encoder_tokens: most tokens of an encoder; sets the width of the table.
    """

    max_encoder_tokens: int
    block_size: int = 16
    pool: str = DEFAULT_POOL
    prefix_caching: Literal[False] = field(default=False, init=False)
    kind: Literal["cross"] = field(default="cross", init=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check_group(self, "block_size", "max_encoder_tokens")


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Layers that keep a state instead of keys and values (Mamba, linear attention, convolutions).

    A block holds one state. A sequence holds the block of its current state. With prefix caching, the state at
    every multiple of ``checkpoint_interval`` tokens stays in a block of its own, so that prefixes can hit it. A step
    that computes positions ``[s, e)`` reads the state from the block of position ``s - 1``, and writes states to the
    block of ``e - 1`` and to that of every checkpoint in between. Where a step ends at
    :attr:`Allocation.checkpoint <pagedkv.Allocation.checkpoint>`, that state is kept as well.

    With ``num_draft_states``, tokens may still be refused: every position that is not accepted yet (a draft or an
    unknown token) has a state of its own. The state of the last accepted position becomes the current state
    (:attr:`StepPlan.draft_states <pagedkv.StepPlan.draft_states>`).

    Args:
        checkpoint_interval: tokens between checkpoints: the group's block size.
        max_checkpoints: most unreferenced states that stay cached, at least 1. Beyond that the least valuable is
            evicted at once: first states that a prompt has passed, then those at a prompt's end, then those where
            prompts branch; of each kind the oldest. None: limited by the pool alone.
        num_draft_states: most tokens of a sequence, drafts and unknown ones, that are not accepted at one time; each
            takes a block. For d drafts a step: d if a step is planned after the one before was sampled; 2d + 2 if it
            is planned while that one runs, and filled in before that one is acknowledged. 0: the state is advanced in
            place, and the group takes no drafts.
    """

    checkpoint_interval: int
    pool: str = "state"
    prefix_caching: bool = True
    max_checkpoints: int | None = None
    num_draft_states: int = 0
    kind: Literal["recurrent"] = field(default="recurrent", init=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check_group(self, "checkpoint_interval")
        check_count(self, "num_draft_states", least=0)
        if self.max_checkpoints is not None:
            check_count(self, "max_checkpoints")
            require(
                self.prefix_caching,
                f"max_checkpoints = {self.max_checkpoints} bounds what is cached, but prefix_caching is False",
            )

    @property
    def block_size(self) -> int:
        """Tokens that one block stands for."""
        return self.checkpoint_interval


GroupSpec: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | CrossAttention | RecurrentState
"""The rule of a group. Every difference between rules is answered by a function that matches over all of them (those
below, and others elsewhere), so mypy lists all places to extend when a rule is added."""


def keeps_state(group: GroupSpec) -> bool:
    """Whether a group keeps one state for a sequence, rather than an entry for each of its tokens."""
    match group:
        case RecurrentState():
            return True
        case FullAttention() | SlidingWindow() | ChunkedLocal() | CrossAttention():
            return False
        case _:
            assert_never(group)


def keeps_whole_prefix(group: GroupSpec) -> bool:
    """Whether a group keeps the entries of every token for as long as the sequence lives."""
    match group:
        case FullAttention():
            return True
        case SlidingWindow() | ChunkedLocal() | CrossAttention() | RecurrentState():
            return False
        case _:
            assert_never(group)


def is_cross(group: GroupSpec) -> bool:
    """Whether a group keeps the entries of an encoder's tokens, rather than those of the sequence."""
    match group:
        case CrossAttention():
            return True
        case FullAttention() | SlidingWindow() | ChunkedLocal() | RecurrentState():
            return False
        case _:
            assert_never(group)


def most_positions(group: GroupSpec, max_tokens: int) -> int:
    """Return the most positions of a sequence in a group, if the sequence itself has at most ``max_tokens`` tokens."""
    match group:
        case CrossAttention():
            return group.max_encoder_tokens
        case FullAttention() | SlidingWindow() | ChunkedLocal() | RecurrentState():
            return max_tokens
        case _:
            assert_never(group)


def num_sink_tokens(group: GroupSpec) -> int:
    """Count the leading tokens of which a group always keeps the blocks (attention sinks)."""
    match group:
        case SlidingWindow():
            return group.num_sink_tokens
        case FullAttention() | ChunkedLocal() | CrossAttention() | RecurrentState():
            return 0
        case _:
            assert_never(group)


def replay_of(group: GroupSpec) -> Replay | None:
    """Return how a group's lost windows may be computed again; None: they may not."""
    match group:
        case SlidingWindow():
            return group.replay
        case FullAttention() | ChunkedLocal() | CrossAttention() | RecurrentState():
            return None
        case _:
            assert_never(group)


def num_ahead(group: GroupSpec) -> int:
    """Count the tokens behind a block that its name covers."""
    match group:
        case FullAttention() | SlidingWindow():
            return group.num_ahead
        case ChunkedLocal() | CrossAttention() | RecurrentState():
            return 0
        case _:
            assert_never(group)


def refuse_ahead(groups: Iterable[GroupSpec], what: str) -> None:
    """Raise ConfigurationError, which says what cannot be done, if the names of a group cover tokens ahead."""
    for group in groups:
        require(not num_ahead(group), f"{what}: the names of {group!r} cover tokens ahead")


def num_draft_states(group: GroupSpec) -> int:
    """Count the states of drafts that each row may have in a group."""
    match group:
        case RecurrentState():
            return group.num_draft_states
        case FullAttention() | SlidingWindow() | ChunkedLocal() | CrossAttention():
            return 0
        case _:
            assert_never(group)


def most_checkpoints(group: GroupSpec) -> int | None:
    """Return the most unreferenced states of a group that stay cached; None: no such limit."""
    match group:
        case RecurrentState():
            return group.max_checkpoints
        case FullAttention() | SlidingWindow() | ChunkedLocal() | CrossAttention():
            return None
        case _:
            assert_never(group)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence as the classic block managers see it: an id and its tokens so far.

    The engine appends to ``token_ids``; the manager reads the tokens that it has not read yet.
    """

    seq_id: int
    token_ids: list[int]


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """Sequences that share one prompt: parallel samples or beams of one request.

    Args:
        request_id: for messages only.
        seqs: the live sequences of the group.
        encoder_seq: the encoder's tokens, for a model that encodes before it decodes; only their number counts.
    """

    request_id: str
    seqs: list[Sequence]
    encoder_seq: Sequence | None = None
