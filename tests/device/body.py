"""A body for the state machines of the space: real tensors, driven by the plans that drive the simulated memory.

What stands at a position is the number of the prefix that ends there, as in :mod:`tests.space.memory_model`, written as
keys, values and states of every layer by the real kernels, at the slots that the real tables tell. Whatever the
simulated memory requires of a row, the tensors must hold as well.
"""

from collections.abc import Iterable, Iterator
from math import lcm
from typing import Self

import numpy as np
import torch

from pagedkv import SpaceConfig
from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.spec import StepId
from pagedkv.device import (
    BlockTables,
    GroupShape,
    KeyValueShape,
    KVStorage,
    PlanExecutor,
    StateShape,
    StateTensor,
    StepInputs,
    Transfers,
)
from pagedkv.device.kernels.selection import KernelChoice
from tests.space.memory_model import Device, Place, Step, host
from tests.space.sequence_model import GroupRule

__all__ = ["Body", "BodyDevice", "FailedForwardError"]

NUM_LAYERS = 2
POISON = 0xFF  # NaN in every type that is stored here


class FailedForwardError(Exception):
    """The model's code failed before it launched anything."""


def shapes_of(config: SpaceConfig) -> list[GroupShape]:
    """Shapes so that all groups of a pool have blocks of equal bytes."""
    shapes: list[GroupShape] = []
    for group in config.groups:
        if group.kind == "recurrent":
            tensors = (StateTensor("scan", (2, 2)), StateTensor("conv", (3,)))
            shapes.append(StateShape(NUM_LAYERS, tensors))
            continue
        sizes = [other.block_size for other in config.groups if other.pool == group.pool]
        shapes.append(KeyValueShape(NUM_LAYERS, 1, lcm(*sizes) // group.block_size, dtype=torch.float32))
    return shapes


class Body:
    """Storage, tables and executor of one space, and what they hold in the words of the simulated memory."""

    def __init__(
        self, config: SpaceConfig, groups: list[GroupRule], device: str = "cpu", kernels: KernelChoice = "auto"
    ) -> None:
        self.groups = groups
        self.storage = KVStorage(config, shapes_of(config), device)
        self.tables = BlockTables(config, max_batched_tokens=256, device=device, kernels=kernels, packet_entries=32)
        self.executor = PlanExecutor(self.storage, self.tables, transfers=Transfers(self.storage, kernels=kernels))
        self.has_failed = False
        for pool in self.storage.pools.values():
            pool.device_bytes[pool.block_nbytes :] = POISON
            pool.host_bytes.fill_(POISON)

    def poison(self, place: Place) -> None:
        """Make a block's content undefined."""
        label, block = place
        for name, pool in self.storage.pools.items():
            if label in {name, host(name)}:
                memory = pool.device_bytes if label == name else pool.host_bytes
                memory[block * pool.block_nbytes : (block + 1) * pool.block_nbytes] = POISON

    def tensors(self, group: GroupRule) -> Iterator[torch.Tensor]:
        """What holds a group's content: ``[num_blocks, slots, ...]`` each."""
        for layer in range(NUM_LAYERS):
            if group.is_state:
                yield from (state[:, None] for state in self.storage.states(group.index, layer).values())
            else:
                yield self.storage.keys(group.index, layer)
                yield self.storage.values(group.index, layer)

    def content(self, group: GroupRule, block: int, offset: int) -> set[float]:
        """Every number that stands in a slot, in any layer."""
        return {number for tensor in self.tensors(group) for number in tensor[block, offset].flatten().cpu().tolist()}

    def put(self, group: GroupRule, block: int, offset: int, number: int) -> None:
        """Write a slot from outside."""
        for tensor in self.tensors(group):
            tensor[block, offset] = code(group, number)

    def require(self, group: GroupRule, block: int, offset: int, number: int) -> None:
        """Assert that a slot holds a prefix, in every layer, key and value."""
        found = self.content(group, block, offset)
        assert found == {code(group, number)}, (
            f"group {group.index}: block {block}, offset {offset} holds {found} instead of {code(group, number)}"
        )

    # Steps

    def run(self, step: Step) -> None:
        """Carry a plan out, compute its positions, and read back all that they read."""
        inputs = self.executor.launch(step.plan, lambda inputs: self._forward(step, inputs))
        for group in self.groups:
            table = inputs.block_tables[group.index].cpu()
            for place, (row, start, end) in enumerate(step.ranges_in(group)):
                prefixes = step.views[row].prefixes
                first = step.first_open(row) if group.num_draft_states else end
                read = step.read_in(group, row, start, end)
                positions = group.kept(min(first, end)) if group.is_state else step.views[row].exact(group, read)
                for position in positions if start < end else ():
                    index, offset = group.slot(position)
                    self.require(group, int(table[place, index]), offset, prefixes[position])
                for index in group.indices(step.masked_in(group, row, start)):
                    assert int(table[place, index]) == 0, f"group {group.index}: entry {index} cannot be masked"

    def fail(self, step: Step) -> None:
        """Carry a plan out up to its forward pass, which fails."""

        def forward(_: StepInputs) -> None:
            raise FailedForwardError

        try:
            self.executor.launch(step.plan, forward)
        except FailedForwardError:
            self.has_failed = True
            return
        raise AssertionError("a failed forward pass was not told")

    def abort(self, step_ids: Iterable[int]) -> None:
        """Tell the executor which steps the space has aborted."""
        self.executor.abort(AbortedSteps(tuple(map(StepId, step_ids)), (), ()))
        self.has_failed = False

    def refuse(self, step_id: int, refused: dict[int, int]) -> None:
        """Record how many tokens a step has refused, by row."""
        device = self.storage.device
        rows, counts = (
            torch.tensor(list(values), dtype=torch.int32, device=device)
            for values in zip(*refused.items(), strict=True)
        )
        self.tables.record_refused(step_id, rows, counts)

    def _forward(self, step: Step, inputs: StepInputs) -> StepInputs:
        for group in self.groups:
            ranges = step.ranges_in(group)
            starts, ends = (array[group.index].tolist() for array in (inputs.starts, inputs.seq_lens))
            rows = [row for row, _, _ in ranges]
            assert list(zip(rows, starts, ends, strict=True)) == ranges, "ranges did not move as tokens were refused"
            assert inputs.rows.tolist() == rows, "other rows stand at the places"
            tokens = [(place, at) for place, (_, start, end) in enumerate(ranges) for at in range(start, end)]
            told = inputs.places(group.index).tolist(), inputs.positions(group.index).tolist()
            assert list(zip(*told, strict=True))[: len(tokens)] == tokens, "tokens stand elsewhere"
            assert {*told[0][len(tokens) :], *told[1][len(tokens) :]} <= {-1}, "behind the tokens stand others"
            if group.is_state:
                self._write_states(group, step, inputs)
            else:
                self._write_tokens(group, step, inputs)
        return inputs

    def _write_tokens(self, group: GroupRule, step: Step, inputs: StepInputs) -> None:
        prefixes = [
            step.views[row].number(group, position)
            for row, start, end in step.ranges_in(group)
            for position in range(start, end)
        ]
        assert int(inputs.query_start_loc[group.index, -1]) == len(prefixes)
        slots = inputs.slot_mappings[group.index]
        assert bool((slots[len(prefixes) :] == -1).all()), "slots behind the tokens are not padded"
        codes = torch.tensor([code(group, prefix) for prefix in prefixes], dtype=torch.float32)
        dim = self.storage.keys(group.index, 0).shape[-1]
        content = codes.to(self.storage.device)[:, None, None].expand(-1, 1, dim)
        # Rows that share a block may write one slot twice, the same content: a kernel is not asked to.
        _, first = np.unique(slots[: len(prefixes)].cpu().numpy(), return_index=True)
        once = torch.full_like(slots[: len(prefixes)], -1)
        once[first] = slots[first]
        for layer in range(NUM_LAYERS):
            self.executor.transfers.reshape_and_cache(group.index, layer, content, content, once)

    def _write_states(self, group: GroupRule, step: Step, inputs: StepInputs) -> None:
        """Read each row's state where the inputs say it is, then write one behind every position that is to keep it."""
        read, last = (blocks.tolist() for blocks in inputs.state_blocks(group.index))
        written = inputs.state_writes(group.index)
        offsets = inputs.query_start_loc[group.index].tolist()
        kept, codes = [], []
        for place, (row, start, end) in enumerate(step.ranges_in(group)):
            if start >= end:
                continue
            prefixes = step.views[row].prefixes
            if start:
                self.require(group, read[place], 0, prefixes[start - 1])
            in_table, in_slots = group.written_by(start, end, step.first_open(row))
            kept += [offsets[place] + position - start for position in (*in_table, *in_slots)]
            codes += [code(group, prefixes[position]) for position in (*in_table, *in_slots)]
            assert last[place] == int(written[offsets[place + 1] - 1])
        assert written.nonzero().flatten().tolist() == sorted(kept), "other positions keep their states"
        assert len(set(written[kept].tolist())) == len(kept), "two states go to one block"
        self._scatter(group, written[kept], codes)

    def _scatter(self, group: GroupRule, blocks: torch.Tensor, numbers: list[float]) -> None:
        for layer in range(NUM_LAYERS):
            states = {}
            for name, state in self.storage.states(group.index, layer).items():
                content = torch.tensor(numbers, device=state.device).view(-1, *[1] * (state.ndim - 1))
                states[name] = content.expand(-1, *state.shape[1:])
            self.executor.transfers.scatter_states(group.index, layer, blocks, states)


def code(group: GroupRule, prefix: int) -> float:
    """What stands for a prefix: exact in float32."""
    return float(16 * prefix + group.index)


class BodyDevice(Device):
    """The simulated memory, and a body that must hold the same wherever a row relies on it."""

    def __init__(self, groups: list[GroupRule], num_blocks: dict[str, int], body: Body) -> None:
        super().__init__(groups, num_blocks)
        self.body = body

    @classmethod
    def beside(cls, device: Device, groups: list[GroupRule], body: Body) -> Self:
        """Put a body beside a simulated memory that has held nothing yet."""
        made = cls(groups, {label: len(blocks) for label, blocks in device.memory.items()}, body)
        made.max_epoch_lag = device.max_epoch_lag
        return made

    def forget(self, place: Place) -> None:
        """Poison the block as well."""
        super().forget(place)
        self.body.poison(place)

    def put(self, group: GroupRule, table: list[int], prefixes: list[int], positions: Iterable[int]) -> None:
        """Write to the tensors as well."""
        places = list(positions)
        super().put(group, table, prefixes, places)
        for position in places:
            index, offset = group.slot(position)
            self.body.put(group, table[index], offset, prefixes[position])

    def expect(self, group: GroupRule, table: list[int], prefixes: list[int], positions: Iterable[int]) -> None:
        """Assert that the tensors hold it as well, once it has arrived."""
        places = list(positions)
        super().expect(group, table, prefixes, places)
        for position in places:
            index, offset = group.slot(position)
            if self.memory[group.pool][table[index]][offset] == (group.index, prefixes[position]):
                self.body.require(group, table[index], offset, prefixes[position])

    def run(self, step: Step) -> None:
        """Carry the plan out on the tensors as well."""
        super().run(step)
        self.body.run(step)
        self._require_zeroed(step)

    def fail(self, step: Step, num_parts: int, *, garbage: bool) -> None:
        """Let the forward pass of the first step that fails do so on the tensors; those behind are never launched."""
        super().fail(step, num_parts, garbage=garbage)
        if num_parts and not self.body.has_failed:
            self.body.fail(step)

    def _require_zeroed(self, step: Step) -> None:
        """No new block holds anything stale: zeros, or what the step wrote."""
        for new in step.plan.new_blocks:
            pool = self.body.storage.pools[new.pool]
            for block in new.block_ids.tolist():
                content = pool.device_bytes[block * pool.block_nbytes : (block + 1) * pool.block_nbytes]
                assert not bool(content.view(torch.float32).isnan().any()), f"block {block} holds what was stale"
