"""docs/families.md, made of the record of a run."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pagedkv.engine.self_test import GOING_ON
from tests.engine.family_matrix.record import Record
from tests.engine.family_matrix.trying import Outcome

__all__ = ["PAGE", "page_of"]

PAGE: Final = Path(__file__).parents[3] / "docs" / "families.md"
WIDTH: Final = 120

SELF_TEST: Final = re.compile(r"^\S+ answers otherwise over blocks than dense: its logits differ by .* is rounding\. ")
"""How a refusal by the self-test begins, with figures of one model; what follows is the cause."""
HEAD: Final = """# Families of models

What becomes of every type that transformers {version} makes decoders of (`AutoModelForCausalLM`, {num_types} types)
when `python -m tests.engine.family_matrix` tries it, which writes this page. For each a tiny model is made of its
default config, with random weights in float32 that give clear answers, and answers six prompts: with shared
prefixes, in chunks of 16 tokens, staggered, with NaN in every block that is handed out; once with preemption by
recompute and a self-test, once with preemption by swap and hits inside blocks.

- {num_equal} answer token for token as their own `generate`, as far as it could not have chosen otherwise.
- {num_refused} are refused: paged memory would answer wrongly for them.
- {num_untried} could not be tried so.

A type that is not on this page is neither known nor excluded: a model is probed and tested when it is loaded, and
refused if it differs. Other configs of a type may have other layers, and are looked at in the same way.
"""


def page_of(record: Record) -> str:
    """Write the page."""
    by_kind: dict[str, dict[str, Outcome]] = {}
    for model_type, outcome in record.outcomes.items():
        by_kind.setdefault(outcome.kind, {})[model_type] = outcome
    equal, refused, untried = (by_kind.pop(kind, {}) for kind in ("equal", "refused", "not tried"))
    lines = [
        HEAD.format(
            version=record.transformers,
            num_types=len(record.outcomes),
            num_equal=len(equal),
            num_refused=len(refused),
            num_untried=len(untried),
        ),
        "## Equal\n",
        "Layers of one rule are one group of blocks: full attention, a window, a chunk, a recurrent state.\n",
        *_equal_table(equal),
        "\n## Refused\n",
        *_reasons(refused),
        "\n## Not tried\n",
        *_reasons(untried),
    ]
    for kind, outcomes in by_kind.items():
        lines += [f"\n## {kind.capitalize()}\n", *_reasons(outcomes)]
    return "\n".join(lines) + "\n"


def _equal_table(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Types by what their groups are, the most common first."""
    by_groups: dict[tuple[str, ...], list[str]] = {}
    for model_type, outcome in outcomes.items():
        kinds = dict.fromkeys(group.partition(":")[0].partition("_")[0] for group in outcome.groups)
        by_groups.setdefault(tuple(kinds), []).append(model_type)
    yield "| groups | types |"
    yield "|---|---|"
    for groups, types in sorted(by_groups.items(), key=lambda each: (-len(each[1]), each[0])):
        yield f"| {', '.join(groups)} | {', '.join(types)} |"


def _reasons(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Types by the reason that was given, without the model's name in it."""
    by_reason: dict[str, list[str]] = {}
    for model_type, outcome in outcomes.items():
        by_reason.setdefault(_plain(outcome), []).append(model_type)
    yield "| types | why |"
    yield "|---|---|"
    for reason, types in sorted(by_reason.items(), key=lambda each: (-len(each[1]), each[1])):
        yield f"| {', '.join(types)} | {reason} |"


def _plain(outcome: Outcome) -> str:
    """Give a reason as it may stand in a table, without what differs from model to model."""
    reason = SELF_TEST.sub("", outcome.reason)
    for name in _names(outcome):
        reason = reason.replace(f"{name}: ", "").replace(f"{name} ", "it ")
    for ending in (GOING_ON, "; docs/engine.md lists what is supported", " docs/engine.md lists what is supported"):
        reason = reason.removesuffix(ending)
    reason = reason.removesuffix("; paged memory would answer wrongly.")
    return " ".join(reason.replace("|", "\\|").split())


def _names(outcome: Outcome) -> Iterable[str]:
    return [outcome.model] if outcome.model else []
