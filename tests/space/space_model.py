"""What a block space must answer and hold: live sequences, their exact block counts, and steps in flight.

Predicts, in dicts and lists, whether an operation succeeds and how many blocks it takes; then reads the
space's tables and compares. Which physical block is taken is the space's to decide: the model only insists
that a block handed out is nobody's, that no step in flight touches it, and (through
:mod:`tests.space.memory_model`) that memory ends up right.
"""

from collections import Counter
from collections.abc import Sequence as AbstractSequence

from pagedkv import BlockSpace, PoolStatistics, RequestKeys, SpaceConfig, SpaceStatistics
from pagedkv.errors import PagedKVError, SharedPrefixError, TruncationError
from pagedkv.events import CacheEventKind
from pagedkv.plan import AbortedSteps, BlockMoves, Shortage, StepPlan
from tests.space.memory_model import Device, Place, Step, View, destinations, host, sources
from tests.space.sequence_model import GroupRule, ModelSequence, Prefixes, Status

__all__ = ["SpaceModel"]


class SpaceModel:
    """The expected state of one block space.

    Attributes:
        sequences: live sequences by row.
        ran: steps that the device has run and that are not acknowledged; planned: steps still to run. In order.
        open_touched: blocks that the open step's plan will copy or swap; open_written: those it writes.
        statistics: the space's, after the last operation.
        seen: how often interesting things happened.
    """

    def __init__(self, config: SpaceConfig, space: BlockSpace, seen: Counter[str]) -> None:
        """Expect an empty space."""
        self.config = config
        self.space = space
        self.seen = seen
        self.groups = [
            GroupRule(index, spec, caching=config.prefix_caching, max_tokens=config.max_tokens)
            for index, spec in enumerate(config.groups)
        ]
        blocks = config.blocks_by_pool()
        self.host_pools = {pool: count for pool, count in config.host_blocks_by_pool().items() if count}
        labelled = blocks | {host(pool): count for pool, count in self.host_pools.items()}
        self.num_usable = {label: count - 1 for label, count in labelled.items()}
        self.device = Device(self.groups, labelled)
        self.prefixes = Prefixes()
        self.generation = 0
        self.sequences: dict[int, ModelSequence] = {}
        self.ran: list[Step] = []
        self.planned: list[Step] = []
        self.num_plans = 0
        self.open_touched: set[Place] = set()
        self.open_written: set[Place] = set()
        self.in_use: dict[str, set[int]] = {label: set() for label in labelled}
        self.named: dict[str, dict[tuple[int, int], bytes]] = {pool: {} for pool in blocks}
        self.statistics = space.statistics()

    # Looking

    @property
    def in_flight(self) -> list[Step]:
        """Steps that are planned and not acknowledged, oldest first."""
        return self.ran + self.planned

    @property
    def running(self) -> list[ModelSequence]:
        """Sequences that can grow, oldest first."""
        return [sequence for sequence in self.sequences.values() if sequence.status is Status.RUNNING]

    @property
    def swapped(self) -> list[ModelSequence]:
        """Sequences in the host pools, oldest first."""
        return [sequence for sequence in self.sequences.values() if sequence.status is Status.SWAPPED]

    @property
    def num_vacant(self) -> int:
        """Rows that no sequence has."""
        return self.config.max_sequences - len(self.sequences)

    @property
    def is_recurrent(self) -> bool:
        """Whether a group keeps a state."""
        return any(group.is_state for group in self.groups)

    def pool_statistics(self, label: str) -> PoolStatistics:
        """The last snapshot of one pool."""
        for pool in self.statistics.pools:
            if pool.name == label:
                return pool
        return next(pool for pool in self.statistics.host_pools if host(pool.name) == label)

    def num_free(self, label: str) -> int:
        """Blocks that could be handed out after the last operation."""
        return self.pool_statistics(label).num_free

    def kept_free(self, pool: str) -> int:
        """Blocks that the watermark holds back, unless the pool serves nobody."""
        usable = self.num_usable[pool]
        return 0 if self.num_free(pool) == usable else int(self.config.watermark * usable)

    def read_tables(self, row: int) -> list[list[int]]:
        """Ask the space for a row's block ids."""
        return [self.space.block_ids(row, group.index) for group in self.groups]

    def label(self, group: GroupRule, sequence: ModelSequence) -> str:
        """Label of the pool in which a sequence's blocks of a group are."""
        return host(group.pool) if sequence.on_host else group.pool

    def places(self, sequence: ModelSequence) -> set[Place]:
        """Every block that a sequence holds."""
        return {
            (self.label(group, sequence), block)
            for group, table in zip(self.groups, sequence.tables, strict=True)
            for block in table
            if block
        }

    def holders(self, group: GroupRule, sequence: ModelSequence, index: int) -> int:
        """How many sequences hold the block that is logical block ``index`` of this one."""
        block = sequence.tables[group.index][index]
        return sum(
            index < len(other.tables[group.index]) and other.tables[group.index][index] == block
            for other in self.sequences.values()
            if other.on_host == sequence.on_host
        )

    # What holds after every operation

    def check(self) -> None:
        """Compare the space with the model as far as counts go, and let it audit itself."""
        self.space.check()
        self.in_use = {label: set() for label in self.in_use}
        for sequence in self.sequences.values():
            for label, block in self.places(sequence):
                self.in_use[label].add(block)
        self.statistics = self.space.statistics()
        self._check_statistics(self.statistics)
        self.seen["eviction"] += any(pool.num_evictions for pool in self.statistics.pools)
        if self.config.events:
            self._follow_events()

    def _check_statistics(self, statistics: SpaceStatistics) -> None:
        assert statistics.num_running == len(self.running)
        assert statistics.num_swapped == len(self.swapped)
        assert statistics.num_tokens == sum(len(sequence.tokens) for sequence in self.running)
        assert statistics.num_steps_in_flight == len(self.in_flight)
        for pool in statistics.pools:
            self._check_pool(pool, pool.name)
        for pool in statistics.host_pools:
            self._check_pool(pool, host(pool.name))

    def _check_pool(self, pool: PoolStatistics, label: str) -> None:
        assert pool.num_blocks == self.num_usable[label]
        assert pool.num_in_use == len(self.in_use[label]), f"{label}: blocks in use are not those of the tables"
        assert pool.num_free + pool.num_deferred + pool.num_in_use == pool.num_blocks
        assert pool.num_cached <= min(pool.num_free, pool.num_named)
        if not self.in_flight and not self.open_touched:
            assert pool.num_deferred == 0, f"{label}: blocks wait for a step, but none is in flight"

    def _follow_events(self) -> None:
        """Whoever follows the events knows exactly which names there are."""
        for events in self.space.drain_events():
            names = self.named[events.pool]
            told = zip(events.kinds.tolist(), events.groups.tolist(), events.block_ids.tolist(), strict=True)
            for digest, (kind, group, block) in zip(events.digests, told, strict=True):
                if kind == CacheEventKind.CLEARED:
                    names.clear()
                elif kind == CacheEventKind.STORED:
                    assert (group, digest.tobytes()) not in {(key[0], name) for key, name in names.items()}
                    names[group, block] = digest.tobytes()
                else:
                    assert names.pop((group, block)) == digest.tobytes()
            assert len(names) == self.pool_statistics(events.pool).num_named

    def require_unchanged(self) -> None:
        """Assert that nothing has changed since the last operation."""
        assert self.space.statistics() == self.statistics, "a question, a shortage or an error changed the counts"
        for row, sequence in self.sequences.items():
            assert self.read_tables(row) == sequence.tables, f"a question, a shortage or an error changed row {row}"

    def require_shortage(self, shortage: Shortage, needed: dict[str, int]) -> None:
        """Assert that a shortage is real, says what is needed, and changed nothing."""
        self.seen["shortage"] += 1
        assert shortage.num_needed == needed[shortage.pool]
        assert shortage.num_free == self.num_free(shortage.pool) < shortage.num_needed
        self.require_unchanged()

    def _hand_out(self, label: str, block: int) -> None:
        """A block was taken from the free ones: it is nobody's, and what it held is gone."""
        assert 0 < block <= self.num_usable[label]
        assert block not in self.in_use[label], f"{label}: block {block} was handed out while in use"
        assert (label, block) not in self.open_touched, f"{label}: block {block} was handed out, the open plan moves it"
        for step in self.in_flight:
            assert (label, block) not in step.touched, (
                f"{label}: block {block} was handed out, a step in flight uses it"
            )
        self.in_use[label].add(block)
        self.device.forget((label, block))

    # Admission

    def prompt_blocks(self, num_tokens: int, num_lookahead: int) -> dict[str, int]:
        """Blocks of a sequence by pool, hits not counted."""
        needed = dict.fromkeys(self.config.pool_names, 0)
        for group in self.groups:
            needed[group.pool] += group.num_blocks(num_tokens, num_lookahead)
        return needed

    def check_hit(self, num_tokens: int, num_hit_tokens: int) -> None:
        """A hit leaves the last token to be computed, and ends at a block boundary of every group."""
        assert 0 <= num_hit_tokens < num_tokens
        assert all(num_hit_tokens % group.block_size == 0 for group in self.groups) or num_hit_tokens == 0
        assert self.config.prefix_caching or num_hit_tokens == 0

    def require_admission_shortage(
        self, shortage: Shortage, num_tokens: int, num_lookahead: int, num_hit_tokens: int
    ) -> None:
        """Assert that a prompt was refused for a real shortage, and nothing changed."""
        self.seen["shortage"] += 1
        most = self.prompt_blocks(num_tokens, num_lookahead)[shortage.pool]
        saved = sum(num_hit_tokens // group.block_size for group in self.groups if group.pool == shortage.pool)
        assert most - saved <= shortage.num_needed <= most
        assert shortage.num_free == self.num_free(shortage.pool) < shortage.num_needed
        self.require_unchanged()

    def allocated(
        self, row: int, tokens: list[int], keys: RequestKeys, num_lookahead: int, num_hit_tokens: int
    ) -> None:
        """A prompt was given a row and blocks."""
        assert row not in self.sequences
        root = self.prefixes.root(keys, self.generation)
        sequence = ModelSequence(row, keys, root, num_planned=num_hit_tokens, is_sharer=num_hit_tokens > 0)
        sequence.extend(self.prefixes, tokens)
        sequence.tables = self.read_tables(row)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            assert len(table) == group.num_blocks(len(tokens), num_lookahead)
            num_hits = num_hit_tokens // group.block_size
            assert all(table[index] for index in group.indices(group.kept(num_hit_tokens)))
            assert len(set(table[num_hits:])) == len(table) - num_hits
            for block in table[num_hits:]:
                self._hand_out(group.pool, block)
        self.sequences[row] = sequence
        self.seen["allocation"] += 1
        self.seen["hit"] += num_hit_tokens > 0

    # Growth

    def growth(self, batch: AbstractSequence[ModelSequence], counts: list[int], num_lookahead: int) -> dict[str, int]:
        """Blocks by pool that appending takes: new ones, and one for each copy on write."""
        needed = dict.fromkeys(self.config.pool_names, 0)
        for group in self.groups:
            left: Counter[int] = Counter()
            for sequence, count in zip(batch, counts, strict=True):
                num_tokens = len(sequence.tokens)
                table = sequence.tables[group.index]
                needed[group.pool] += max(0, group.num_blocks(num_tokens + count, num_lookahead) - len(table))
                index = num_tokens // group.block_size
                is_into_block = count > 0 and num_tokens % group.block_size > 0
                if is_into_block and self.holders(group, sequence, index) - left[table[index]] > 1:
                    left[table[index]] += 1
                    needed[group.pool] += 1
        return needed

    def appended(
        self, batch: AbstractSequence[ModelSequence], tokens: list[list[int]], num_lookahead: int, num_draft: int
    ) -> list[Place]:
        """Tokens were appended to rows; returns the blocks that were made by copying on write."""
        needed = self.growth(batch, [len(new) for new in tokens], num_lookahead)
        num_full = self._num_full_accepted(batch)
        copied: list[Place] = []
        num_taken = dict.fromkeys(needed, 0)
        for sequence, new in zip(batch, tokens, strict=True):
            before, sequence.tables = sequence.tables, self.read_tables(sequence.row)
            for group, old, table in zip(self.groups, before, sequence.tables, strict=True):
                num_slots = group.num_blocks(len(sequence.tokens) + len(new), num_lookahead)
                assert len(table) == max(len(old), num_slots)
                copy = self._copied_block(group, sequence, old, table, len(new))
                fresh = table[len(old) :] if copy is None else [copy[1], *table[len(old) :]]
                for block in fresh:
                    self._hand_out(group.pool, block)
                num_taken[group.pool] += len(fresh)
                if copy is not None:
                    copied.append((group.pool, copy[1]))
                    self.open_written.add((group.pool, copy[1]))
                    self.open_touched |= {(group.pool, block) for block in copy}
            sequence.extend(self.prefixes, new, num_draft)
        assert num_taken == needed
        self._require_own_tails(batch, tokens)
        if num_full == self._num_full_accepted(batch):
            self._require_no_new_names()
        self.seen["copy on write"] += len(copied) > 0
        return copied

    def _num_full_accepted(self, batch: AbstractSequence[ModelSequence]) -> list[int]:
        """Full blocks of accepted tokens: only these may be published."""
        return [sequence.num_accepted // group.block_size for sequence in batch for group in self.groups]

    def _require_no_new_names(self) -> None:
        """Drafts and partly filled blocks are not findable."""
        for before, now in zip(self.statistics.pools, self.space.statistics().pools, strict=True):
            assert now.num_named <= before.num_named, "something was published that is not accepted or not full"

    @staticmethod
    def _copied_block(
        group: GroupRule, sequence: ModelSequence, old: list[int], table: list[int], count: int
    ) -> tuple[int, int] | None:
        """The only entry that growing may replace is the partly filled block, by a copy."""
        changed = [index for index, (left, right) in enumerate(zip(old, table, strict=False)) if left != right]
        if not changed:
            return None
        assert count
        assert len(sequence.tokens) % group.block_size
        assert changed == [len(sequence.tokens) // group.block_size]
        return old[changed[0]], table[changed[0]]

    def _require_own_tails(self, batch: AbstractSequence[ModelSequence], tokens: list[list[int]]) -> None:
        """Nobody else holds a block that appended tokens go into."""
        for sequence, new in zip(batch, tokens, strict=True):
            if new:
                for group in self.groups:
                    start = len(sequence.tokens) - len(new)
                    for index in group.indices(range(start, len(sequence.tokens))):
                        assert self.holders(group, sequence, index) == 1, "tokens were appended into a shared block"

    def truncation_errors(self, sequence: ModelSequence, length: int) -> set[type[PagedKVError]]:
        """Errors for which rolling back to a length may be refused; none when it must succeed."""
        num_tokens = len(sequence.tokens)
        if not 1 <= length <= num_tokens:
            return {TruncationError}
        errors: set[type[PagedKVError]] = set()
        if length == num_tokens:
            return errors
        for group in self.groups:
            table = sequence.tables[group.index]
            for index in range(length // group.block_size, group.num_blocks(num_tokens)):
                if table[index] and self.holders(group, sequence, index) > 1:
                    errors.add(SharedPrefixError)
            if self._is_gone(group, sequence, length):
                errors.add(TruncationError)
        return errors

    @staticmethod
    def _is_gone(group: GroupRule, sequence: ModelSequence, length: int) -> bool:
        """Whether a group has released a block at or after the first one that computing ``length`` reads."""
        table = sequence.tables[group.index]
        if not group.is_state:
            return not all(table[group.first_kept(length) // group.block_size :])
        is_checkpoint = length % group.block_size == 0 and bool(table[length // group.block_size - 1])
        return length < sequence.num_planned and not is_checkpoint

    def truncated(self, sequence: ModelSequence, length: int) -> None:
        """A row was rolled back."""
        self.seen["truncate"] += length < len(sequence.tokens)
        kept = [table[: group.num_blocks(length)] for group, table in zip(self.groups, sequence.tables, strict=True)]
        sequence.tables = self.read_tables(sequence.row)
        assert sequence.tables == kept
        sequence.cut(length)

    # Sharing

    def forked(self, parent: ModelSequence, rows: list[int]) -> None:
        """Children were made: they hold exactly the parent's blocks with content."""
        assert len(set(rows)) == len(rows)
        num_tokens = len(parent.tokens)
        for row in rows:
            assert row not in self.sequences
            child = ModelSequence(row, parent.keys, parent.root, list(parent.tokens), list(parent.prefixes))
            child.is_sharer = True
            child.num_accepted = parent.num_accepted
            child.num_planned, child.is_planned = parent.num_planned, parent.is_planned
            child.tables = self.read_tables(row)
            for group, table, mine in zip(self.groups, parent.tables, child.tables, strict=True):
                assert mine == table[: group.num_blocks(num_tokens)]
            self.sequences[row] = child
        self.seen["fork"] += 1

    def freed(self, rows: list[int]) -> None:
        """Rows were given up."""
        for row in rows:
            del self.sequences[row]

    # Swapping

    def _num_moved(self, batch: list[ModelSequence]) -> dict[str, int]:
        """Different blocks with content that sequences hold, by label."""
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

    def is_moved_into(self, batch: list[ModelSequence]) -> bool:
        """Whether the open plan copies or swaps into blocks with content of these sequences."""
        return any(
            (group.pool, block) in self.open_written
            for sequence in batch
            for group in self.groups
            for block in sequence.tables[group.index][: group.num_blocks(len(sequence.tokens))]
        )

    def swapped_over(self, batch: list[ModelSequence], moves: tuple[BlockMoves, ...], *, to_host: bool) -> None:
        """Sequences were moved: every block with content once, shared ones still shared, as the moves say."""
        told = {
            (move.pool, source): target
            for move in moves
            for source, target in zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)
        }
        moved: dict[Place, int] = {}
        for sequence in batch:
            before, sequence.tables = sequence.tables, self.read_tables(sequence.row)
            for group, old, table in zip(self.groups, before, sequence.tables, strict=True):
                assert len(table) == group.num_blocks(len(sequence.tokens))
                for source, target in zip(old, table, strict=False):
                    assert bool(source) == bool(target)
                    if source and moved.setdefault((group.pool, source), target) != target:
                        message = f"block {source} was moved to {target} and elsewhere"
                        raise AssertionError(message)
            sequence.status = Status.SWAPPED if to_host else Status.RUNNING
            sequence.on_host = to_host
            sequence.era += 1
        assert told == moved
        for (pool, source), target in moved.items():
            here, there = (pool, host(pool)) if to_host else (host(pool), pool)
            self._hand_out(there, target)
            self.open_touched |= {(here, source), (there, target)}
            self.open_written.add((there, target))
        self.seen["swap out" if to_host else "swap in"] += 1

    # Steps

    def close_step(self, plan: StepPlan) -> None:
        """The open step was planned: it leaves no token of a running sequence uncomputed."""
        self.num_plans += 1
        assert plan.step_id == self.num_plans
        compute = plan.compute
        ranges = list(zip(compute.rows.tolist(), compute.starts.tolist(), compute.ends.tolist(), strict=True))
        assert len({row for row, _, _ in ranges}) == len(ranges), "a plan computes a row twice"
        views = {
            sequence.row: View(sequence, sequence.era, list(sequence.prefixes), list(map(list, sequence.tables)))
            for sequence in self.running
        }
        for row, start, end in ranges:
            assert 0 <= start < end == len(views[row].prefixes)
        for sequence in self.running:
            sequence.num_planned, sequence.is_planned = len(sequence.tokens), True
        touched = self._touched(plan, views, ranges)
        assert {place for place in self.open_written if place in touched} == self.open_written, "a move was dropped"
        self.planned.append(Step(plan, views, ranges, frozenset(touched)))
        self.open_touched.clear()
        self.open_written.clear()
        self.seen["several steps in flight"] += len(self.in_flight) > 1

    def _touched(self, plan: StepPlan, views: dict[int, View], ranges: list[tuple[int, int, int]]) -> set[Place]:
        """Blocks that the device may read or write for a plan."""
        touched = {
            *sources(plan.swaps_out),
            *destinations(plan.swaps_in),
            *sources(plan.copies),
            *destinations(plan.copies),
        }
        touched |= {(host(pool), block) for pool, block in destinations(plan.swaps_out)}
        touched |= {(host(pool), block) for pool, block in sources(plan.swaps_in)}
        for row, start, end in ranges:
            for group in self.groups:
                table = views[row].tables[group.index]
                for index in group.indices([*group.read(start, end), *group.written(start, end)]):
                    touched.add((group.pool, table[index]))
        return touched

    def run_step(self) -> None:
        """The device runs the next plan; afterwards every sequence that stayed as it was reads back right."""
        step = self.planned.pop(0)
        self.ran.append(step)
        self.device.run(step)
        for view in step.views.values():
            if view.sequence.era == view.era and view.sequence.status is Status.RUNNING:
                self._require_kept(view)

    def _require_kept(self, view: View) -> None:
        """Whatever the next token of a sequence will read is in memory."""
        for group in self.groups:
            self.device.require(group, view.tables[group.index], view.prefixes, group.kept(len(view.prefixes)))

    def acknowledged(self) -> None:
        """The oldest step was acknowledged: windows slid, and duplicates gave way to equal content."""
        step = self.ran.pop(0)
        computed = {row: end for row, _, end in step.ranges}
        for sequence in self.running:
            view = step.views.get(sequence.row)
            is_same = view is not None and view.sequence is sequence and sequence.row in computed
            self._follow_changes(sequence, min(computed[sequence.row], sequence.num_accepted) if is_same else 0)
            if view is not None and is_same and view.era == sequence.era:
                self._require_slid(sequence, min(computed[sequence.row], sequence.num_accepted))

    def _follow_changes(self, sequence: ModelSequence, query: int) -> None:
        """Entries became null where computing ``query`` does not read, or another block of the same content."""
        before, sequence.tables = sequence.tables, self.read_tables(sequence.row)
        if before == sequence.tables:
            return
        for group, old, table in zip(self.groups, before, sequence.tables, strict=True):
            assert len(table) == len(old)
            for index, (left, right) in enumerate(zip(old, table, strict=True)):
                if left == right:
                    continue
                positions = range(index * group.block_size, (index + 1) * group.block_size)
                if right:
                    self.seen["merge"] += 1
                    written = group.written(positions.start, positions.stop)
                    self.device.require(group, table, sequence.prefixes, written)
                else:
                    self.seen["slide"] += 1
                    assert not set(positions) & set(group.kept(query)), "a window has slid too far"
                    assert positions.stop <= query, "a window has slid beyond what is computed"

    def _require_slid(self, sequence: ModelSequence, query: int) -> None:
        """Blocks wholly below what computing ``query`` reads have been given back, sinks apart."""
        for group in self.groups:
            num_sink_blocks = -(-group.num_sink_tokens // group.block_size)
            table = sequence.tables[group.index]
            stale = range(num_sink_blocks, group.first_kept(query) // group.block_size)
            assert not any(table[index] for index in stale), "blocks below the window are still held"

    def aborted(self, answer: AbortedSteps, position: int, num_parts: int, *, garbage: bool) -> None:
        """Steps failed from ``in_flight[position]`` on; of those not run some parts happened, maybe as garbage.

        The device takes steps in order: nothing of them happened while one before them has yet to run.
        """
        steps = self.in_flight[position:]
        for step in steps if position <= len(self.ran) else ():
            if step in self.planned:
                self.device.fail(step, num_parts, garbage=garbage)
        self.ran = self.ran[:position]
        self.planned = self.planned[: max(0, position - len(self.ran))]
        assert answer.step_ids == tuple(step.plan.step_id for step in steps)
        assert not set(answer.rewound_rows) & set(answer.lost_rows)
        spoilt = {place for step in steps for place in step.touched} | self.open_touched
        self._rewind(answer, steps)
        for sequence in self.running:
            sequence.is_planned = False  # what a row leaves uncomputed may fall to whoever shares it
        self._lose(answer, spoilt)
        self.seen["abort"] += 1

    def _rewind(self, answer: AbortedSteps, steps: list[Step]) -> None:
        for step in steps:
            for row, start, _ in step.ranges:
                sequence = step.views[row].sequence
                is_marked = step.plan.step_id in sequence.marked_steps
                if self.sequences.get(row) is sequence and not sequence.is_lost and not is_marked:
                    assert row in {*answer.rewound_rows, *answer.lost_rows}, (
                        "an aborted row is neither rewound nor lost"
                    )
                    sequence.num_planned = min(sequence.num_planned, start)
        for row in answer.rewound_rows:
            assert not self.sequences[row].is_lost
            self.sequences[row].era += 1

    def _lose(self, answer: AbortedSteps, spoilt: set[Place]) -> None:
        """Only rows are lost that hold a block which an aborted step works on, or that once shared another's."""
        for row in answer.lost_rows:
            sequence = self.sequences[row]
            assert not sequence.is_lost
            is_concerned = sequence.is_sharer or self.places(sequence) & spoilt
            assert is_concerned, f"row {row} was declared lost, but nothing it holds was aborted"
            sequence.status = Status.LOST
            sequence.era += 1
            self.seen["lost"] += 1

    # Content that comes from elsewhere

    def may_be_marked(self, sequence: ModelSequence) -> bool:
        """Whether nothing that is still to run, or to be planned for others, writes a sequence's blocks."""
        if self.in_flight and any(group.is_state for group in self.groups):
            return False
        places = self.places(sequence)
        is_written = places & self.open_touched or any(places & step.touched for step in self.planned)
        return not is_written and not any(
            places & self.places(other)
            for other in self.running
            if other is not sequence and not self._is_settled(other)
        )

    def _is_settled(self, sequence: ModelSequence) -> bool:
        """Whether acknowledged plans have computed all of a sequence."""
        is_in_flight = any(
            step.plan.step_id not in sequence.marked_steps
            for step in self.in_flight
            for row, _, _ in step.ranges
            if step.views[row].sequence is sequence
        )
        return sequence.is_planned and sequence.num_planned == len(sequence.tokens) and not is_in_flight

    def marked_computed(self, batch: list[ModelSequence]) -> None:
        """Somebody wrote sequences' keys and values, up to their last token, and said so."""
        for sequence in batch:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                positions = group.written(0, len(sequence.tokens))
                present = [position for position in positions if table[group.slot(position)[0]]]
                self.device.put(group, table, sequence.prefixes, present)
            sequence.num_planned, sequence.is_planned = len(sequence.tokens), True
            sequence.marked_steps |= {step.plan.step_id for step in self.in_flight}
            sequence.era += 1
            self._follow_changes(sequence, sequence.num_accepted)

    def forgot_cache(self) -> None:
        """The prefix cache was reset: nothing known before may ever hit."""
        self.generation += 1
        assert all(pool.num_named == pool.num_cached == 0 for pool in self.space.statistics().pools)

    def check_computed(self, sequence: ModelSequence) -> None:
        """Blocks said to be computed are, unless a swap still to run brings them; all are when nothing is left."""
        awaited = {place for step in self.planned for place in step.touched} | self.open_written
        for group, table in zip(self.groups, sequence.tables, strict=True):
            told = self.space.computed_block_ids(sequence.row, group.index)
            assert told == table[: len(told)]
            for index, block in enumerate(told):
                if block and (group.pool, block) not in awaited:
                    start, stop = index * group.block_size, (index + 1) * group.block_size
                    self.device.require(group, table, sequence.prefixes, group.written(start, stop))
            is_computed = sequence.is_planned and sequence.num_planned == len(sequence.tokens)
            if is_computed and not self.in_flight and self._is_alone(group, sequence):
                assert len(told) == len(sequence.tokens) // group.block_size

    def _is_alone(self, group: GroupRule, sequence: ModelSequence) -> bool:
        """Whether no other sequence holds a block of this one, so that nobody else has to compute for it."""
        return all(
            not block or self.holders(group, sequence, index) == 1
            for index, block in enumerate(sequence.tables[group.index])
        )
