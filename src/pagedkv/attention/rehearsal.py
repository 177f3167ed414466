"""Runs a step of attention on a CPU, so that every loop of it is compiled (:mod:`pagedkv.warming`)."""

import torch

from pagedkv.attention.backend import AttentionLayer, GroupMetadata, StepMetadata
from pagedkv.attention.cpu import CPUBackend
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention
from pagedkv.device import KeyValueShape, KVStorage


def rehearse() -> None:
    """Write the keys and values of two sequences, and compute attention of their last tokens.

    One compilation serves layers of all kinds and sizes, and any number of sequences.
    """
    config = SpaceConfig((FullAttention(block_size=2),), num_blocks=4, max_sequences=2, max_tokens=4)
    group = GroupMetadata(
        block_tables=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        starts=torch.tensor([2, 0], dtype=torch.int32),
        seq_lens=torch.tensor([3, 1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        slot_mapping=torch.tensor([4, 6]),
    )
    step = StepMetadata((group,), num_places=2, num_tokens=2)
    layer = AttentionLayer(group=0, index=0, num_heads=1, scale=1.0)
    for dtype in (torch.float32, torch.bfloat16):
        storage = KVStorage(config, [KeyValueShape(num_layers=1, num_heads=1, key_dim=2, dtype=dtype)], "cpu")
        backend = CPUBackend(storage, [layer])
        tokens = torch.ones(2, 1, 2, dtype=dtype)
        backend.write(0, tokens, tokens, step)
        backend.attend(0, tokens, step)
