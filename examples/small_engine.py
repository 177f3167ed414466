"""A complete engine in one file: admission, chunked prefill, decoding, preemption by swapping and by recomputing.

    python examples/small_engine.py

docs/guide.md builds this engine piece by piece and says what each piece relies on. The device is a NumPy array in
which a token stands for its own keys and values, so what the "model" attends to can be compared with the request's
tokens. The pool is far too small on purpose.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv import AllocStatus, BlockSpace, FullAttention, Shortage, SpaceConfig, StepPlan

BLOCK, CHUNK, VOCABULARY = 4, 8, 1000


@dataclass(eq=False)
class Request:
    """What is to be generated; ``row`` is its sequence in the space."""

    tokens: list[int]
    num_wanted: int
    row: int = -1


class Device:
    """Carries plans out; moves of blocks first, then what the step computes."""

    def __init__(self, config: SpaceConfig) -> None:
        self.kv = np.full((config.blocks_by_pool()["device"], BLOCK), -1)
        self.host_kv = np.full((config.host_blocks_by_pool()["device"], BLOCK), -1)

    def run(self, plan: StepPlan, slots: npt.NDArray[np.int64], new_tokens: list[int]) -> None:
        """Run one step: ``slots`` is where each new token goes."""
        for moves in plan.swaps_out:
            self.host_kv[moves.dst_ids] = self.kv[moves.src_ids]
        for moves in plan.swaps_in:
            self.kv[moves.dst_ids] = self.host_kv[moves.src_ids]
        for moves in plan.copies:
            self.kv[moves.dst_ids] = self.kv[moves.src_ids]
        self.kv.reshape(-1)[slots] = new_tokens


def next_token(context: list[int]) -> int:
    """Stand in for a model: any function of the whole context."""
    return (31 * sum(context) + len(context)) % VOCABULARY


class Engine:
    """Serves requests in order of arrival; the latest one is preempted first."""

    def __init__(self, config: SpaceConfig) -> None:
        self.space, self.device = BlockSpace(config), Device(config)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped: deque[Request] = deque()
        self.num_swaps = self.num_recomputes = self.num_hit_tokens = 0

    def step(self) -> None:
        """Schedule, plan, run, acknowledge."""
        if self._grow():  # no shortage: there may be room for more sequences
            self._resume()
            self._admit()
        plan = self.space.plan_step()
        ends = dict(zip(plan.compute.rows.tolist(), plan.compute.ends.tolist(), strict=True))
        starts = dict(zip(plan.compute.rows.tolist(), plan.compute.starts.tolist(), strict=True))
        texts = {request.row: request.tokens for request in self.running}
        new_tokens = [token for row, start in starts.items() for token in texts[row][start : ends[row]]]
        self.device.run(plan, self.space.slot_mapping(plan), new_tokens)
        self.space.acknowledge(plan.step_id)
        for request in [request for request in self.running if ends.get(request.row) == len(request.tokens)]:
            context = self._read(request)
            assert context == request.tokens, "the memory holds the request's own tokens"
            request.tokens.append(next_token(context))
            if len(request.tokens) == request.num_wanted:
                self.space.free(request.row)
                self.running.remove(request)

    def _read(self, request: Request) -> list[int]:
        where, table = np.arange(self.space.num_tokens(request.row)), np.array(self.space.block_ids(request.row))
        context: list[int] = self.device.kv[table[where // BLOCK], where % BLOCK].tolist()
        return context

    def _grow(self) -> bool:
        if self._append(self.running):
            return True
        self._preempt(self.running.pop())
        self._append(self.running)
        return False

    def _append(self, requests: list[Request]) -> bool:
        rows = [request.row for request in requests]
        new = [request.tokens[self.space.num_tokens(request.row) :][:CHUNK] for request in requests]
        flat = [token for tokens in new for token in tokens]
        return not isinstance(self.space.append(rows, flat, [len(tokens) for tokens in new]), Shortage)

    def _preempt(self, request: Request) -> None:
        if self.space.can_swap_out(request.row) is AllocStatus.OK:
            self.space.swap_out(request.row)
            self.swapped.append(request)
            self.num_swaps += 1
        else:  # its full blocks stay cached until they are evicted
            self.space.free(request.row)
            self.waiting.appendleft(request)
            self.num_recomputes += 1

    def _resume(self) -> None:
        while self.swapped and self.space.can_swap_in(self.swapped[0].row) is AllocStatus.OK:
            self.space.swap_in(self.swapped[0].row)
            self.running.append(self.swapped.popleft())

    def _admit(self) -> None:
        while self.waiting and not self.swapped:
            tokens = self.waiting[0].tokens
            hit = self.space.match(tokens)
            if self.space.can_allocate(tokens, match=hit) is not AllocStatus.OK:
                break
            allocation = self.space.allocate(tokens[: hit.num_tokens + CHUNK], match=hit)
            assert not isinstance(allocation, Shortage)
            self.num_hit_tokens += allocation.num_hit_tokens
            self.waiting[0].row = allocation.row
            self.running.append(self.waiting.popleft())


def main() -> None:
    """Serve five requests that begin alike in a pool that holds two of them at their full length."""
    groups = (FullAttention(block_size=BLOCK),)
    engine = Engine(SpaceConfig(groups, 16, num_host_blocks=8, max_sequences=8, max_tokens=64, watermark=0.1))
    engine.waiting.extend(Request([*range(8), *range(10 * n, 10 * n + 6)], num_wanted=32) for n in range(5))
    num_steps = 0
    while engine.waiting or engine.running or engine.swapped:
        engine.step()
        num_steps += 1
    print(f"5 requests in {num_steps} steps and 15 blocks: {engine.num_swaps} swapped out and in, ", end="")
    print(
        f"{engine.num_recomputes} computed again, {engine.num_hit_tokens} tokens hit; the memory was right throughout"
    )


if __name__ == "__main__":
    main()
