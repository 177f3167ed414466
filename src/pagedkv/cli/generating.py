"""Serves the prompts of ``pagedkv generate``: loads the model, queues all prompts, runs steps, reports each output.

Prompts that cannot be served are refused before any computation. Interruption is checked between steps, and answers
generated before it are reported like all others.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Final, TypeAlias

from rich.progress import Progress

from pagedkv.cli.engine_options import PromptRequest
from pagedkv.engine import LLM, EngineConfig, EngineRequest, RequestOutput
from pagedkv.engine.llm import Tokenizer
from pagedkv.engine.self_test import ask_dense
from pagedkv.errors import ConfigurationError, RequestError
from pagedkv.models.memory import GIB
from pagedkv.planner.results import Result
from pagedkv.probe.compat import Model

MIB: Final = 2**20
SEEN_AHEAD: Final = 4
"""Number of requests whose end is checked, as a multiple of the running sequences."""
ReportOutput: TypeAlias = Callable[[int, RequestOutput], None]


@dataclass(slots=True)
class Figures(Result):
    """The cost of serving.

    Args:
        num_prompts: all prompts.
        num_finished: prompts that were not interrupted.
        num_prompt_tokens: tokens of all started prompts.
        num_cached_tokens: prompt tokens that hit the cache.
        num_loaded_tokens: of these, tokens that tiers brought, by medium; empty without tiers.
        num_generated_tokens: tokens of all answers.
        num_drafted_tokens: tokens that were guessed and computed.
        num_accepted_tokens: guessed tokens that were right.
        num_steps: forward passes with their overhead.
        seconds: seconds of all steps.
        num_preemptions, num_recomputed_tokens: the cost of too little memory.
        kv_nbytes: memory for keys and values.
        peak_used_blocks: peak blocks of running sequences.
        num_blocks: all blocks.
    """

    DERIVED: ClassVar = ("tokens_per_s", "hit_ratio", "acceptance")

    num_prompts: int
    kv_nbytes: int
    num_blocks: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_steps: int = 0
    peak_used_blocks: int = 0
    seconds: float = 0.0
    is_interrupted: bool = False
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of the prompts' tokens that hit the cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the guessed tokens that were right; None without guesses."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else None


@dataclass(frozen=True, slots=True)
class Difference:
    """The place where an answer differs from the model's own.

    Args:
        index: place of the prompt.
        answer: place of the answer.
        position: place of the first token that differs.
        token_id: the generated token.
        dense_token_id: the model's own token.
    """

    index: int
    answer: int
    position: int
    token_id: int
    dense_token_id: int


@dataclass(slots=True)
class Verification:
    """The result of comparing answers with the model's own.

    Args:
        num_answers: compared answers.
        num_tokens: their tokens.
        num_certain_tokens: tokens where rounding could not change the model's choice, which must be equal.
        differences: certain tokens that differ.
    """

    num_answers: int = 0
    num_tokens: int = 0
    num_certain_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


def build(model: Model, config: EngineConfig, tokenizer: Tokenizer | None, draft_model: Model | None = None) -> LLM:
    """Build an engine; ``draft_model`` guesses tokens, if there is one.

    Raises:
        ConfigurationError: more memory is requested than exists, or limits contradict each other.
        UnsupportedModelError: the engine would compute the model wrongly.
        MemoryError: there is not enough memory.
    """
    physical_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.num_blocks is None and config.kv_nbytes > physical_nbytes:
        raise ConfigurationError(
            f"--memory {config.kv_nbytes / GIB:,.2f} GiB is more than the {physical_nbytes / GIB:,.2f} GiB of this "
            "machine: request less"
        )
    try:
        return LLM(model, config, tokenizer=tokenizer, draft_model=draft_model)
    except RuntimeError as problem:
        if "allocate memory" not in str(problem):  # on a CPU, torch has no error class of its own for this
            raise
        raise MemoryError(str(problem)) from problem


def serve(
    llm: LLM,
    requests: Sequence[PromptRequest],
    progress: Progress,
    report: ReportOutput,
    *,
    is_interrupted: Callable[[], bool],
) -> Figures:
    """Serve prompts, and report each output with its place when it ends; after an interruption, partial ones too.

    Raises:
        RequestError: a prompt, which the message names, cannot be served; nothing was computed.
        EngineError: the engine failed in a step.
    """
    left = dict(enumerate(_submit(llm, each) for each in requests))
    figures = Figures(len(requests), llm.core.executor.storage.device_nbytes)
    figures.num_loaded_tokens = {tier.medium: 0 for tier in llm.core.config.tiers}
    bar = progress.add_task("generating", total=len(requests), so_far="")
    started = time.perf_counter()
    num_sampled = 0
    while llm.core.has_work and not figures.is_interrupted:
        record = llm.step()
        num_sampled += record.num_sampled
        figures.num_steps += 1
        figures.num_blocks = record.num_blocks
        figures.peak_used_blocks = max(figures.peak_used_blocks, record.num_used_blocks)
        figures.is_interrupted = is_interrupted()
        if record.num_finished or record.num_rejected:
            first = islice(left.items(), SEEN_AHEAD * llm.core.config.max_sequences)  # the order of service
            for place in [place for place, request in first if request.is_finished]:
                _end(llm, place, left.pop(place), figures, report)
        figures.seconds = time.perf_counter() - started
        progress.update(bar, completed=len(requests) - len(left), so_far=_so_far(figures, num_sampled))
    for place, request in left.items():
        llm.core.abort(request)
        _end(llm, place, request, figures, report)
    return figures


def verify(model: Model, llm: LLM, outputs: Sequence[tuple[int, RequestOutput]], progress: Progress) -> Verification:
    """Compare answers, token by token, with those of the model's own dense ``generate`` to the same prompts."""
    found = Verification()
    bar = progress.add_task("verifying", total=len(outputs), so_far="")
    for index, output in outputs:
        num_new = max(len(each.token_ids) for each in output.completions)
        if num_new:
            dense = ask_dense(model, llm.groups, output.prompt_token_ids, num_new)
            for each in output.completions:
                found.num_answers += 1
                found.num_tokens += len(each.token_ids)
                found.num_certain_tokens += min(dense.num_certain, len(each.token_ids))
                pairs = zip(each.token_ids[: dense.num_certain], dense.token_ids, strict=False)
                where = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
                if where is not None:
                    tokens = each.token_ids[where], dense.token_ids[where]
                    found.differences.append(Difference(index, each.index, where, *tokens))
        progress.update(bar, advance=1, so_far=f"{len(found.differences)} differ")
    return found


