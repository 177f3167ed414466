"""Finds out why a model's logits over blocks differ from its dense ones, by two passes of two tokens.

The probe sees only what goes through the cache and the attention interface. State that a model keeps elsewhere, and
arguments that it ignores, show only in its logits, and the passes here look for both. This decides nothing: it runs
only for the message about a model that has failed its self-test.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from pagedkv.engine import compat
from pagedkv.engine.borrowing import BorrowedModel
from pagedkv.engine.grouping import EngineGroups

__all__ = ["cause_of_difference", "cause_of_own_difference"]

NEAR: Final = 1e-3
"""Of the logits' spread: equal but for rounding."""
UNKNOWN: Final = "Some layer sees more, or less, than the probe found out; docs/engine.md lists what is supported"


def cause_of_difference(model: compat.Model, groups: EngineGroups) -> str:
    """Describe, in a sentence, what a model does that paged memory cannot follow. Changes nothing in the model.

    Args:
        model: one that answered otherwise; groups: what its layers were found to keep.
    """
    has_cap = any(layer.soft_cap for layer in groups.attention)
    with torch.inference_mode(), BorrowedModel(model).dense(has_cap=has_cap):
        before = dict(_attributes(model))
        near = _logits(model, (0, 1))
        after = dict(_attributes(model))
        far = _logits(model, (3, 9))
    kept = [name for name, tensor in after.items() if before.get(name) is not tensor]
    if kept:
        return (
            f"Its layers keep what they need of earlier tokens in themselves ({kept[0]}), not in the cache: there it "
            "belongs to whichever sequence came last"
        )
    cache = compat.dense_cache(model)
    layers = compat.foreign_layers(cache)
    if layers:
        return (
            f"Its cache keeps more of a sequence than keys and values of tokens, or states ({', '.join(layers)}): that "
            "has no blocks here"
        )
    unseen = compat.windows_of(cache) - {extent for layer in groups.attention for extent in (layer.window, layer.chunk)}
    if unseen:
        return (
            f"Its own cache keeps {min(unseen)} tokens, where its masks show all: dense, what it answers to a prompt "
            "at once is not what it answers token by token"
        )
    if torch.equal(near, far):
        return (
            "It takes no notice of position_ids, and counts the tokens that it is given instead: in a row of several "
            "sequences it places all of them behind one another"
        )
    return UNKNOWN


def cause_of_own_difference(model: compat.Model, groups: EngineGroups, prompt: Sequence[int], own: torch.Tensor) -> str:
    """Describe, in a sentence, what ``generate`` gives a model that the engine does not.

    Args:
        model, groups: as above; prompt: token ids.
        own: the logits behind the prompt by ``generate``: ``[vocabulary]``.
    """
    ids, last = torch.tensor([prompt], device=model.device), torch.tensor([len(prompt) - 1], device=model.device)
    has_cap = any(layer.soft_cap for layer in groups.attention)
    with torch.inference_mode(), BorrowedModel(model).dense(has_cap=has_cap):
        unplaced = compat.forward(model, last, compat.dense_cache(model), input_ids=ids)[0]
    if torch.allclose(unplaced, own, atol=NEAR * float(own.std()), rtol=0.0):
        return (
            "generate leaves position_ids out, and then the model counts positions otherwise than from 0: those that "
            "the engine gives would be wrong"
        )
    return "Its prepare_inputs_for_generation changes, adds or drops arguments"


def _logits(model: compat.Model, positions: tuple[int, int]) -> torch.Tensor:
    """Compute two tokens at these positions, dense."""
    ids = torch.tensor([[1, 2]], device=model.device)
    where = torch.tensor([positions], device=model.device)
    wanted = torch.arange(2, device=model.device)
    return compat.forward(model, wanted, compat.dense_cache(model), input_ids=ids, position_ids=where).clone()


def _attributes(model: compat.Model) -> Iterator[tuple[str, torch.Tensor]]:
    """List the tensors that modules have as plain attributes: neither weights nor buffers."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value
