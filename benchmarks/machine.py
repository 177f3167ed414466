"""What a figure was measured on: processor, versions, commit, date."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import numba
import numpy as np

import pagedkv
from benchmarks import repository

__all__ = ["describe"]


def describe() -> dict[str, str]:
    """Name the machine, the commit and the date."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "pagedkv": pagedkv.__version__,
        "commit": repository.state(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
