"""The folder or the name of a model: looked at before anything is imported that could run it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pagedkv.errors import ConfigurationError

DEMO: Final = "demo"
"""Name of the model of the demonstration, which is part of the package, in place of a folder."""
CHAT_DEMO: Final = "demo-chat"
"""Name of a model for benchmarks of a server: it takes any text, and answers with letters at random."""


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


HUB_TIMEOUT_S: Final = 10.0


def require_model(name: str) -> None:
    """Refuse a model that is neither a folder, nor downloaded already, nor on the hub of Hugging Face.

    The hub is asked once. Loading would ask it for every file, six times each where it does not answer.

    Args:
        name: as of :func:`require_folder`.

    Raises:
        ConfigurationError: there is no such model, or the hub cannot be asked.
    """
    require_folder(name)
    if Path(name).is_dir():
        return
    if None in map(find_spec, ("huggingface_hub", "tokenizers", "torch", "transformers")):
        return  # what loads the model names the extra
    from huggingface_hub import HfApi, errors, try_to_load_from_cache  # noqa: PLC0415 - as the others, of an extra

    here = f"model {name!r} is no folder here"
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except errors.HFValidationError:
        raise ConfigurationError(f"{here}, and no name of a model of the hub, such as OWNER/NAME") from None
    except errors.GatedRepoError:
        return  # it is there; loading says what is missing
    except errors.RepositoryNotFoundError:
        raise ConfigurationError(
            f"{here}, and the hub of Hugging Face has none of that name: check its spelling; a private one needs a "
            "token (HF_TOKEN)"
        ) from None
    except Exception as problem:
        # The hub's client changes its HTTP library, and its errors, from version to version.
        raise ConfigurationError(
            f"{here} and not downloaded yet, and the hub of Hugging Face cannot be asked: {problem}"
        ) from problem
