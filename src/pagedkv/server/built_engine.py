"""Builds an engine for a server: loads a model and its tokenizer, and sets the options that a server's clients need."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine import LLM, EngineConfig
from pagedkv.engine.demo.trained import FOLDER, load_demo
from pagedkv.engine.loading import load, load_tokenizer
from pagedkv.errors import ConfigurationError

__all__ = ["build_engine", "tokenizer_of"]

PREDICTED_TOKENS: Final = 8
"""Most tokens that a step drafts from a request's prediction."""


def tokenizer_of(model: str | None) -> Any:  # noqa: ANN401 - of transformers, or like it
    """Load a model's tokenizer alone. Raises ConfigurationError where there is none.

    Args:
        model: a folder or a name; None: the model of the demonstration.
    """
    return _required(load_tokenizer(str(FOLDER) if model is None else model), model)


def build_engine(  # noqa: PLR0913 - a model's settings, the rare ones by keywords
    model: str | None,
    dtype: str,
    engine: EngineConfig,
    tenants: Mapping[str, TenantLimits] | None,
    *,
    draft_model: str | None = None,
    device: str = "auto",
) -> tuple[LLM, Any]:
    """Load a model, and build an engine for a server; return the engine and the model's tokenizer.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: type of its weights.
        engine: memory and limits; answers end at the longest sequence, as clients expect.
        tenants: limits of tenants, by name; None: tenants are not distinguished.
        draft_model: a folder or a name of the model that guesses tokens; None: there is none.
        device: for the models' weights and blocks, as of :func:`~pagedkv.engine.loading.usable_device`; with
            ``auto`` the model of the demonstration is on the CPU, which is fast enough for it.

    Raises:
        ConfigurationError, UnsupportedModelError: the model cannot be loaded or served.
    """
    loaded, tokenizer = load_demo(device) if model is None else load(model, dtype, device)
    engine = replace(engine, beyond_context="clip", leases=True, tenants=tenants, predicted_tokens=PREDICTED_TOKENS)
    drafting = None if draft_model is None else load(draft_model, dtype, device)[0]
    return LLM(loaded, engine, tokenizer=_required(tokenizer, model), draft_model=drafting), tokenizer


def _required(tokenizer: Any, model: str | None) -> Any:  # noqa: ANN401 - as above
    if tokenizer is None:
        raise ConfigurationError(f"no tokenizer can be loaded for {model}, and a server needs one")
    return tokenizer
