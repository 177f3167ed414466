"""A plan's buffer written down plainly, word by word: what the compiled loops must produce, and plans for tests."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import xxhash

from pagedkv.contract.plan import (
    BlockMoves,
    DraftStates,
    NewBlocks,
    StepPlan,
    TableWrites,
    TokenRanges,
    UnknownTokens,
)

__all__ = ["SUMS", "XXH3", "Parts", "as_plain", "pack", "pack_like", "parts_of", "repacked", "sealed"]

XXH3 = 1
SUMS = 2


@dataclass(frozen=True)
class Parts:
    """What a plan says, apart from its buffer, so that tests can change it."""

    step_id: int
    swaps_out: tuple[BlockMoves, ...]
    swaps_in: tuple[BlockMoves, ...]
    copies: tuple[BlockMoves, ...]
    table_writes: tuple[TableWrites, ...]
    compute: TokenRanges
    new_blocks: tuple[NewBlocks, ...]
    compute_outside: Mapping[int, TokenRanges]
    unknown: UnknownTokens | None
    draft_states: DraftStates | None = None


def parts_of(plan: StepPlan) -> Parts:
    """Read every part of a plan."""
    return Parts(*(getattr(plan, item.name) for item in fields(Parts)))


def as_plain(value: Any) -> Any:  # noqa: ANN401 - parts of a plan, or anything in them
    """Turn parts into tuples, lists and numbers that can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return {item.name: as_plain(getattr(value, item.name)) for item in fields(value)}
    return value


def pack(  # noqa: PLR0913 - what the layout has in its header
    plan: Parts,
    pool_names: tuple[str, ...],
    num_tables: int,
    *,
    has_draft_states: bool = False,
    fingerprint: bytes = bytes(16),
    num_groups: int | None = None,
    checksum_kind: int = XXH3,
) -> bytes:
    """Write a plan as the layout is drawn; without ``num_groups`` there are no second tables."""
    moves = {
        kind: {part.pool: part for part in parts}
        for kind, parts in enumerate((plan.swaps_out, plan.swaps_in, plan.copies), start=2)
    }
    writes = {part.group: part for part in plan.table_writes}
    new = {part.pool: part.block_ids.tolist() for part in plan.new_blocks}
    parts: list[tuple[int, int, list[list[int]]]] = [(1, 0, [_names(pool_names)])]
    for kind, by_pool in moves.items():
        for owner, name in enumerate(pool_names):
            part = by_pool.get(name)
            parts.append((kind, owner, [part.src_ids.tolist(), part.dst_ids.tolist()] if part else [[], []]))
    for group in range(num_tables):
        run = writes.get(group)
        runs = [run.rows.tolist(), run.starts.tolist(), run.counts.tolist()] if run else [[], [], []]
        parts += [(5, group, runs), (6, group, [run.block_ids.tolist() if run else []])]
    parts.append((7, 0, [plan.compute.rows.tolist(), plan.compute.starts.tolist(), plan.compute.ends.tolist()]))
    parts += [(8, owner, [new.get(name, [])]) for owner, name in enumerate(pool_names)]
    unknown = [plan.unknown.counts.tolist(), plan.unknown.steps_back.tolist()] if plan.unknown else [[], []]
    parts.append((10, 0, unknown))
    parts += [(9, group, [ranges.starts.tolist()]) for group, ranges in sorted(plan.compute_outside.items())]
    if has_draft_states:
        parts.append((11, 0, [plan.draft_states.firsts.tolist() if plan.draft_states else []]))
    directory: list[int] = []
    body: list[int] = []
    first = 16 + 4 * len(parts)
    for kind, owner, arrays in parts:
        directory += [kind, owner, first + len(body) if arrays[0] else 0, len(arrays[0])]
        for array in arrays:
            body += array + [0] * (-len(array) % 4)
    header = struct.pack("<4s3i", b"pkvP", 5, first + len(body), len(parts))
    header += struct.pack("<q2i", plan.step_id, len(pool_names), num_tables) + fingerprint
    header += struct.pack("<2i", num_tables if num_groups is None else num_groups, checksum_kind)
    return sealed(header + bytes(8) + struct.pack(f"<{len(directory) + len(body)}i", *directory, *body))


def sealed(plan: bytes) -> bytes:
    """Give a plan's bytes the checksum that belongs to them, of the kind that they name."""
    before, behind = plan[:56], plan[64:]
    if plan[52:56] == XXH3.to_bytes(4, "little"):
        checksum = xxhash.xxh3_64_intdigest(before + bytes(8) + behind)
    else:
        words = struct.unpack(f"<{len(plan) // 4}I", before + bytes(8) + behind)
        weighted = sum(place * word for place, word in enumerate(words, start=1)) % 2**64
        checksum = sum(words) % 2**32 + ((weighted ^ weighted >> 32) % 2**32 << 32)
    return before + struct.pack("<Q", checksum) + behind


def pack_like(parts: Parts, like: StepPlan) -> bytes:
    """Write parts as those of a plan that is laid out like another one."""
    names, num_tables, has_draft_states = _laid_out_for(like)
    fingerprint = like.buffer[8:12].tobytes()
    num_groups, checksum_kind = like.buffer[12:14].tolist()
    return pack(
        parts,
        names,
        num_tables,
        has_draft_states=has_draft_states,
        fingerprint=fingerprint,
        num_groups=num_groups,
        checksum_kind=checksum_kind,
    )


def repacked(parts: Parts, like: StepPlan) -> StepPlan:
    """Make a plan of parts that were changed; ``like`` is the plan they were read from."""
    return StepPlan.from_buffer(pack_like(parts, like))


def _laid_out_for(plan: StepPlan) -> tuple[tuple[str, ...], int, bool]:
    """Read from a buffer what its plan was laid out for."""
    num_parts = int(plan.buffer[3])
    num_pools, num_tables = plan.buffer[6:8].tolist()
    offset = int(plan.buffer[18])
    names = []
    for _ in range(num_pools):
        nbytes = int(plan.buffer[offset])
        names.append(plan.buffer[offset + 1 :].tobytes()[:nbytes].decode())
        offset += 1 + -(-nbytes // 4)
    return tuple(names), num_tables, int(plan.buffer[16 + 4 * (num_parts - 1)]) == 11


def _names(pool_names: tuple[str, ...]) -> list[int]:
    packed = b""
    for name in pool_names:
        encoded = name.encode()
        packed += struct.pack("<i", len(encoded)) + encoded + b"\0" * (-len(encoded) % 4)
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))
