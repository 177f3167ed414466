"""An independent ``pagedkv replay``: the text of ``docs/replay.md``, sentence by sentence, over dictionaries and lists.

Nothing here is fast, and nothing is taken from the library but the value of a request. Where a count
depends on an order that the text fixes, the line that fixes it stands beside it.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pagedkv.planner.traces.request import TokenizedRequest
from tests.simulation.naive_measures import NaiveInterval, NaiveMeasures
from tests.simulation.naive_space import NaiveSpace, NaiveTable

FIRST_PROMISE = 64

__all__ = ["NaiveConfig", "NaiveCost", "NaiveJob", "NaiveServer", "run"]


class NaiveCost(Protocol):
    """How long things take."""

    def step_s(
        self, num_new_tokens: int, num_attended_pairs: int, num_context_tokens: int, num_sequences: int
    ) -> float:
        """Seconds of a step."""

    def swap_s(self, num_tokens: int) -> float:
        """Seconds to move so many tokens between the pools."""


@dataclass(frozen=True)
class NaiveConfig:
    """The same names as ``ServingConfig``; pools include the null block."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    max_sequences: int = 256
    max_batched_tokens: int = 8192
    watermark: float = 0.01
    preemption: str = "recompute"
    num_samples: int | None = None
    beam_width: int | None = None
    load: float = 1.0
    seed: int = 0
    max_length: int | None = None


@dataclass(eq=False)
class NaiveJob:
    """A request that was not rejected, from its arrival on."""

    number: int
    request: TokenizedRequest
    arrival_s: float
    n: int
    is_beam: bool
    seed: int
    prompt: list[Hashable] = field(init=False)
    tables: list[NaiveTable] = field(default_factory=list)
    num_produced: int = 0  # tokens of each sequence
    is_prefilled: bool = False  # known tokens were once all computed since the last admission
    replaced_for: int = 0  # the token for which beams were replaced last: once, though a step may have to wait
    most_computed: int = 0  # tokens a sequence, computed before a preemption
    num_preemptions: int = 0
    promised: int = 0  # length up to which there is to be room
    admitted_at: float | None = None
    first_token_at: float | None = None
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = list(self.request.prompt_token_ids.tolist())
        self.begin_again()

    @property
    def key(self) -> tuple[int, int]:
        """A smaller one goes first."""
        return (-self.request.priority, self.number)

    @property
    def num_output(self) -> int:
        """Tokens that each sequence produces."""
        return len(self.request.output_token_ids)

    @property
    def num_known(self) -> int:
        """Tokens of each sequence that are known, produced ones included."""
        return len(self.prompt) + self.num_produced

    @property
    def final_length(self) -> int:
        """The last generated token is never appended."""
        return len(self.prompt) + max(self.num_output, 1) - 1

    @property
    def is_computed(self) -> bool:
        """Whether the next token follows from what is computed."""
        return all(table.num_computed == self.num_known for table in self.tables)

    def begin_again(self) -> None:
        """With several sequences all is lost but the prompt."""
        self.generator = np.random.default_rng((self.seed, self.number))
        self.replaced_for = 0
        if self.n > 1:
            self.num_produced = 0

    def token(self, sequence: int, place: int) -> Hashable:
        """Say what a sequence (or the beam in that place) produces at a place of its output."""
        return int(self.request.output_token_ids[place]) if sequence == 0 else (self.number, sequence, place)

    def known(self) -> list[Hashable]:
        """Tokens of the one sequence that is to be admitted."""
        return self.prompt + [self.token(0, place) for place in range(self.num_produced)]


