"""What the layers of a model keep, as the probe found it, and the groups of a block space that follow.

A *call* is one use of the attention function in a forward pass. Calls are numbered in their order, which is the same in
every pass: a module that several layers share has several calls, and a layer that shares keys has a call without a
source of its own. A *source* is what one call of ``Cache.update`` keeps.

Layers with one rule and equal shapes are a group, which shares a block table. Groups, and their pools, are named as in
:mod:`pagedkv.models`, so that a model has the same groups in a replay of a trace and in the engine. Layers of one rule
whose keys have different shapes are separate groups: ``full``, ``full:2``. The keys of a layer's indexer are a
companion of its group's blocks: they belong to the same tokens.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Final, Literal, TypeAlias, assert_never, get_args

import torch

from pagedkv.attention import AttentionLayer
from pagedkv.contract.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.device import Companion, GroupShape, KeyValueShape, LatentShape, StateShape, StateTensor
from pagedkv.errors import UnsupportedModelError

RuleKind: TypeAlias = Literal["full", "window", "chunk"]


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """The positions that a call attends to.

    Args:
        kind: as :mod:`pagedkv.contract.spec` has them: "full", "window" or "chunk".
        extent: tokens of the window or the chunk; 0 for full attention.
    """

    kind: RuleKind
    extent: int = 0


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """What a layer keeps of a token.

    Args:
        layer_idx: transformers' number of the layer.
        num_heads, key_dim, value_dim: of its keys and values; ``value_dim`` is 0 where one tensor serves as both.
        dtype: of both.
        is_latent: whether the model unfolds keys and values from it: ``key_dim`` and ``value_dim`` are then the widths
            of two vectors for all heads.
    """

    layer_idx: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    is_latent: bool


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One call of the attention function.

    Args:
        source: number of the source whose keys it reads.
        is_sharing: whether an earlier call reads the same source.
        num_heads: heads of its queries.
        scale, soft_cap: factor and soft cap of scores; 0: no cap.
        has_sinks: whether each head has a sink.
        rule: the positions that it attends to.
        pair_width: elements of a query's and a value's vector, as each head multiplies them for one key.
        is_sparse: whether it attends to those keys alone that an indexer selects for each query.
    """

    source: int
    is_sharing: bool
    num_heads: int
    scale: float
    soft_cap: float
    has_sinks: bool
    rule: Rule
    pair_width: int
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent layer keeps of a sequence.

    Args:
        layer_idx: transformers' number of the layer.
        tensors: shape and type of each of its tensors, by name.
    """

    layer_idx: int
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """What a layer keeps beside keys and values: an entry for every ``ratio`` tokens.

    The keys of an indexer (DeepSeek-V3.2, GLM-5) are entries of one token each. Compressed entries (DeepSeek-V4) are
    made of ``ratio`` tokens, of which vectors are kept until then.

    Args:
        layer_idx: transformers' number of the layer.
        ratio: tokens of an entry.
        dim: elements of an entry.
        dtype: of all of them.
        num_raw: latest tokens of which vectors are kept until an entry is made of them.
        raw_dim: elements of these vectors.
        name: of the compressor that makes them; "": of an indexer without one.
    """

    layer_idx: int
    ratio: int
    dim: int
    dtype: torch.dtype
    num_raw: int = 0
    raw_dim: int = 0
    name: str = ""

    @property
    def raw_rule(self) -> Rule:
        """The rule by which vectors of tokens are kept: a chunk; a window where adjacent entries overlap."""
        return Rule("chunk" if self.num_raw == self.ratio else "window", self.num_raw)


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The attention calls of a model, and what its layers keep.

    Args:
        calls: the calls of a forward pass, in order.
        sources: kept for each token.
        states: kept for each sequence.
        num_vocabulary: columns of its logits. What modules and configs say of it may be stale (Ovis 2).
        entries: kept beside keys and values, for sparse and compressed attention.
    """

    calls: tuple[CallSpec, ...]
    sources: tuple[SourceSpec, ...]
    states: tuple[StateSpec, ...]
    num_vocabulary: int
    entries: tuple[EntrySpec, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of a source or a state: layer ``index`` of a group."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CompanionPlace:
    """The place of what is kept beside keys: layer ``index`` of a companion of a group; None: of its latents."""

    group: int
    name: str | None
    index: int


@dataclass(frozen=True, slots=True)
class CompressedPlace:
    """The places of what a compressor keeps: its entries, and vectors of the latest tokens.

    Args:
        ratio: tokens of an entry.
        entries, raw: where they are.
        overlaps: whether an entry is made of the tokens before its own, too.
    """

    ratio: int
    entries: CompanionPlace
    raw: CompanionPlace
    overlaps: bool


RULE_ORDER: Final[tuple[RuleKind, ...]] = get_args(RuleKind)


@dataclass(frozen=True, slots=True)
class EngineGroups:
    """Groups for a block space and a storage, and where each layer lies in them.

    Args:
        specs: the groups; shapes: what their blocks hold, in the same order.
        attention: how each attention call reads, in the order of calls.
        sources: place of what each layer keeps of tokens, by transformers' number of the layer.
        writers: number of the first call that reads each source, by the same.
        states: place of each recurrent layer's state, by the same.
        latents: widths of the two latent vectors, by the same; none for layers without.
        num_vocabulary: columns of the model's logits.
        indexers: place of the keys by which an indexer selects what a layer attends to, by the same.
        sparse: numbers of the attention calls that attend to what an indexer selects, or by a mask of the model.
        compressed: places of what the compressors of a layer keep, by their names, by the same.
        absorbed: layers with latents that are attended to without unfolding them, by the same.

    Attributes:
        in_rows: whether a pass has each sequence in a row of its own, all of equal length; else all in one flat row.
    """

    specs: tuple[GroupSpec, ...]
    shapes: tuple[GroupShape, ...]
    attention: tuple[AttentionLayer, ...]
    sources: dict[int, LayerPlace]
    writers: dict[int, int]
    states: dict[int, LayerPlace]
    latents: dict[int, tuple[int, int]]
    num_vocabulary: int
    indexers: Mapping[int, CompanionPlace] = field(default_factory=dict)
    sparse: frozenset[int] = frozenset()
    compressed: Mapping[int, Mapping[str, CompressedPlace]] = field(default_factory=dict)
    absorbed: frozenset[int] = frozenset()
    in_rows: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note how passes have their sequences."""
        object.__setattr__(self, "in_rows", bool(self.states or self.sparse))

    @property
    def unfolds(self) -> bool:
        """Whether the model unfolds latents of earlier positions in a pass."""
        return not self.latents.keys() <= self.absorbed

    @property
    def varying_shapes(self) -> str | None:
        """Why passes over equally many tokens have tensors of different shapes; None if the shapes are equal."""
        if self.unfolds:
            return "the model unfolds latents of all positions that a step sees, whose number differs from step to step"
        if self.sparse:
            return "an indexer scores all positions that a step sees, whose number differs from step to step"
        if self.states:
            return "recurrent layers take sequences in rows of equal length, whose shapes differ from step to step"
        return None


def group_layers(
    layers: ModelLayers, block_size: int, checkpoint_interval: int, num_draft_states: int = 0
) -> EngineGroups:
    """Put layers into groups: full attention first, then windows, chunks and states, smaller extents first.

    Args:
        layers: the result of the probe.
        block_size: tokens of a block; checkpoint_interval: tokens between kept states.
        num_draft_states: states that a sequence may have beside its own, for guessed tokens.

    Raises:
        UnsupportedModelError: one source is read by several rules, or what a layer keeps has no place in blocks.
        ConfigurationError: a size is out of range.
    """
    rules = [rule_of_source(layers, number) for number in range(len(layers.sources))]
    specs: list[GroupSpec] = []
    shapes: list[GroupShape] = []
    sources: dict[int, LayerPlace] = {}
    indexers: dict[int, CompanionPlace] = {}
    kinds = sorted(set(zip(rules, map(_shape_of, layers.sources), strict=True)), key=_kind_order)
    names = _names(rule for rule, _ in kinds)
    for group, ((rule, shape), name) in enumerate(zip(kinds, names, strict=True)):
        members = [
            source
            for source, its_rule in zip(layers.sources, rules, strict=True)
            if (its_rule, _shape_of(source)) == (rule, shape)
        ]
        sources.update({source.layer_idx: LayerPlace(group, index) for index, source in enumerate(members)})
        specs.append(_spec(rule, name, block_size))
        mine = {each.layer_idx for each in members}
        beside = [entry for entry in layers.entries if entry.layer_idx in mine and not entry.name]
        indexers.update(_places_beside(group, beside))
        shapes.append(_group_shape(members, beside))
    compressed = _add_compressed(layers, specs, shapes, block_size)
    state_spec = RecurrentState(checkpoint_interval, num_draft_states=num_draft_states)
    states = _add_states(layers, specs, shapes, state_spec)
    attention = tuple(_attention_layer(layers, number, sources) for number in range(len(layers.calls)))
    writers: dict[int, int] = {}
    for number, call in enumerate(layers.calls):
        writers.setdefault(layers.sources[call.source].layer_idx, number)
    latents = {each.layer_idx: (each.key_dim, each.value_dim) for each in layers.sources if each.is_latent}
    ones = {number for number, source in enumerate(layers.sources) if not source.value_dim}
    sparse = frozenset(number for number, call in enumerate(layers.calls) if call.is_sparse or call.source in ones)
    return EngineGroups(
        tuple(specs),
        tuple(shapes),
        attention,
        sources,
        writers,
        states,
        latents,
        layers.num_vocabulary,
        indexers,
        sparse,
        compressed,
    )


def rule_of_source(layers: ModelLayers, number: int) -> Rule:
    """Return the rule by which a source is read. Raises UnsupportedModelError: there are several."""
    rules = {call.rule for call in layers.calls if call.source == number}
    if len(rules) > 1:
        raise UnsupportedModelError(
            f"layer {layers.sources[number].layer_idx} keeps keys that are read by several rules: {sorted(rules)}; one "
            "block table cannot serve them"
        )
    return rules.pop()


_Shape = tuple[int, int, int, str, bool]


def _shape_of(source: SourceSpec) -> _Shape:
    return source.num_heads, source.key_dim, source.value_dim, str(source.dtype), source.is_latent


def _kind_order(kind: tuple[Rule, _Shape]) -> tuple[int, int, _Shape]:
    rule, shape = kind
    return RULE_ORDER.index(rule.kind), rule.extent, shape


def _names(rules: Iterable[Rule]) -> list[str]:
    names: list[str] = []
    for rule in rules:
        names.append(_name(rule, names))
    return names


def _name(rule: Rule, taken: Sequence[str]) -> str:
    """Name the next group of a rule. ``taken``: names of the groups before it."""
    name = f"{rule.kind}_{rule.extent}" if rule.extent else rule.kind
    number = 1 + sum(other == name or other.startswith(f"{name}:") for other in taken)
    return name if number == 1 else f"{name}:{number}"


def _spec(rule: Rule, name: str, block_size: int) -> GroupSpec:
    match rule.kind:
        case "full":
            return FullAttention(block_size, pool=name)
        case "window":
            return SlidingWindow(rule.extent, block_size, pool=name)
        case "chunk":
            return ChunkedLocal(rule.extent, block_size, pool=name)
        case _:
            assert_never(rule.kind)


def _group_shape(members: Sequence[SourceSpec], beside: Sequence[EntrySpec]) -> GroupShape:
    first = members[0]
    counts = Counter(_companion_of(each) for each in beside)
    companions = tuple(Companion(name, count, dim, dtype) for (name, dim, dtype), count in counts.items())
    if first.is_latent or not first.value_dim:
        width = first.key_dim + first.value_dim
        return LatentShape(len(members), width, dtype=first.dtype, companions=companions)
    return KeyValueShape(
        len(members), first.num_heads, first.key_dim, first.value_dim, dtype=first.dtype, companions=companions
    )


def _places_beside(group: int, beside: Sequence[EntrySpec]) -> Iterator[tuple[int, CompanionPlace]]:
    """Yield the place of each layer's keys of an indexer in the group's companions."""
    counts: Counter[str] = Counter()
    for each in beside:
        name, _, _ = _companion_of(each)
        yield each.layer_idx, CompanionPlace(group, name, counts[name])
        counts[name] += 1


def _companion_of(entry: EntrySpec) -> tuple[str, int, torch.dtype]:
    """Return the companion that holds keys of an indexer: its name, dimensions and type."""
    return f"indexer {entry.dim} {str(entry.dtype).removeprefix('torch.')}", entry.dim, entry.dtype


def _add_compressed(
    layers: ModelLayers, specs: list[GroupSpec], shapes: list[GroupShape], block_size: int
) -> dict[int, dict[str, CompressedPlace]]:
    """Add groups for what compressors keep: all entries in one, and vectors of tokens in one for each rule."""
    found = [entry for entry in layers.entries if entry.name]
    kinds: dict[Rule, list[tuple[EntrySpec, int, int]]] = {}
    for each in found:
        kinds.setdefault(Rule("full"), []).append((each, each.dim, each.ratio))
        kinds.setdefault(each.raw_rule, []).append((each, each.raw_dim, 1))
    places: dict[tuple[Rule, int, str], CompanionPlace] = {}
    taken = [spec.pool for spec in specs]
    for rule, kept in kinds.items():
        name = _name(rule, taken)
        size = lcm(block_size, *(ratio for _, _, ratio in kept))
        counts: Counter[tuple[int, torch.dtype, int]] = Counter()
        for entry, dim, ratio in kept:
            kind = dim, entry.dtype, ratio
            is_first = kind == next(iter(counts), kind)
            beside = None if is_first else f"{ratio}: {dim} {str(entry.dtype).removeprefix('torch.')}"
            places[rule, entry.layer_idx, entry.name] = CompanionPlace(len(specs), beside, counts[kind])
            counts[kind] += 1
        (dim, dtype, ratio), count = next(iter(counts.items()))
        companions = tuple(
            Companion(f"{per}: {width} {str(kind).removeprefix('torch.')}", number, width, kind, per)
            for (width, kind, per), number in list(counts.items())[1:]
        )
        specs.append(_spec(rule, name, size))
        shapes.append(LatentShape(count, dim, dtype=dtype, companions=companions, ratio=ratio))
    result: dict[int, dict[str, CompressedPlace]] = {}
    for each in found:
        entries, raw = (places[rule, each.layer_idx, each.name] for rule in (Rule("full"), each.raw_rule))
        overlaps = each.num_raw > each.ratio
        result.setdefault(each.layer_idx, {})[each.name] = CompressedPlace(each.ratio, entries, raw, overlaps)
    return result


def _add_states(
    layers: ModelLayers, specs: list[GroupSpec], shapes: list[GroupShape], spec: RecurrentState
) -> dict[int, LayerPlace]:
    places: dict[int, LayerPlace] = {}
    kinds: list[tuple[tuple[str, tuple[int, ...], torch.dtype], ...]] = list(
        dict.fromkeys(state.tensors for state in layers.states)
    )
    for number, tensors in enumerate(kinds, start=1):
        members = [state for state in layers.states if state.tensors == tensors]
        places.update({state.layer_idx: LayerPlace(len(specs), index) for index, state in enumerate(members)})
        specs.append(replace(spec, pool="state" if number == 1 else f"state:{number}"))
        shapes.append(StateShape(len(members), tuple(StateTensor(*tensor) for tensor in tensors)))
    return places


def _attention_layer(layers: ModelLayers, number: int, sources: dict[int, LayerPlace]) -> AttentionLayer:
    call = layers.calls[number]
    source = layers.sources[call.source]
    place = sources[source.layer_idx]
    window, chunk = _window_and_chunk(call.rule)
    return AttentionLayer(
        group=place.group,
        index=place.index,
        num_heads=call.num_heads,
        scale=call.scale,
        window=window,
        chunk=chunk,
        soft_cap=call.soft_cap,
        has_sinks=call.has_sinks,
        is_latent=source.is_latent or not source.value_dim,
    )


def _window_and_chunk(rule: Rule) -> tuple[int, int]:
    """Return a rule as numbers for attention: tokens of the window and of the chunk; 0 if there is none."""
    match rule.kind:
        case "full":
            return 0, 0
        case "window":
            return rule.extent, 0
        case "chunk":
            return 0, rule.extent
        case _:
            assert_never(rule.kind)
