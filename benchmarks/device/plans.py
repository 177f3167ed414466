"""Plans of a given shape, written straight into buffers: they need no space of a thousand long sequences."""

from collections.abc import Sequence

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.plan_buffer import (
    COMPUTE,
    ENTRIES,
    HEADER_WORDS,
    LENGTH,
    LINE_WORDS,
    OFFSET,
    RUNS,
    PlanLayout,
    padded,
    seal,
)

__all__ = ["decode_plan", "make_plan", "prefill_plan"]

Runs = tuple[Int32Array, Int32Array, Int32Array, Int32Array]
"""Rows, starts, counts and block ids of one group's table writes."""


def make_plan(config: SpaceConfig, step_id: int, ranges: Sequence[Int32Array], runs: Sequence[Runs]) -> StepPlan:
    """Write a plan: ``ranges`` are rows, starts and ends; ``runs`` are each group's."""
    layout = PlanLayout(config)
    parts: list[tuple[int, list[Int32Array]]] = []
    for group, (rows, starts, counts, block_ids) in enumerate(runs):
        parts.append((layout.lines[RUNS, group], [rows, starts, counts]))
        parts.append((layout.lines[ENTRIES, group], [block_ids]))
    parts.append((layout.lines[COMPUTE, 0], list(ranges)))
    parts = [(line, arrays) for line, arrays in parts if len(arrays[0])]
    words = layout.new_buffer(step_id, sum(len(arrays) * padded(len(arrays[0])) for _, arrays in parts))
    end = len(layout.template)
    words[end:] = 0
    for line, arrays in parts:
        entry = HEADER_WORDS + LINE_WORDS * line
        words[entry + OFFSET], words[entry + LENGTH] = end, len(arrays[0])
        for array in arrays:
            words[end : end + len(array)] = array
            end += padded(len(array))
    words[2] = end
    seal(words)
    return StepPlan.from_buffer(words)


def decode_plan(config: SpaceConfig, step_id: int, lengths: Int32Array) -> StepPlan:
    """One token a row, behind ``lengths``; a row whose token begins a block gets one."""
    rows = np.arange(len(lengths), dtype=np.int32)
    runs = []
    for group in config.groups:
        fresh = rows[lengths % group.block_size == 0]
        ids = (1 + (fresh * 7 + step_id) % (config.blocks_by_pool()[group.pool] - 1)).astype(np.int32)
        runs.append((fresh, lengths[fresh] // group.block_size, np.ones(len(fresh), np.int32), ids))
    return make_plan(config, step_id, (rows, lengths, lengths + 1), runs)


def prefill_plan(config: SpaceConfig, step_id: int, num_rows: int, num_blocks: int) -> StepPlan:
    """Some rows that begin, each with as many new blocks in every group, and all their tokens to compute."""
    rows = np.arange(num_rows, dtype=np.int32)
    zeros, counts = np.zeros(num_rows, np.int32), np.full(num_rows, num_blocks, np.int32)
    runs = []
    for group in config.groups:
        ids = 1 + np.arange(num_rows * num_blocks, dtype=np.int32) % (config.blocks_by_pool()[group.pool] - 1)
        runs.append((rows, zeros, counts, ids.astype(np.int32)))
    return make_plan(config, step_id, (rows, zeros, counts * config.groups[0].block_size), runs)
