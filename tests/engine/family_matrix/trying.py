"""What becomes of a type of transformers' decoders: served and equal, refused for a reason, or not tried.

A model is served as :mod:`tests.engine.test_families` does it, and held against its own ``generate``. Where a model
often cannot choose between two tokens, another one of the same type is made.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig
from pagedkv.errors import UnsupportedModelError
from tests.engine.family_matrix.tiny import NotMadeError, make_tiny
from tests.engine.serving import CONFIG, PROMPTS, Reference, compare, poison, reference, serve

__all__ = ["CONFIGS", "Kind", "Outcome", "try_type"]

Kind: TypeAlias = Literal["equal", "refused", "not tried", "differs", "fails"]

CONFIGS: Final = (
    replace(CONFIG, self_test=True),
    replace(CONFIG, preemption="swap", num_host_blocks=40, min_partial_hit=1),
)
NUM_SEEDS: Final = 4
LEAST_CERTAIN: Final = 0.9


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a type.

    Args:
        kind: equal: every answer is the dense one, as far as that is certain; refused: by the engine; not tried:
            there is no tiny model of it, or its own ``generate`` fails.
        model: name of the model's class, where one was made.
        groups: names of its groups, where it was served.
        reason: why it is not equal.
    """

    kind: Kind
    model: str = ""
    groups: tuple[str, ...] = ()
    reason: str = ""


def try_type(model_type: str, configs: tuple[EngineConfig, ...] = CONFIGS) -> Outcome:
    """Serve tiny models of a type; seconds."""
    try:
        model, references = _certain(model_type)
    except NotMadeError as problem:
        return Outcome("not tried", reason=str(problem))
    name = type(model).__name__
    groups: tuple[str, ...] = ()
    try:
        for config in configs:
            groups = _serve(model, config, references)
    except UnsupportedModelError as problem:
        return Outcome("refused", name, reason=str(problem))
    except AssertionError as problem:
        return Outcome("differs", name, groups, str(problem).splitlines()[0])
    except Exception as problem:  # noqa: BLE001 - whatever it is: it belongs to this type
        return Outcome("fails", name, groups, f"{type(problem).__name__}: {problem}".splitlines()[0])
    return Outcome("equal", name, groups)


def _certain(model_type: str) -> tuple[PreTrainedModel, list[Reference]]:
    """Make a model whose answers are mostly certain, and these answers. Raises NotMadeError."""
    for seed in range(NUM_SEEDS):
        model = make_tiny(model_type, seed)
        references = reference(model, PROMPTS)
        num_certain = sum(each.num_certain for each in references)
        if num_certain >= LEAST_CERTAIN * sum(len(each.token_ids) for each in references):
            return model, references
    raise NotMadeError(f"{NUM_SEEDS} models with random weights often cannot choose between two tokens")


def _serve(model: PreTrainedModel, config: EngineConfig, references: list[Reference]) -> tuple[str, ...]:
    """Serve prompts and compare; return the names of the groups. Raises AssertionError where an answer differs."""
    llm = LLM(model, config)
    poison(llm)
    requests, _ = serve(llm)
    compare(requests, references)
    assert llm.core.space.num_live_blocks() == 0, "blocks were not given back"
    return tuple(spec.pool for spec in llm.groups.specs)
