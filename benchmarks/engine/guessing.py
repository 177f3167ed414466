"""Serving with guessed tokens, counted: what benchmarks of lookups and of draft models share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedkv.engine import LLM, SamplingParams

__all__ = ["Taken", "Tokens", "serve_counted"]

Tokens = list[list[int]]


@dataclass
class Taken:
    """What serving in one way took: seconds of each round, steps, and how many guesses were right."""

    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def summary(self, num_tokens: int, plain_s: float) -> str:
        """Describe the best round beside one without guesses, which took ``plain_s`` for as many tokens."""
        best, right = min(self.seconds), self.num_accepted / self.num_drafted if self.num_drafted else 0.0
        return (
            f"{num_tokens / best:8,.0f} tokens/s, {plain_s / best:.2f} times, {self.num_steps:4} steps, "
            f"{self.num_drafted:6,} guessed, {right:6.1%} right"
        )


def serve_counted(
    llm: LLM, prompts: Tokens, params: SamplingParams, clock: Callable[[], float], taken: Taken
) -> Tokens:
    """Serve once; return the answers."""
    start = clock()
    requests = llm.submit(prompts, params)
    records = []
    while llm.core.has_work:
        records.append(llm.step())
    taken.seconds.append(clock() - start)
    taken.num_steps = len(records)
    taken.num_drafted = sum(record.num_drafted for record in records)
    taken.num_accepted = sum(record.num_accepted for record in records)
    return [list(request.output().token_ids) for request in requests]
