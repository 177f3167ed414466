"""StepRecord: counts and times of one step; its fields are stable from version to version."""

from dataclasses import dataclass

__all__ = ["StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for live views, planners and inspectors.

    Args:
        step_id: number of the step.
        num_decoded: sequences that computed one token each, drafts aside; num_prefilled: tokens of prompts that were
            computed.
        num_sampled: tokens that were sampled.
        num_admitted, num_resumed: requests that began to run: from the queue, and swapped in.
        num_swapped_out, num_recomputed: requests that were preempted, by kind.
        num_finished, num_rejected: requests that ended.
        num_hit_tokens: tokens of admitted prompts that need not be computed.
        num_running, num_waiting, num_swapped: requests after the step.
        num_used_blocks, num_blocks: of all pools, null blocks left out; used: those of running sequences.
        schedule_seconds, forward_seconds, sample_seconds, finish_seconds: time of each part of the step.
        num_drafted: drafts that were computed; num_accepted: those that were accepted.
        failure: why the step failed and was aborted; None if it did not. A failed step has computed and sampled
            nothing, and the requests that it admitted wait again.

    If steps overlap, num_finished and num_accepted are those of the step before, which the same call finished.
    """

    step_id: int
    num_decoded: int
    num_prefilled: int
    num_sampled: int
    num_admitted: int
    num_resumed: int
    num_swapped_out: int
    num_recomputed: int
    num_finished: int
    num_rejected: int
    num_hit_tokens: int
    num_running: int
    num_waiting: int
    num_swapped: int
    num_used_blocks: int
    num_blocks: int
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    finish_seconds: float
    num_drafted: int = 0
    num_accepted: int = 0
    failure: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed."""
        return self.num_decoded + self.num_prefilled + self.num_drafted
