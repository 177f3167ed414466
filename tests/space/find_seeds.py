"""Find seeds with which negative controls notice their fault early.

    python -m tests.space.find_seeds -k "salt or verified" --seeds 20

For each control it prints the seed with the least processor time; `first_seed=` takes it.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer

from tests.space.controls import EXAMPLES, SEED


class Timer:
    """Notes the processor time of each control that passes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Time a control; one that is not noticed raises."""
        began = time.process_time()
        yield
        self.seconds[item.nodeid] = time.process_time() - began


def find(
    chosen: Annotated[str, typer.Option("-k", help="Which tests, as pytest's -k.")] = "noticed",
    first: Annotated[int, typer.Option(help="The first seed to try.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds to try.")] = 10,
    examples: Annotated[
        int, typer.Option(help="Examples of each; from 500 on, the first ones are those of a control.")
    ] = 500,
    folder: Annotated[Path, typer.Option(help="Where the tests are.")] = Path("tests/space"),
) -> None:
    """Run the controls with one seed after another."""
    best: dict[str, tuple[float, int]] = {}
    os.environ[EXAMPLES] = str(examples)
    for seed in range(first, first + seeds):
        os.environ[SEED] = str(seed)
        timer = Timer()
        pytest.main(["-q", "-p", "no:xdist", "--tb=no", "-W", "ignore", "-k", chosen, str(folder)], plugins=[timer])
        for name, seconds in timer.seconds.items():
            best[name] = min(best.get(name, (seconds, seed)), (seconds, seed))
        for name, (seconds, chosen_seed) in best.items():
            typer.echo(f"{seconds:7.2f} s with {chosen_seed:3} {name}")


if __name__ == "__main__":
    typer.run(find)
