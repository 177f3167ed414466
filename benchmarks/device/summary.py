"""Which parts of `make gpu` have run, at which commit, on what, for how long: out/gpu-parts.json."""

import argparse
import json
from pathlib import Path

import torch

from benchmarks import repository

FILE = Path("out/gpu-parts.json")


def main() -> int:
    """Note that a part has run here, and print what has run and what has not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.summary", description=__doc__)
    parser.add_argument("part", help="the part that has just run without an error")
    parser.add_argument("seconds", type=int, help="how long it took")
    parser.add_argument("--of", nargs="+", metavar="PART", help="all parts")
    arguments = parser.parse_args()
    parts: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    parts[arguments.part] = f"{repository.state()}, {where}, {arguments.seconds} s"
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(parts, indent=2) + "\n")
    for part in arguments.of:
        print(f"  {part:<10} {parts.get(part, 'has not run')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
