"""Stands in for packages that SGLang imports and a machine without a GPU has not: its caches do without them."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final
from unittest.mock import MagicMock

__all__ = ["stand_in"]

ABSENT: Final = frozenset(
    {
        "compressed_tensors", "gguf", "outlines", "sentencepiece", "sgl_kernel", "soundfile", "torch_memory_saver",
        "torchaudio", "torchcodec", "torchvision",
    }
)  # fmt: skip


class _AbsentClass(type):
    """A class whose members are their own names: they serve as keys."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _AbsentModule(ModuleType):
    """A module that has whatever is asked for: a class where the name is one's, anything else otherwise."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value: object = _AbsentClass(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else found."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        vars(module)["__version__"] = "0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def stand_in() -> None:
    """Begin to; what `transformers` finds absent by itself must stay so, hence it comes first."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer  # noqa: F401, PLC0415
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    register = CONFIG_MAPPING.register
    vars(CONFIG_MAPPING)["register"] = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)  # noqa: ARG005
    sys.meta_path.append(_Absent())
