"""What the engine's tests need: transformers, and its advice kept out of the warnings that are errors."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Switch off messages of transformers, and let torch use one thread: models here are too small for more."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Any:  # noqa: ANN401 - of transformers, which may not be there
    """A small Llama."""
    from tests.engine.families import make_model  # noqa: PLC0415 - needs transformers

    return make_model("llama")
