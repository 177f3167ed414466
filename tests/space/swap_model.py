"""Sequences that move to the host pools and back."""

from collections import Counter

from pagedkv.contract.plan import BlockMoves
from tests.space.live_model import LiveModel
from tests.space.memory_model import Move, Place, host
from tests.space.sequence_model import ModelSequence, Status
from tests.space.tenant_model import Needs, Tenant

__all__ = ["SwapModel"]


class SwapModel(LiveModel):
    """What swapping must answer and do."""

    def _num_moved(self, batch: list[ModelSequence]) -> dict[str, int]:
        """Different blocks with content that sequences hold, by label: as many, at most, a swap takes."""
        moved: dict[str, set[int]] = {}
        for sequence in batch:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                with_content = table[: group.num_blocks(len(sequence.tokens))]
                moved.setdefault(self.label(group, sequence), set()).update(block for block in with_content if block)
        return {label: len(blocks) for label, blocks in moved.items()}

    def swap_out_needs(self, batch: list[ModelSequence]) -> dict[str, int]:
        """Host blocks, by label, that swapping out takes."""
        return {host(pool): count for pool, count in self._num_moved(batch).items()}

    def swap_in_needs(self, batch: list[ModelSequence]) -> dict[str, int]:
        """Device blocks, by pool, that swapping in takes."""
        by_label = self._num_moved(batch)
        return {pool: by_label[host(pool)] for pool in self.config.pool_names if host(pool) in by_label}

    def arrival_needs(self, batch: list[ModelSequence]) -> Needs:
        """Device blocks that swapping in takes if nothing is there, by tenant: of several the first pays."""
        payers: dict[Place, Tenant] = {}
        for sequence in batch:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                for block in table[: group.num_blocks(len(sequence.tokens))]:
                    payers.setdefault((group.pool, block), sequence.tenant)
        counted = Counter((tenant, pool) for (pool, block), tenant in payers.items() if block)
        return {
            tenant: {pool: counted[tenant, pool] for pool in self.config.pool_names} for tenant in self.tenants.names
        }

    def is_moved_into(self, batch: list[ModelSequence]) -> bool:
        """Whether these sequences cannot leave now.

        The open plan copies or swaps into blocks with content of one, or it has open states, or what a replay left.
        """
        is_open = self.keeps_draft_states and any(each.num_accepted < len(each.tokens) for each in batch)
        if any(sequence.is_replaying(group) for sequence in batch for group in self.groups):
            return True
        return is_open or any(
            (group.pool, block) in self.open_written
            for sequence in batch
            for group in self.groups
            for block in sequence.tables[group.index][: group.num_blocks(len(sequence.tokens))]
        )

    def swapped_over(self, batch: list[ModelSequence], moves: tuple[BlockMoves, ...], *, to_host: bool) -> None:
        """Sequences were moved: every block with content once, shared ones still shared, by the plan's moves.

        A full block may be shared with what the other side holds already: reading the memory back shows if rightly.
        """
        told = {
            (move.pool, source): target
            for move in moves
            for source, target in zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)
        }
        moved: dict[Place, int] = {}
        payers: dict[Place, Tenant] = {}
        shared: dict[Place, set[Tenant]] = {}
        for sequence in batch:
            before, sequence.tables = sequence.tables, self.read_tables(sequence.row)
            sequence.slots = self.read_slots(sequence.row)
            assert not any(map(any, sequence.slots)), "a row was moved with draft states"
            for group, old, table in zip(self.groups, before, sequence.tables, strict=True):
                assert len(table) == group.num_blocks(len(sequence.tokens))
                num_full = 0 if group.stays_out else sequence.num_planned // group.block_size
                for index, (source, target) in enumerate(zip(old, table, strict=False)):
                    assert bool(source) == bool(target)
                    payers.setdefault((group.pool, source), sequence.tenant)
                    if source and (group.pool, source) not in told:
                        assert index < num_full, "a block that is not full and computed was not moved"
                        self.seen["twin"] += 1
                        shared.setdefault((group.pool, target), set()).add(payers[group.pool, source])
                    elif source and moved.setdefault((group.pool, source), target) != target:
                        message = f"block {source} was moved to {target} and elsewhere"
                        raise AssertionError(message)
            sequence.status = Status.SWAPPED if to_host else Status.RUNNING
            if self.receipts and not to_host:
                self.receipts.returned(sequence, sequence.num_planned)
            sequence.on_host = to_host
            sequence.era += 1
        assert told == moved
        for (pool, target), tenants in shared.items() if not to_host else ():
            self.payer = min(tenants, key=self.tenants.names.index)
            self.hit(pool, target)
        for (pool, source), target in moved.items():
            here, there = (pool, host(pool)) if to_host else (host(pool), pool)
            self.payer = payers[pool, source]
            self.hand_out(there, target)
            self.open_moves.append(Move("swap out" if to_host else "swap in", (here, source), (there, target)))
        self.seen["swap out" if to_host else "swap in"] += 1
