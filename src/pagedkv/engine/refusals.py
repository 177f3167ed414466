"""Models that are refused by name before the probe, for reasons that a probe of two tokens cannot find.

With rotary factors that depend on the longest position of a pass, one sequence would change another's output. Layers in
training mode would not compute the same logits twice.
"""

from typing import Final

from pagedkv.engine import compat
from pagedkv.errors import UnsupportedModelError

__all__ = ["require_supported"]

BY_LENGTH: Final = {
    "longrope": "its rotary factors are others once any sequence of the pass is longer than the original context",
    "dynamic": "its rotary factors depend on the longest position of the pass (dynamic NTK)",
}


def require_supported(model: compat.Model) -> None:
    """Refuse a model that would answer wrongly, or not reproducibly. Changes nothing.

    Raises:
        UnsupportedModelError: which model, why, and what to do.
        MissingExtraError: transformers is too old.
    """
    compat.require_version()
    compat.refuse_encoder(model)
    name = type(model).__name__
    if model.training:
        raise UnsupportedModelError(f"{name} is in training mode, where dropout changes answers: call model.eval()")
    for rule in sorted(compat.position_rules(model)):
        if rule in BY_LENGTH:
            raise UnsupportedModelError(
                f"{name}: rope_type is {rule!r}: {BY_LENGTH[rule]}, so a request's answer would depend on its "
                "neighbours. Set rope_type to 'default' in config.rope_parameters, and stay within the original "
                "context, or use a model with another rule (llama3, yarn, linear)"
            )