class NaiveServer:
    """A virtual clock, three lists of requests, one space."""

    def __init__(self, config: NaiveConfig, cost: NaiveCost) -> None:
        self.config = config
        self.cost = cost
        num_host_usable = max(0, config.num_host_blocks - 1)
        self.space = self.new_space(config.num_blocks - 1, config.block_size, num_host_usable, config.watermark)
        self.measures = NaiveMeasures()
        self.now = 0.0
        self.waiting: list[NaiveJob] = []
        self.running: list[NaiveJob] = []
        self.swapped: list[NaiveJob] = []
        self.preempted_in_step = False
        self.returned_in_step = False
        self.decoded_in_step: list[NaiveJob] = []
        self.num_moved_blocks = 0
        self.max_length = 1

    def new_space(self, num_usable: int, block_size: int, num_host_usable: int, watermark: float) -> NaiveSpace:
        """Make the space; negative controls make a broken one."""
        return NaiveSpace(num_usable, block_size, num_host_usable, watermark)

    def run(self, requests: Iterable[TokenizedRequest]) -> dict[str, Any]:
        """Serve all requests and report."""
        jobs = [self._new_job(number, request) for number, request in enumerate(requests)]
        self.max_length = self.config.max_length or max((job.final_length for job in jobs), default=1)
        self.measures.counts["num_requests"] = len(jobs)
        coming = sorted(jobs, key=lambda job: job.arrival_s)
        while coming or self.waiting or self.running or self.swapped:
            if not (self.waiting or self.running or self.swapped) and coming[0].arrival_s > self.now:
                self._pass_time(coming[0].arrival_s, is_step=False)
            while coming and coming[0].arrival_s <= self.now:
                self._arrive(coming.pop(0))
            if self.waiting or self.running or self.swapped:
                self._step()
        self.measures.virtual_s = self.now
        return self.measures.as_dict(self.space, self.max_length)

    def _new_job(self, number: int, request: TokenizedRequest) -> NaiveJob:
        config = self.config
        n = config.beam_width or config.num_samples or request.num_samples
        is_beam = config.beam_width is not None
        return NaiveJob(number, request, request.arrival_s / config.load, n, is_beam, config.seed)

    def _arrive(self, job: NaiveJob) -> None:
        b = self.config.block_size
        num_shared = len(job.prompt) // b
        num_blocks = num_shared + job.n * (-(-job.final_length // b) - num_shared)
        if job.n > self.config.max_sequences or num_blocks > self.space.device.num_usable:
            self.measures.counts["num_rejected"] += 1
        else:
            self.waiting.append(job)

    # One step

    def _step(self) -> None:
        self.preempted_in_step = self.returned_in_step = False
        self.decoded_in_step, self.num_moved_blocks = [], 0
        self.space.set_time(self.now)
        self._decode()
        budget = self.config.max_batched_tokens - sum(job.n for job in self.decoded_in_step)
        budget = self._prefill(budget)
        if not self.preempted_in_step:
            self._let_in(budget)
        self._carry_out()

    def _decode(self) -> None:
        decoding = sorted((job for job in self.running if job.is_prefilled), key=lambda job: job.key)
        for job in decoding:
            if job.is_beam and job.num_produced > max(1, job.replaced_for):
                job.replaced_for = job.num_produced
                self._replace_beams(job)
        while decoding:
            growing = [
                (table, [job.token(place, job.num_produced - 1)])
                for job in decoding
                for place, table in enumerate(job.tables)
            ]
            num_needed = self.space.num_needed(growing)
            if num_needed <= len(self.space.device.free):
                self.space.append(growing)
                self.decoded_in_step = decoding
                return
            if self._will_suffice(num_needed):
                return
            self._preempt_largest()
            decoding = [job for job in decoding if job in self.running]

    def _replace_beams(self, job: NaiveJob) -> None:
        parents = [int(parent) for parent in job.generator.integers(job.n, size=job.n)]
        self.space.release([table for place, table in enumerate(job.tables) if place not in parents])
        beams = []
        for place, parent in enumerate(parents):
            is_first = parent not in parents[:place]
            beams.append(job.tables[parent] if is_first else self.space.fork(job.tables[parent]))
        job.tables = beams

    def _prefill(self, budget: int) -> int:
        """Append the next chunks; return the budget left."""
        for job in sorted((job for job in self.running if not job.is_prefilled), key=lambda job: job.key):
            if job not in self.running or budget <= 0:
                continue
            growing = [(job.tables[0], job.known()[len(job.tables[0].tokens) :][:budget])]
            while job in self.running and self.space.num_needed(growing) > len(self.space.device.free):
                if self._will_suffice(self.space.num_needed(growing)):
                    return budget
                self._preempt_largest()
            if job in self.running:
                self.space.append(growing)
                budget -= len(growing[0][1])
        return budget

    def _will_suffice(self, num_needed: int) -> bool:
        """Tell whether the next step has enough blocks, since this one gives some back at its end."""
        return num_needed <= len(self.space.device.free) + len(self.space.device.deferred)

    def _preempt_largest(self) -> None:
        assert len(self.running) > 1, "a request that is alone and was not rejected runs out of blocks"
        self._preempt(self._victim())

    def _victim(self) -> NaiveJob:
        return max(self.running, key=lambda job: job.key)

    def _preempt(self, job: NaiveJob) -> None:
        self.preempted_in_step = True
        job.num_preemptions += 1
        self.running.remove(job)
        has_appended = job in self.decoded_in_step
        self.decoded_in_step = [other for other in self.decoded_in_step if other is not job]
        num_swapped = job.n + sum(other.n for other in self.swapped)
        may_swap = self.config.preemption == "swap" and job.is_prefilled and not has_appended
        if may_swap and num_swapped <= self.config.max_sequences and self.space.can_swap_out(job.tables):
            num_moved = self.space.swap_out(job.tables)
            self.num_moved_blocks += num_moved
            self.measures.counts["num_swapped_out_blocks"] += num_moved
            self.measures.counts["num_swap"] += 1
            self.swapped.append(job)
            return
        job.most_computed = max(job.most_computed, *(table.num_computed for table in job.tables))
        self.space.release(job.tables)
        job.tables = []
        job.promised = 0
        job.is_prefilled = False
        job.begin_again()
        self.measures.counts["num_recompute"] += 1
        self.waiting.append(job)

    def _let_in(self, budget: int) -> None:
        for job in sorted(self.waiting + self.swapped, key=lambda job: job.key):
            if sum(other.n for other in self.running) + job.n > self.config.max_sequences:
                return
            if job in self.swapped:
                if not self._swap_in(job):
                    return
            elif budget <= 0 or (num_taken := self._admit(job, budget)) is None:
                return
            else:
                budget -= num_taken

    def _swap_in(self, job: NaiveJob) -> bool:
        num_slots = -(-self._num_slots(job) // job.n)
        is_too_long = job.num_known + num_slots > self.config.num_blocks * self.config.block_size
        if is_too_long or not self.space.can_swap_in(job.tables, num_slots):
            return False
        self.returned_in_step = True
        num_moved = self.space.swap_in(job.tables)
        self.num_moved_blocks += num_moved
        self.measures.counts["num_swapped_in_blocks"] += num_moved
        self.swapped.remove(job)
        self._promise(job)
        self.running.append(job)
        return True

    def _admit(self, job: NaiveJob, budget: int) -> int | None:
        known = job.known()
        if not self.space.can_allocate(known):
            return None
        num_slots = self._num_slots(job)
        is_too_long = len(known) + num_slots > self.config.num_blocks * self.config.block_size
        if num_slots and (is_too_long or not self.space.can_allocate(known, num_slots)):
            return None
        num_hit_tokens = len(self.space.hits(known)) * self.config.block_size
        self._promise(job)
        table = self.space.allocate(known[: num_hit_tokens + budget])
        job.tables = [table]
        self.waiting.remove(job)
        self.running.append(job)
        if job.admitted_at is None:
            self._see_first_admission(job, num_hit_tokens)
        return len(table.tokens) - num_hit_tokens

    # Promises

    def _growth(self, job: NaiveJob) -> int:
        return 0 if job.num_preemptions == 0 else FIRST_PROMISE * 2 ** (job.num_preemptions - 1)

    def _targets(self, job: NaiveJob) -> list[tuple[NaiveJob, int, int]]:
        """Those who run: the length of each, and that up to which it is to have room."""
        num_steps = -(-job.num_known // max(1, self.config.max_batched_tokens - self.config.max_sequences))
        growth = self._growth(job) + (num_steps if self._growth(job) else 0)
        lengths = [(other, len(other.tables[0].tokens)) for other in self.running]
        return [
            (other, length, max(other.promised, min(length + growth, other.final_length))) for other, length in lengths
        ]

    def _num_slots(self, job: NaiveJob) -> int:
        """Slots to be left free beside the known tokens of one who is to run."""
        if not self.running:
            return 0
        own = min(job.num_known + self._growth(job), job.final_length) - job.num_known
        growths = [(job, own)]
        for other, length, target in self._targets(job):
            num_known = 0 if other.is_prefilled else len(other.known())
            growths.append((other, max(target, num_known) - length))
        b = self.config.block_size
        return sum(other.n * (-(-growth // b) + 1) * b for other, growth in growths if growth > 0)

    def _promise(self, job: NaiveJob) -> None:
        if self._growth(job):
            job.promised = min(job.num_known + self._growth(job), job.final_length)
            for other, _, target in self._targets(job):
                other.promised = target

    def _see_first_admission(self, job: NaiveJob, num_hit_tokens: int) -> None:
        job.admitted_at = self.now
        counts = self.measures.counts
        counts["num_prompt_blocks"] += (len(job.prompt) - 1) // self.config.block_size
        counts["num_hit_blocks"] += num_hit_tokens // self.config.block_size
        counts["num_hit_tokens"] += num_hit_tokens
        counts["num_admitted_tokens"] += len(job.prompt)
        self.measures.queueing_s.append(self.now - job.arrival_s)

    # The end of a step

    def _carry_out(self) -> None:
        tables = [(job, table) for job in self.running for table in job.tables]
        ranges = [(table.num_computed, len(table.tokens), job) for job, table in tables]
        ranges = [(start, end, job) for start, end, job in ranges if start < end]
        counts = self.measures.counts
        counts["num_computed_tokens"] += sum(end - start for start, end, _ in ranges)
        for start, end, job in ranges:
            counts["num_recomputed_tokens"] += max(0, min(end, job.most_computed) - start)
        if self.decoded_in_step:
            self._see_decode_step()
        step_s = self.cost.step_s(
            sum(end - start for start, end, _ in ranges),
            sum(query + 1 for start, end, _ in ranges for query in range(start, end)),
            sum(end for _, end, _ in ranges),
            len(ranges),
        )
        if self.num_moved_blocks:
            step_s += self.cost.swap_s(self.num_moved_blocks * self.config.block_size)
        assert ranges or self.preempted_in_step or self.returned_in_step, "a step in which nothing happens"
        self._pass_time(self.now + step_s, is_step=True)
        for _, table in tables:
            table.num_computed = len(table.tokens)
        self.space.acknowledge()
        for job in sorted(self.running, key=lambda job: job.key):
            if job.is_computed:
                self._produce(job)

    def _produce(self, job: NaiveJob) -> None:
        job.num_produced += 1
        job.is_prefilled = True
        if job.first_token_at is None:
            job.first_token_at = self.now
            self.measures.first_token_s.append(self.now - job.arrival_s)
        if job.num_produced >= job.num_output:
            self.space.release(job.tables)
            self.running.remove(job)
            self.measures.request_s.append(self.now - job.arrival_s)
            self.measures.counts["num_finished"] += 1
            self.measures.counts["num_prompt_tokens"] += len(job.prompt)
            self.measures.counts["num_output_tokens"] += job.n * job.num_output
        elif len(job.tables) < job.n:
            job.tables += [self.space.fork(job.tables[0]) for _ in range(job.n - 1)]

    def _pass_time(self, until: float, *, is_step: bool) -> None:
        num_sequences = sum(len(job.tables) for job in self.running)
        lists = len(self.running), len(self.waiting), len(self.swapped)
        device = self.space.device
        pools = device.num_live, device.num_cached, device.num_empty
        self.measures.intervals.append(
            NaiveInterval(self.now, until - self.now, is_step, *lists, num_sequences, *pools)
        )
        self.now = until
        self.space.set_time(until)

    def _see_decode_step(self) -> None:
        self.measures.counts["num_decode_steps"] += 1
        finals = [job.final_length for job in self.running for _ in job.tables]
        reserved = {
            "exact": sum(finals),
            "power_of_two": sum(power_of_two(length) for length in finals),
            "maximum": self.max_length * len(finals),
        }
        self.measures.see_waste(self.space, [table for job in self.running for table in job.tables], reserved)
        several = [job for job in self.running if len(job.tables) > 1]
        num_distinct = sum(len({block for table in job.tables for block in table.blocks}) for job in several)
        if several:
            num_owned = sum(len(table.blocks) for job in several for table in job.tables)
            self.measures.savings.append(1 - num_distinct / num_owned)


def power_of_two(length: int) -> int:
    """Give the smallest power of two that is no smaller."""
    power = 1
    while power < length:
        power *= 2
    return power


def run(requests: Iterable[TokenizedRequest], config: NaiveConfig, cost: NaiveCost) -> dict[str, Any]:
    """Replay a trace."""
    return NaiveServer(config, cost).run(requests)
