"""Names of devices."""

import pytest
import torch

from pagedkv.engine.loading import usable_device
from pagedkv.errors import ConfigurationError

NUM_GPUS = torch.cuda.device_count()


def test_auto_is_a_gpu_where_there_is_one() -> None:
    assert usable_device("auto") == ("cuda" if NUM_GPUS else "cpu")
    assert usable_device("cpu") == "cpu"


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", "meta"])
def test_names_of_no_device_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="device must be auto, cpu, cuda, or cuda:N, got"):
        usable_device(name)


def test_a_gpu_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigurationError, match=rf"'cuda:{NUM_GPUS}' is not there: torch .* finds {NUM_GPUS} GPUs"):
        usable_device(f"cuda:{NUM_GPUS}")
