"""The rule of each layer of a model, from its config: by a list, a period, a pattern or a flag.

A rule is one of :mod:`pagedkv.contract.spec`: full attention, a sliding window, chunked local attention, a
recurrent state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, assert_never, get_args

from pagedkv.models.config import COMPARE, ModelConfig

GroupKind: TypeAlias = Literal["full", "window", "chunk", "recurrent"]
KINDS: Final[tuple[GroupKind, ...]] = get_args(GroupKind)
"""All kinds, in the order of a model's groups."""

MAX_LAYERS: Final = 10_000
"""More than any model has; a damaged number must not cause a long loop."""


@dataclass(frozen=True, slots=True)
class LayerRule:
    """The memory rule of a layer.

    Args:
        kind: as in :mod:`pagedkv.contract.spec`.
        extent: tokens of the window or of the chunk; 0 where neither applies.
    """

    kind: GroupKind
    extent: int = 0


def is_state(kind: GroupKind) -> bool:
    """Return whether layers of a kind keep a state for a sequence, rather than values for each of its tokens."""
    match kind:
        case "recurrent":
            return True
        case "full" | "window" | "chunk":
            return False
        case _:
            assert_never(kind)


FULL: Final = LayerRule("full")
RECURRENT: Final = LayerRule("recurrent")

LayerRules: TypeAlias = tuple[LayerRule, ...]
RuleReader: TypeAlias = Callable[[ModelConfig], LayerRules]

LIST_KEY: Final = "layer_types"
WRITE_THE_LIST: Final = "Write layer_types as the model's own source does"


def listed_rules(config: ModelConfig) -> LayerRules | None:
    """Return the rules that the config lists layer by layer; None where it has no list.

    Raises:
        ConfigurationError: a type is unknown, or the list does not have one type for each layer.
    """
    if not config.has(LIST_KEY):
        return None
    types = config.texts(LIST_KEY)
    num_layers = config.count_or(len(types), "num_hidden_layers", most=MAX_LAYERS)
    if len(types) != num_layers or not types:
        raise config.fault(LIST_KEY, f"lists {len(types)} layers, but num_hidden_layers is {num_layers}", COMPARE)
    return tuple(_rule_of_type(config, position, name) for position, name in enumerate(types))


def all_full(config: ModelConfig) -> LayerRules:
    """Return full attention for every layer."""
    return (FULL,) * _num_layers(config)


def full_unless_lightning(config: ModelConfig) -> LayerRules:
    """Return full attention for every layer: 1 in ``attn_type_list`` (MiniMax), where 0 is lightning attention."""
    if config.has("attn_type_list") and not all(config.counts("attn_type_list")):
        raise config.fault(
            "attn_type_list", "has layers of lightning attention, whose states are not known here", COMPARE
        )
    return all_full(config)


def layers_must_be_listed(config: ModelConfig) -> LayerRules:
    """Refuse a config without a list of layer types."""
    raise config.fault(LIST_KEY, "is missing, and this kind of model mixes its layers", WRITE_THE_LIST)


def window_everywhere(config: ModelConfig) -> LayerRules:
    """Return the sliding window for every layer, or full attention where the config has none (Mistral)."""
    if not config.has("sliding_window"):
        return all_full(config)
    return (_window(config),) * _num_layers(config)


def window_below_top(config: ModelConfig) -> LayerRules:
    """Return the window for layers from ``max_window_layers`` on if ``use_sliding_window`` is set (Qwen2, Qwen3)."""
    if not config.has("sliding_window") or not config.flag("use_sliding_window", default=False):
        return all_full(config)
    first = config.count("max_window_layers", least=0)
    window = _window(config)
    return tuple(window if layer >= first else FULL for layer in range(_num_layers(config)))


def window_except_every(period: int) -> RuleReader:
    """Return the window for all layers but every n-th. n is ``sliding_window_pattern``, or ``period`` if absent."""

    def read(config: ModelConfig) -> LayerRules:
        every = config.count_or(period, "sliding_window_pattern", "_sliding_window_pattern")
        window = _window(config)
        return tuple(window if (layer + 1) % every else FULL for layer in range(_num_layers(config)))

    return read


def chunk_unless_no_rope(config: ModelConfig) -> LayerRules:
    """Return the chunk for rotary layers, and full attention for the others (Llama 4).

    ``no_rope_layers`` has 1 for a layer *with* rotary positions. If the list is empty or missing, every
    ``no_rope_layer_interval``-th layer, 4 by default, is without.
    """
    num_layers = _num_layers(config)
    chunk = _chunk(config)
    if config.values.get("no_rope_layers"):
        is_rotary = config.counts("no_rope_layers")
        if len(is_rotary) != num_layers:
            raise config.fault("no_rope_layers", f"lists {len(is_rotary)} layers of {num_layers}", COMPARE)
        return tuple(chunk if rotary else FULL for rotary in is_rotary)
    every = config.count_or(4, "no_rope_layer_interval")
    return tuple(chunk if (layer + 1) % every else FULL for layer in range(num_layers))


def attention_every(config: ModelConfig) -> LayerRules:
    """Return full attention for the last layer of every ``full_attention_interval``, and a state for the others."""
    period = config.count("full_attention_interval", most=MAX_LAYERS)
    return tuple(RECURRENT if (layer + 1) % period else FULL for layer in range(_num_layers(config)))


def _rule_of_type(config: ModelConfig, position: int, name: str) -> LayerRule:
    match name:
        case "full_attention":
            return FULL
        case "sliding_attention":
            return _window(config)
        case "chunked_attention":
            return _chunk(config)
        case "linear_attention":
            return RECURRENT
        case _:
            raise config.fault(
                f"{LIST_KEY}[{position}]",
                f"is {name[:40]!r}, a type of layer not known here",
                "Only full, sliding, chunked and linear attention can be sized",
            )


def _num_layers(config: ModelConfig) -> int:
    return config.count("num_hidden_layers", most=MAX_LAYERS)


def _window(config: ModelConfig) -> LayerRule:
    return LayerRule("window", config.count("sliding_window"))


def _chunk(config: ModelConfig) -> LayerRule:
    return LayerRule("chunk", config.count("attention_chunk_size"))