def _submit(llm: LLM, request: PromptRequest) -> EngineRequest:
    try:
        return llm.submit([request.prompt], request.params)[0]
    except RequestError as problem:
        reason = problem.__cause__ if isinstance(problem.__cause__, RequestError) else problem
        raise RequestError(
            f"{request.where}: {str(reason).removeprefix('prompt 0 ').removeprefix('prompt 0: ')}"
        ) from problem


def _end(llm: LLM, place: int, request: EngineRequest, figures: Figures, report: ReportOutput) -> None:
    output = llm.output(request)
    figures.num_finished += all(each.finish_reason in {"stop", "length"} for each in output.completions)
    if request.num_cached_tokens is not None:
        figures.num_prompt_tokens += len(output.prompt_token_ids)
    figures.num_cached_tokens += output.num_cached_tokens
    for medium, num_tokens in output.num_loaded_tokens.items():
        figures.num_loaded_tokens[medium] = figures.num_loaded_tokens.get(medium, 0) + num_tokens
    figures.num_generated_tokens += sum(len(each.token_ids) for each in output.completions)
    figures.num_drafted_tokens += output.num_drafted_tokens
    figures.num_accepted_tokens += output.num_accepted_tokens
    figures.num_preemptions += output.num_preemptions
    figures.num_recomputed_tokens += output.num_recomputed_tokens
    report(place, output)


def _so_far(figures: Figures, num_sampled: int) -> str:
    speed = num_sampled / max(figures.seconds, 1e-9)
    used = figures.peak_used_blocks / max(1, figures.num_blocks) * figures.kv_nbytes / MIB
    done = f"{figures.num_finished:,} of {figures.num_prompts:,} prompts"
    return f"{done}, {speed:,.0f} tokens/s, {figures.hit_ratio:.0%} hit, {used:,.1f} MiB"
