"""Cross-attention over the tensors of a space: encoders are written once, and every row reads its own whole."""

import pytest
import torch

from pagedkv import BlockSpace, CrossAttention, FullAttention, MediaSpan, RequestKeys, SpaceConfig, StepPlan
from pagedkv.contract.plan import TokenRanges
from pagedkv.device import BlockTables, KeyValueShape, KVStorage, PlanExecutor, StepInputs
from pagedkv.errors import TensorError

CONFIG = SpaceConfig(
    (FullAttention(4), CrossAttention(11, 4, pool="encoders")),
    num_blocks={"device": 40, "encoders": 12},
    num_host_blocks={"device": 20, "encoders": 12},
    max_sequences=6,
    max_tokens=40,
)
HEADS, DIM = 2, 8
LENGTHS = {0: 11, 1: 3, 2: 0}
"""Tokens of each encoder."""


def states_of(encoder: int, device: torch.device) -> torch.Tensor:
    """An encoder's keys, and with another sign its values: ``[tokens, heads, dim]``."""
    generator = torch.Generator().manual_seed(encoder)
    return torch.randn(LENGTHS[encoder], HEADS, DIM, generator=generator).to(device)


class Decoder:
    """One layer of cross-attention over the storage of a space, and the encoder of each row."""

    def __init__(self, device: torch.device) -> None:
        shape = KeyValueShape(1, HEADS, DIM, dtype=torch.float32)
        self.space, self.device = BlockSpace(CONFIG), device
        self.storage = KVStorage(CONFIG, [shape, shape], device)
        self.executor = PlanExecutor(self.storage, BlockTables(CONFIG, max_batched_tokens=64, device=device))
        self.encoder_of: dict[int, int] = {}

    def admit(self, encoder: int) -> int:
        """Admit a prompt with an encoder."""
        keys = RequestKeys(media=(MediaSpan(0, 1, b"%d" % encoder),))
        row = self.space.allocate([1, 2, 3], keys=keys, num_encoder_tokens=LENGTHS[encoder]).row
        self.encoder_of[row] = encoder
        return row

    def step(self) -> None:
        """Run a step, and compare what every row computes with dense attention."""
        plan = self.space.plan_step()
        self.executor.launch(plan, lambda inputs: self._forward(plan, inputs))
        self.space.acknowledge(plan.step_id)
        self.space.check()

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> None:
        keys, values = self.storage.keys(1, 0), self.storage.values(1, 0)
        ranges: TokenRanges = plan.compute_in(1)
        written = [
            states_of(self.encoder_of[row], self.device)[start:end]
            for row, start, end in zip(ranges.rows.tolist(), ranges.starts.tolist(), ranges.ends.tolist(), strict=True)
        ]
        new = torch.cat([torch.empty(0, HEADS, DIM, device=self.device), *written])
        slots = inputs.slot_mappings[1, : len(new)]
        assert (inputs.slot_mappings[1, len(new) :] == -1).all()
        keys[slots // 4, slots % 4], values[slots // 4, slots % 4] = new, -new
        table = inputs.padded_block_table(1)
        for place, row in enumerate(inputs.rows.tolist()):
            num_tokens = int(inputs.seq_lens[1, place])
            read, value = (side[table[place].long()].flatten(0, 1)[:num_tokens] for side in (keys, values))
            own = states_of(self.encoder_of[row], self.device)
            assert torch.equal(read, own)
            query = torch.ones(HEADS, 1, DIM, device=self.device)
            attended, expected = (
                torch.nn.functional.scaled_dot_product_attention(query, left.transpose(0, 1), right.transpose(0, 1))
                for left, right in ((read, value), (own, -own))
            )
            assert torch.equal(attended, expected)


def test_every_row_attends_to_its_own_encoder(device: torch.device) -> None:
    """Forked, grown, swapped, and admitted again after others have had the blocks."""
    decoder = Decoder(device)
    space = decoder.space
    first, second = decoder.admit(0), decoder.admit(1)
    without = decoder.admit(2)
    decoder.step()
    for child in space.fork(first, 2).tolist():
        decoder.encoder_of[child] = 0
    everyone = list(decoder.encoder_of)
    space.append(everyone, [4] * len(everyone))
    decoder.step()
    space.swap_out([first])
    decoder.step()
    space.free([second, without])
    again = decoder.admit(1)
    decoder.step()
    space.swap_in([first])
    decoder.step()
    rows = [row for row in everyone if row not in {second, without}] + [again]
    space.append(rows, [5] * len(rows))
    decoder.step()


def test_a_plan_that_writes_more_entries_than_there_are_slots_is_refused(device: torch.device) -> None:
    space, tables = BlockSpace(CONFIG), BlockTables(CONFIG, max_batched_tokens=12, device=device)
    keys = RequestKeys(media=(MediaSpan(0, 1, b"a sound"),))
    for _ in range(2):
        space.allocate([1, 2, 3], keys=keys, num_encoder_tokens=6)
    tables.step(space.plan_step())
    for _ in range(2):
        space.allocate([1, 2, 3], keys=keys, num_encoder_tokens=7)
    with pytest.raises(TensorError, match="writes 14 positions in group 1, but there are slots for 12"):
        tables.step(space.plan_step())
