"""Measure the body on this machine's GPU, print a table, write JSON with the device's name."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.device.attention import attention_figures
from benchmarks.device.captured import captured_figures
from benchmarks.device.limits import limit_figures
from benchmarks.device.memory import memory_figures
from benchmarks.device.moves import move_figures
from benchmarks.device.sampling import sampling_figures
from benchmarks.device.states import state_figures
from benchmarks.device.steps import cpu_figures, step_figures
from benchmarks.device.timing import Figure
from benchmarks.machine import describe


def main() -> int:
    """Measure, print and write; fail where a bar is missed, if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/gpu.json"), metavar="FILE", help="where to write")
    parser.add_argument("--attention", action="store_true", help="only attention over blocks, and graphs of it")
    parser.add_argument("--cpu", action="store_true", help="only what a CPU can do")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        print("this machine has no GPU that torch sees: python -m benchmarks.device --cpu", file=sys.stderr)
        return 2
    figures = []
    for figure in _attention() if arguments.attention else _figures(only_cpu=arguments.cpu):
        figures.append(figure)
        print(figure.line, flush=True)
    machine = describe() | {"torch": torch.__version__, "device": _device_name()}
    rows = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": machine, "figures": rows}, indent=2) + "\n")
    return 0


def _figures(*, only_cpu: bool) -> Iterator[Figure]:
    yield from cpu_figures()
    if not only_cpu:
        yield from limit_figures()
        yield from step_figures()
        yield from move_figures()
        yield from memory_figures()
        yield from state_figures()
        yield from sampling_figures()
        yield from _attention()


def _attention() -> Iterator[Figure]:
    yield from attention_figures()
    yield from captured_figures()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
