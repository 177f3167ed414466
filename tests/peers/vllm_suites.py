"""vLLM's own test files, run as they are in a process of their own: a plug-in puts ours in place of theirs."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

PEERS: Final = Path(__file__).parent
PLAIN: Final = ("-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "--tb=short")


@dataclass(frozen=True, slots=True)
class Suite:
    """A folder of test files of vLLM's.

    Args:
        folder: in its source distribution.
        plugin: the pytest plug-in, beside this file, that tells what became of each case.
        options: of pytest, beside those of all suites.
        case_s: seconds for a case; patience_s: for all of them.
    """

    folder: str
    plugin: str
    options: tuple[str, ...]
    case_s: int
    patience_s: int

    def vllm(self) -> Path | None:
        """Return the folder of the source distribution; None: it is not on the path."""
        found = importlib.util.find_spec("vllm")
        folder = None if found is None or found.origin is None else Path(found.origin).parents[1]
        return folder if folder is not None and (folder / self.folder).is_dir() else None

    def require_vllm(self) -> Path:
        """Return that folder, or skip the test that asks."""
        for package in ("pytest_asyncio", "pytest_timeout"):
            pytest.importorskip(package, reason=f"vLLM's tests need {package}: make test-peers installs it")
        vllm = self.vllm()
        if vllm is None:
            pytest.skip("vLLM's source distribution is not on the path")
        return vllm

    def outcomes(
        self, vllm: Path, files: Sequence[str], work: Path, environment: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Run files; return what the plug-in has told of each case.

        Args:
            vllm: folder of the source distribution; files: in the suite's folder.
            work: an empty folder, for models in the hub's form, and logs.
            environment: beside that of all suites.
        """
        told = work / "outcomes.jsonl"
        everywhere = {
            "HF_HOME": str(work / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PAGEDKV_OUTCOMES": str(told),
        }
        command = [
            *(sys.executable, "-m", "pytest", "-p", self.plugin, *PLAIN, f"--timeout={self.case_s}", *self.options),
            "--continue-on-collection-errors",
            *(f"{self.folder}/{file}" for file in files),
        ]
        with (work / "pytest.log").open("w") as log:
            subprocess.run(
                command,
                cwd=vllm,
                env={**os.environ, **everywhere, **environment},
                stdout=log,
                stderr=log,
                timeout=self.patience_s,
                check=False,
            )
        return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
