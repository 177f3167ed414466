"""The file of results: one object a mutation, written as each becomes known, so that a run can go on later."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutants.mutation import Mutation, MutationError
from mutants.runner import Verdict

__all__ = ["killers_of_last_time", "unjudged", "write_result"]


def unjudged(chosen: list[Mutation], file: Path | None) -> list[Mutation]:
    """Return the mutations that have no result in a file. Raises MutationError: there is no file to look into."""
    if file is None:
        raise MutationError("--unjudged needs the file of earlier results: --json FILE")
    judged = results_of(file)
    return [each for each in chosen if each.name not in judged]


def killers_of_last_time(file: Path | None) -> Mapping[str, str]:
    """Tests that killed, by mutation, from the file that this run will write."""
    return {name: each["killer"] for name, each in results_of(file).items() if each["killer"] is not None}


def results_of(file: Path | None) -> dict[str, dict[str, Any]]:
    """Results by the mutation's name; empty if there is no file."""
    if file is None or not file.exists():
        return {}
    return {each["mutation"]["name"]: each for each in json.loads(file.read_text(encoding="utf-8"))}


def write_result(verdict: Verdict, file: Path) -> None:
    """Write a result; those of other mutations stay. The file is exchanged, so that an interruption loses none."""
    results = results_of(file)
    results[verdict.mutation.name] = asdict(verdict) | {"result": verdict.result}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(list(results.values()), indent=1) + "\n", encoding="utf-8")
    new.replace(file)
