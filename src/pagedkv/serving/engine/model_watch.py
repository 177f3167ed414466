"""ModelWatch: whether what a CUDA graph was captured of is still the model that a step would run.

A graph holds addresses. It is of no use any more once a weight was moved, exchanged or converted, a module exchanged
(an adapter was added), a hook registered, or the model set to train. Weights that change in place are the graph's as
well.
"""

from collections.abc import Mapping
from operator import getitem, is_not
from typing import Any, Final, final

import torch
from torch.utils.hooks import RemovableHandle

from pagedkv.serving.engine import compat

__all__ = ["ModelWatch"]

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
ADAPTER_STATE: Final = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""What PEFT's layers keep of adapters: which are active, whether any is, and which the weights hold already."""


@final
class ModelWatch:
    """What a model was when this was made.

    Args:
        model: the model.

    Attributes:
        has_hooks: whether any module has a hook of its forward pass.

    Its weights are kept allocated for as long as this lives, also if the model lets them go: a graph that is replayed
    before anything has been noticed reads memory that is there. Cost: O(modules + weights).
    """

    def __init__(self, model: compat.Model) -> None:
        self._model = model
        self._tables: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        self._parts: list[object] = []
        for module in model.modules():
            for table in (module._modules, module._parameters, module._buffers):  # noqa: SLF001 - torch's own names
                for name, part in table.items():
                    if part is not None:
                        self._tables.append(table)
                        self._names.append(name)
                        self._parts.append(part)
        self._weights = [part for part in self._parts if isinstance(part, torch.Tensor)]
        self._kept = [weight.detach() for weight in self._weights]
        self._addresses = list(map(torch.Tensor.data_ptr, self._weights))
        self._is_training = model.training
        self._adapted = [module for module in model.modules() if hasattr(module, ADAPTER_STATE[0])]
        self._adapters = self._active_adapters()
        self._num_hooks = RemovableHandle.next_id
        self.has_hooks = self._find_hooks()

    def has_changed(self) -> bool:
        """Return whether any part of the model was replaced. Cost: 70 us for the 8B shape of Llama 3."""
        try:
            if any(map(is_not, map(getitem, self._tables, self._names), self._parts)):
                return True
        except KeyError:
            return True
        return (
            list(map(torch.Tensor.data_ptr, self._weights)) != self._addresses
            or self._model.training != self._is_training
            or self._active_adapters() != self._adapters
            or self._has_other_hooks()
        )

    def _active_adapters(self) -> list[str]:
        """Return the active adapters of every module with adapters."""
        return [repr([getattr(module, name, None) for name in ADAPTER_STATE]) for module in self._adapted]

    def _has_other_hooks(self) -> bool:
        """Look through the modules while some have hooks, or if any hook was registered anywhere since."""
        if not self.has_hooks and RemovableHandle.next_id == self._num_hooks:
            return False
        self._num_hooks = RemovableHandle.next_id
        return self._find_hooks() != self.has_hooks

    def _find_hooks(self) -> bool:
        return any(getattr(module, table) for module in self._model.modules() for table in HOOKS)
