"""Where device code is tested: on the CPU always, on a GPU where there is one."""

import pytest
import torch

GPUS = ["cuda"] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", *GPUS])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device to build storage and tables on."""
    name: str = request.param
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
