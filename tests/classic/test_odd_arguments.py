"""Whatever the classic door is given, it answers or raises an error of ours, with nothing changed (promise 5)."""

from collections.abc import Callable
from typing import Any, Final

import pytest

from pagedkv import (
    BlockSpaceManager,
    BlockTable,
    CrossAttention,
    FullAttention,
    Sequence,
    SequenceGroup,
    SpaceConfig,
)
from pagedkv.contract.keys import NO_KEYS
from tests.odd_arguments import NO_ARRAYS, ODD, calls_of, outcome, parameters_of, public_methods

CONFIG: Final = SpaceConfig(
    (FullAttention(4), CrossAttention(20, 4)),
    num_blocks=60,
    num_host_blocks=20,
    max_sequences=8,
    max_tokens=200,
    watermark=0,
)


class Setting:
    """A manager with a sequence that runs, one that is swapped out, and one that is not allocated."""

    def __init__(self) -> None:
        self.manager = manager = BlockSpaceManager(CONFIG)
        self.running, self.swapped, self.new = (
            SequenceGroup(str(number), [Sequence(number, list(range(100 * number, 100 * number + 6)))])
            for number in range(3)
        )
        for group in (self.running, self.swapped):
            manager.allocate(group)
        manager.end_round()
        manager.swap_out(self.swapped)
        manager.end_round()
        self.table = manager.block_table(self.running.seqs[0])

    @property
    def seq(self) -> Sequence:
        """The sequence that runs."""
        return self.running.seqs[0]

    @property
    def child(self) -> Sequence:
        """A sequence that can be forked from it."""
        return Sequence(9, list(self.seq.token_ids))


SLOTS: Final[dict[str, object]] = {"num_lookahead_slots": 0}
Arguments = dict[str, object]

OF_MANAGER: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "access_all_blocks_in_seq": lambda it: {"seq": it.seq, "now": 0.0},
    "allocate": lambda it: {"seq_group": it.new, **SLOTS, "keys": NO_KEYS},
    "append_slots": lambda it: {"seq": it.seq, **SLOTS},
    "block_table": lambda it: {"seq": it.seq},
    "can_allocate": lambda it: {"seq_group": it.new, **SLOTS, "keys": NO_KEYS, "max_chunk": None},
    "can_append_slots": lambda it: {"seq_group": it.running, **SLOTS},
    "can_swap_in": lambda it: {"seq_group": it.swapped, **SLOTS},
    "can_swap_out": lambda it: {"seq_group": it.running},
    "end_round": lambda _: {"run": None},
    "fork": lambda it: {"parent_seq": it.seq, "child_seq": it.child},
    "free": lambda it: {"seq": it.seq, "missing_ok": False},
    "free_cross": lambda it: {"seq_group": it.running},
    "get_block_table": lambda it: {"seq": it.seq, "group": 0},
    "get_cross_block_table": lambda it: {"seq_group": it.running},
    "get_common_computed_block_ids": lambda it: {"seqs": [it.seq]},
    "get_num_cached_tokens": lambda it: {"seq": it.seq, "keys": NO_KEYS},
    "get_num_free_blocks": lambda _: {"pool": "device"},
    "get_num_free_cpu_blocks": lambda _: {},
    "get_num_free_gpu_blocks": lambda _: {},
    "get_prefix_cache_hit_rate": lambda _: {},
    "is_allocated": lambda it: {"seq": it.seq},
    "mark_blocks_as_computed": lambda it: {"seq_group": it.running, "token_chunk_size": 0},
    "reset_prefix_cache": lambda _: {},
    "row_of": lambda it: {"seq": it.seq},
    "swap_in": lambda it: {"seq_group": it.swapped},
    "swap_out": lambda it: {"seq_group": it.running},
}

OF_TABLE: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "allocate": lambda it: {"space": it.manager.space, "token_ids": [1, 2], **SLOTS, "keys": NO_KEYS},
    "append_token_ids": lambda _: {"token_ids": [1, 2], **SLOTS},
    "ensure_num_empty_slots": lambda _: {"num_empty_slots": 1},
    "fork": lambda _: {},
    "free": lambda _: {},
    "get_num_blocks_touched_by_append_slots": lambda _: {"token_ids": [1, 2], **SLOTS},
    "get_num_required_blocks": lambda _: {"token_ids": [1, 2], "block_size": 4, **SLOTS},
    "get_unseen_token_ids": lambda _: {"sequence_token_ids": list(range(7))},
    "truncate": lambda _: {"num_tokens": 5},
}

UNSEEN: Final = frozenset(ODD)
IGNORED: Final[dict[str, dict[str, frozenset[str]]]] = {
    "get_num_blocks_touched_by_append_slots": {"token_ids": frozenset(NO_ARRAYS) | {"a list", "a mapping", "bytes"}},
    "get_num_required_blocks": {"token_ids": frozenset(NO_ARRAYS) | {"a list", "bytes"}},
    "get_unseen_token_ids": {"sequence_token_ids": frozenset(NO_ARRAYS)},
    "mark_blocks_as_computed": {"token_chunk_size": UNSEEN},
}
"""What is not looked at: of some tokens only how many there are; what nothing here needs."""


def requirements(kind: type) -> dict[str, Callable[[Setting], Arguments]]:
    """Give the good arguments of a class's methods."""
    return OF_MANAGER if kind is BlockSpaceManager else OF_TABLE


def target(setting: Setting, kind: type) -> Any:  # noqa: ANN401 - either door
    """Give the object that is called."""
    return setting.manager if kind is BlockSpaceManager else setting.table


@pytest.mark.parametrize("kind", [BlockSpaceManager, BlockTable])
def test_every_public_method_and_every_parameter_has_good_arguments(kind: type) -> None:
    methods = public_methods(kind)
    assert methods.keys() == requirements(kind).keys()
    for name, method in methods.items():
        assert requirements(kind)[name](Setting()).keys() == parameters_of(method).keys(), name


@pytest.mark.parametrize(
    ("kind", "name"), [(BlockSpaceManager, name) for name in OF_MANAGER] + [(BlockTable, name) for name in OF_TABLE]
)
def test_promise_5_odd_arguments_get_an_error_of_ours(kind: type, name: str) -> None:
    good_of = requirements(kind)[name]
    setting = Setting()
    getattr(target(setting, kind), name)(**good_of(setting))
    complaints = []
    setting = Setting()
    before = setting.manager.space.statistics()
    for call in calls_of(getattr(kind, name), IGNORED.get(name, {})):
        if call.parameter == "run" and callable(call.value):
            continue  # whatever it raises comes through
        answered, told = outcome(call, getattr(target(setting, kind), name), good_of(setting))
        complaints += [told] if told else []
        setting.manager.space.check()
        if answered:
            setting = Setting()
        else:
            assert setting.manager.space.statistics() == before, (
                f"{call.parameter}={call.value!r} has changed something"
            )
    assert not complaints, "\n".join(complaints)
