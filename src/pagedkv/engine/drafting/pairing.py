"""Two models on one space: whether a draft model fits a target, and the groups of both, the target's first.

A draft model cannot change an answer. So it is refused only if its drafts cannot be compared with the target's tokens,
or cannot be computed.
"""

from dataclasses import dataclass, replace
from typing import Final

from pagedkv.engine import compat
from pagedkv.engine.grouping import EngineGroups
from pagedkv.engine.layer_specs import Place
from pagedkv.errors import ConfigurationError, UnsupportedModelError

__all__ = ["DEFAULT_DRAFT_TOKENS", "DraftModel", "paired", "require_fit"]

DEFAULT_DRAFT_TOKENS: Final = 4
"""Tokens that a draft model proposes for a sequence in a step, by default."""
POOL_PREFIX: Final = "draft:"


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A model that proposes tokens.

    Args:
        model: the model.
        groups: the groups of its layers, in a space that has the target's groups as well.
    """

    model: compat.Model
    groups: EngineGroups


def require_fit(target: compat.Model, draft: compat.Model, max_tokens: int) -> None:
    """Refuse a draft model that cannot propose tokens of a target. Changes nothing.

    Args:
        target: the model that the answers come from; draft: the model that proposes tokens.
        max_tokens: tokens of the longest sequence.

    Raises:
        ConfigurationError: another device, or fewer positions than ``max_tokens``.
    """
    name = type(draft).__name__
    if draft.device != target.device:
        raise ConfigurationError(
            f"the draft model {name} is on {draft.device}, and {type(target).__name__} on {target.device}: move the "
            f"draft model to {target.device}, since both models share one storage"
        )
    longest = compat.longest_sequence(draft)
    if longest is not None and longest < max_tokens:
        raise ConfigurationError(
            f"the draft model {name} has {longest} positions, and sequences may have {max_tokens} tokens: set "
            "max_tokens, or use another draft model"
        )


def paired(groups: EngineGroups, draft: compat.Model, draft_groups: EngineGroups) -> tuple[EngineGroups, DraftModel]:
    """Append the groups of a draft model to those of its target.

    Args:
        groups: the groups of the target.
        draft: the draft model; draft_groups: its groups, as if it were the only model.

    Returns:
        the groups of both models, in which the target's groups keep their places; and the draft model with its groups
        among them. The names of its pools are prefixed with "draft:".

    Raises:
        UnsupportedModelError: the draft model has recurrent layers.
        ConfigurationError: it has another vocabulary.
    """
    if draft_groups.num_vocabulary != groups.num_vocabulary:
        raise ConfigurationError(
            f"the draft model {type(draft).__name__} has a vocabulary of {draft_groups.num_vocabulary} tokens, and its "
            f"target one of {groups.num_vocabulary}: use a draft model with the vocabulary of its target"
        )
    if draft_groups.states:
        raise UnsupportedModelError(
            f"the draft model {type(draft).__name__} has recurrent layers, whose states would have to be restored "
            "after each refused draft: use a draft model with attention layers only"
        )
    first = len(groups.specs)
    specs = tuple(replace(spec, pool=f"{POOL_PREFIX}{spec.pool}") for spec in draft_groups.specs)
    both = replace(groups, specs=groups.specs + specs, shapes=groups.shapes + draft_groups.shapes)
    behind = replace(
        draft_groups,
        specs=both.specs,
        shapes=both.shapes,
        attention=tuple(replace(layer, group=layer.group + first) for layer in draft_groups.attention),
        sources={idx: Place(place.group + first, place.index) for idx, place in draft_groups.sources.items()},
    )
    return both, DraftModel(draft, behind)
