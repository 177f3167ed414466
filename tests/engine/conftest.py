"""What the engine's tests need: transformers, and its advice kept out of the warnings that are errors."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Switch off messages of transformers, and let torch use one thread: models here are too small for more."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
