"""What the engine's tests need: transformers, and its advice kept out of the warnings that are errors."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Let transformers say nothing, and let torch use one thread: models here are too small to share."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
