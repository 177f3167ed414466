"""The memory of a model, asked of its own class: a ``config.json`` in, a :class:`~pagedkv.models.ModelMemory` out.

The class is made without weights, on the meta device, and probed as an engine probes a model that it serves
(:mod:`pagedkv.probe.probing`). So a plan and the engine cannot differ about which layers keep what. What an engine
refuses for another reason than its layers (rotary factors by length, keys of an indexer) is sized all the same.

A group holds all layers of one rule, also where their keys have different shapes: their bytes are added. The keys of an
indexer, and compressed entries (a token's share of them), are kept as long as the sequence, like full attention; tokens
that are not compressed yet are a chunk, or a window where entries overlap.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Final

from pagedkv.errors import ConfigurationError, PagedKVError
from pagedkv.models.config import ModelConfig
from pagedkv.models.layer_rules import KINDS, MAX_LAYERS, GroupKind
from pagedkv.models.memory import (
    LayerGroup,
    ModelMemory,
    chosen_element_nbytes,
    group_name,
    kv_element_nbytes,
    model_element_nbytes,
    model_element_type,
    weights_nbytes,
)
from pagedkv.probe import compat
from pagedkv.probe.layers import EntrySpec, ModelLayers, Rule, StateSpec, rule_of_source
from pagedkv.probe.probing import probe

FULL: Final = Rule("full")
EXPERTS: Final = ".experts."
NUM_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_A_TOKEN: Final = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
)


def memory_of(name: str, whole: ModelConfig, kv_dtype: str | None = None) -> ModelMemory:
    """Size a model by its own class.

    Args:
        name: what the result is called.
        whole: its ``config.json``.
        kv_dtype: as :func:`pagedkv.models.read_model` takes it.

    Raises:
        ConfigurationError: transformers has no class for it, or cannot make one of this config; or a layer keeps what
            has no size here: which layer, and why.

    Cost: seconds for the largest models, beside the import of transformers.
    """
    part = whole.language_model()
    part.count_or(1, "num_hidden_layers", most=MAX_LAYERS)
    kv_element_nbytes(part, kv_dtype)  # refuses a choice that is none, or is missing
    try:
        config = compat.decoder_config(whole.values)
        model = compat.make_without_weights(config, model_element_type(part))
        compat.refuse_encoder(model)
        layers = probe(model)
        groups = _groups(layers, chosen_element_nbytes(kv_dtype))
    except PagedKVError as problem:
        raise ConfigurationError(f"{whole.source}: {problem}") from problem
    except Exception as problem:
        told = " ".join(str(problem).split())
        raise ConfigurationError(
            f"{whole.source}: transformers {compat.version()} makes no model of it: {type(problem).__name__}: {told}. "
            "Compare it with the config.json on the model's own page"
        ) from problem
    text_config = config.get_text_config(decoder=True)
    num_parameters, num_in_experts = _count(model)
    share = _expert_share(text_config) if num_in_experts else 1.0
    return ModelMemory(
        name=name,
        num_parameters=num_parameters,
        num_active_parameters=None if share is None else num_parameters - round(num_in_experts * (1 - share)),
        expert_share=1.0 if share is None else share,
        weights_nbytes=weights_nbytes(part, num_parameters, num_in_experts),
        dtype_nbytes=model_element_nbytes(part),
        max_context=compat.longest_sequence(model),
        num_layers=text_config.num_hidden_layers,
        groups=groups,
    )


def _groups(layers: ModelLayers, element_nbytes: int | None) -> tuple[LayerGroup, ...]:
    """Add up the layers of each rule; elements of keys and values have their own type unless a size is chosen."""
    rules = [rule_of_source(layers, number) for number in range(len(layers.sources))]
    token_nbytes: Counter[Rule] = Counter()
    num_layers = Counter(rules)
    for source, rule in zip(layers.sources, rules, strict=True):
        numel = source.num_heads * (source.key_dim + source.value_dim)
        token_nbytes[rule] += numel * (element_nbytes or source.dtype.itemsize)
    for rule, entries in _kept_by_rule(layers.entries).items():
        token_nbytes[rule] += sum(_entry_nbytes(rule, each, element_nbytes or each.dtype.itemsize) for each in entries)
        num_layers[rule] = num_layers[rule] or len({each.layer_idx for each in entries})
    pair_flops: Counter[Rule] = Counter()
    for call in layers.calls:
        pair_flops[call.rule] += 2 * call.num_heads * call.pair_width
    ordered = sorted(token_nbytes, key=lambda rule: (KINDS.index(rule.kind), rule.extent))
    groups = [
        _group(rule.kind, rule.extent, num_layers[rule], token_nbytes[rule], pair_flops[rule]) for rule in ordered
    ]
    if layers.states:
        groups.append(_group("recurrent", 0, len(layers.states), 0, 0, sum(map(_state_nbytes, layers.states))))
    return tuple(groups)


def _kept_by_rule(entries: Sequence[EntrySpec]) -> dict[Rule, list[EntrySpec]]:
    """Tell which entries are kept by which rule: all of them as long as the sequence, raw vectors for a while."""
    kept: dict[Rule, list[EntrySpec]] = {}
    for each in entries:
        kept.setdefault(FULL, []).append(each)
        if each.num_raw:
            kept.setdefault(each.raw_rule, []).append(each)
    return kept


def _entry_nbytes(rule: Rule, entry: EntrySpec, element_nbytes: int) -> int:
    """Return bytes a token: of an entry its share."""
    return entry.dim * element_nbytes // entry.ratio if rule == FULL else entry.raw_dim * element_nbytes


def _group(
    kind: GroupKind, extent: int, num_layers: int, token_nbytes: int, pair_flops: int, state_nbytes: int = 0
) -> LayerGroup:
    name = group_name(kind, extent)
    return LayerGroup(name, kind, extent, num_layers, token_nbytes, state_nbytes, pair_flops)


def _state_nbytes(state: StateSpec) -> int:
    return sum(prod(shape) * dtype.itemsize for _, shape, dtype in state.tensors)


def _count(model: compat.Model) -> tuple[int, int]:
    """Count all weights, those that are tied once, and how many of them belong to routed experts."""
    sizes = {name: each.numel() for name, each in compat.language_weights(model).items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if EXPERTS in name)


def _expert_share(config: object) -> float | None:
    """Return the share of a layer's routed experts that a token uses; None where a config does not tell it."""
    num_experts, num_used = (_first_count(config, names) for names in (NUM_EXPERTS, EXPERTS_A_TOKEN))
    return None if num_experts is None or num_used is None else num_used / num_experts


def _first_count(config: object, names: Sequence[str]) -> int | None:
    """Return the first of several attributes that is a number; of a list, one for each layer, the first number."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and value > 0:
            return value
    return None
