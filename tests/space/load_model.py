"""Loads: what reserving a prefix that comes from elsewhere must hold, and what finishing it leaves."""

from pagedkv import KeptState, Load, Shortage
from pagedkv.contract.keys import RequestKeys
from tests.space.live_model import LiveModel, ModelKeptState, ModelLoad
from tests.space.sequence_model import ModelSequence
from tests.space.tenant_model import Tenant

__all__ = ["LoadModel"]


class LoadModel(LiveModel):
    """What loads must answer and do."""

    def load_shortage(self, answer: Shortage, num_tokens: int) -> None:
        """A load was refused for a real shortage, and nothing changed."""
        inside = [group for group in self.groups if group.pool == answer.pool and not group.stays_out]
        assert answer.num_needed <= sum(group.num_blocks(num_tokens) for group in inside)
        self._require_real(answer)

    def begun(
        self, answer: Load, tokens: list[int], keys: RequestKeys, epochs: tuple[int, int], tenant: Tenant
    ) -> None:
        """A load got its blocks: they were unreferenced, and suffice for a hit at its end."""
        self.payer = tenant
        root = self.prefixes.root(keys, self.generation)
        prefixes = self.prefixes.extend(root, keys, 0, tokens[: answer.num_tokens])
        held = self.space._state.held
        places = {(t.pool, block) for t in self.space._state.loads[answer].tickets for block in held[t].tolist()}
        new = {
            (group.pool, block) for group, blocks in zip(self.groups, answer.block_ids, strict=True) for block in blocks
        }
        for pool, block in places - new:
            self.hit(pool, block)
        for group, blocks in zip(self.groups, answer.block_ids, strict=True):
            if group.stays_out:
                assert len(blocks) == 0
                continue
            assert len(blocks) == (answer.num_tokens - answer.num_hit_tokens) // group.block_size
            first = answer.num_hit_tokens // group.block_size
            needed = group.indices(group.kept(answer.num_tokens))
            assert all(blocks[index - first] for index in needed if index >= first), (
                "a block that is read is not brought"
            )
            for block in blocks[blocks != 0].tolist():
                self.hand_out(group.pool, block)
                self.new_blocks.open.discard((group.pool, block))
                assert (group.pool, block) in places
        self.loads.append(ModelLoad(answer, prefixes, places, epochs=epochs))
        self.seen["load"] += 1

    def keep(self, sequence: ModelSequence, position: int, answer: tuple[KeptState, ...]) -> None:
        """Blocks were taken for states: of each group whose interval does not end there."""
        self.payer = sequence.tenant
        states = [group for group in self.groups if group.is_state and not group.stays_out]
        assert [kept.group for kept in answer] == [group.index for group in states if position % group.block_size]
        held = self.space._state.held
        for kept in answer:
            self.hand_out(kept.pool, kept.block_id)
            self.new_blocks.open.discard((kept.pool, kept.block_id))
            (ticket,) = (each for each, blocks in held.items() if each.pool == kept.pool and kept.block_id in blocks)
            group = self.groups[kept.group]
            self.kept_states.append(ModelKeptState(sequence, position, group, kept.block_id, ticket))

    def arrived(self, load: ModelLoad, num_tokens: int) -> None:
        """The caller has filled the blocks, up to a position."""
        answer = load.answer
        for group, blocks in zip(self.groups, answer.block_ids, strict=True):
            table = [0] * (answer.num_hit_tokens // group.block_size) + blocks.tolist()
            whole = num_tokens // group.block_size * group.block_size
            if not group.stays_out:
                present = group.present(table, whole)
                self.device.put(group, table, load.prefixes, present)
                for position in present:
                    index, offset = group.slot(position)
                    self.device.labels.write(group.pool, table[index], offset, load.epochs)

    def finished(self, load: ModelLoad) -> None:
        """The load is over."""
        self.loads.remove(load)
