"""The folder of a model: looked at before anything is imported that could run it."""

from pathlib import Path
from typing import Final

from pagedkv.contract.errors import ConfigurationError

__all__ = ["DEMO", "require_folder"]

DEMO: Final = "demo"
"""Name of the model of the demonstration, which is part of the package, in place of a folder."""


def require_folder(name: str) -> None:
    """Refuse what is meant for a model's folder and is none, before anybody asks the hub of Hugging Face for it.

    Args:
        name: a folder with ``config.json``, or a model's name on the hub.

    Raises:
        ConfigurationError: it has no ``config.json``, or is written as only folders are and is none.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigurationError(f"model {name!r} is a folder without a config.json: name the one that has it")
    elif folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or folder.exists():
        raise ConfigurationError(f"model {name!r} is no folder: name one with a config.json, or a model of the hub")
