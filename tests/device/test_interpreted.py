"""Triton's kernels without a GPU: run by its interpreter, and compiled for GPUs that are not there.

The interpreter is chosen before Triton is imported, so it has a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.plain_only

pytest.importorskip("triton")
KERNELS = Path(__file__).parent / "kernels"
BACK_ENDS = Path(__file__).parents[1] / "attention" / "test_schedules.py"
FILES = [*sorted(KERNELS.glob("test_*.py")), BACK_ENDS]
EACH_TIME = [file for file in FILES if file.stem != "test_large_pool"]
"""The large pool is one of a GPU; here it is small, and the same kernels answer in the other files."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' own tests run on the GPU")
@pytest.mark.parametrize(
    ("files", "one_in"),
    [
        pytest.param(EACH_TIME[:4], 128, id="some cases of the first files"),  # two processes, for two cores
        pytest.param(EACH_TIME[4:], 128, id="some cases of the others"),
        *(pytest.param([file], 1, id=file.stem, marks=pytest.mark.long) for file in FILES),  # minutes
    ],
)
def test_kernels_do_in_the_interpreter_what_plain_torch_does(files: list[Path], one_in: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            f"--one-case-in={one_in}",
            *map(str, files),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout
