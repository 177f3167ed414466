"""What a figure was measured on: processor, versions, commit."""

import os
import platform
import subprocess
from pathlib import Path

import numba
import numpy as np

import pagedkv

__all__ = ["describe"]


def describe() -> dict[str, str]:
    """Name the machine and the commit."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "pagedkv": pagedkv.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    root = Path(__file__).parent.parent
    try:
        told = [_git(root, "rev-parse", "--short", "HEAD"), "modified" if _git(root, "status", "--porcelain") else ""]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return " ".join(filter(None, told))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)  # noqa: S607 - whichever git the user has
    return done.stdout.strip()
