"""Triton's kernels without a GPU: run by its interpreter, and compiled for GPUs that are not there.

The interpreter is chosen before Triton is imported, so it has a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
KERNELS = Path(__file__).parent / "kernels"
BACK_ENDS = Path(__file__).parents[1] / "attention" / "test_schedules.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' own tests run on the GPU")
@pytest.mark.parametrize("one_in", [16, pytest.param(1, marks=pytest.mark.long)])  # all cases take minutes
@pytest.mark.parametrize("tests", [*sorted(KERNELS.glob("test_*.py")), BACK_ENDS], ids=lambda path: path.stem)
def test_kernels_do_in_the_interpreter_what_plain_torch_does(tests: Path, one_in: int) -> None:
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
            str(tests),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout
