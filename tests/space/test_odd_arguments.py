"""Whatever a public method of a space is given: an answer, or an error of ours and nothing changed (promise 5).

Every public method and every parameter is tried: one that is new must be given good arguments here.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    CrossAttention,
    FullAttention,
    Load,
    RecurrentState,
    SpaceConfig,
    TenantLimits,
    hash_request_tokens,
)
from pagedkv.contract.keys import NO_KEYS
from pagedkv.space import SpaceObserver
from tests.odd_arguments import calls_of, outcome, parameters_of, public_methods
from tests.space.spaces import new_space, tokens

PROMPT: Final = tokens(13)
DIGESTS: Final = np.frombuffer(b"".join(hash_request_tokens(PROMPT, 4)), np.uint8).reshape(-1, 32)
CONFIG: Final = SpaceConfig(
    (FullAttention(4),),
    num_blocks=60,
    num_host_blocks=20,
    max_sequences=8,
    max_tokens=200,
    min_partial_hit=2,
    receipts=True,
    explain=True,
    leases=True,
    events=True,
    tenants={"a": TenantLimits(cap=40, floor=2)},
    weights_epoch=1,
    max_epoch_lag=1,
)


class Setting:
    """A space with a row that runs, one that is swapped out, one with an unknown token, a ticket and a load."""

    def __init__(self) -> None:
        self.space = space = BlockSpace(CONFIG)
        self.running, self.swapped, self.waiting, self.other = (
            self._allocate(tokens(length, first)) for length, first in ((10, 0), (6, 100), (7, 200), (5, 300))
        )
        space.acknowledge(space.plan_step().step_id)
        space.swap_out([self.swapped])
        (self.receipt,) = space.free([self.other])
        space.acknowledge(space.plan_step().step_id)
        space.append([self.waiting], None)
        self.plan = space.plan_step()
        self.other = self._allocate(tokens(5, 400))
        self.drafting = self._allocate(tokens(5, 600))
        space.append([self.drafting], [7, 8], [2], num_draft=1)
        self.match = space.match(PROMPT)
        self.ticket = space.hold(space.block_ids(self.running)[:1])
        load = space.load(tokens(9, 500), 8)
        assert isinstance(load, Load)
        self.load = load

    def row_with_states(self) -> int:
        """Begin again with a space that has states, and one row."""
        self.space = new_space(FullAttention(4), RecurrentState(8, pool="device"))
        return self._allocate(tokens(10))

    def row_with_encoder(self) -> int:
        """Begin again with a space that has cross-attention, and one row."""
        self.space = new_space(FullAttention(4), CrossAttention(20, 4))
        return self._allocate(tokens(10))

    def _allocate(self, token_ids: Any) -> int:  # noqa: ANN401 - what allocate takes
        allocation = self.space.allocate(token_ids)
        assert isinstance(allocation, Allocation)
        return allocation.row


PROMPTED: Final[dict[str, object]] = {"token_ids": PROMPT, "keys": NO_KEYS, "digests": DIGESTS}
SLOTS: Final[dict[str, object]] = {"num_lookahead": 0, "num_draft": 0}

GOOD: Final[dict[str, Callable[[Setting], dict[str, object]]]] = {
    "abort": lambda it: {"step_id": it.plan.step_id},
    "acknowledge": lambda it: {"step_id": it.plan.step_id},
    "advance": lambda _: {"now_s": 1.0},
    "allocate": lambda it: {
        **PROMPTED,
        **SLOTS,
        "num_sequences": 1,
        "num_encoder_tokens": 0,
        "num_external_tokens": 0,
        "match": it.match,
        "prompt": PROMPT,
        "continues": it.receipt,
        "publish": True,
        "tenant": None,
    },
    "append": lambda it: {"rows": [it.running], "token_ids": [1], "counts": [1], **SLOTS},
    "append_with_copies": lambda it: {"rows": [it.running], "token_ids": [1], "counts": [1], **SLOTS},
    "block_ids": lambda it: {"row": it.running, "group": 0},
    "block_size": lambda _: {"group": 0},
    "block_table": lambda _: {"group": 0},
    "can_allocate": lambda it: {
        **PROMPTED,
        "num_lookahead": 0,
        "num_reserved": 0,
        "num_sequences": 1,
        "num_encoder_tokens": 0,
        "max_chunk": None,
        "match": it.match,
        "tenant": None,
    },
    "can_append": lambda it: {"rows": [it.running], "counts": [1], **SLOTS, "unknown": False},
    "can_swap_in": lambda it: {"rows": [it.swapped], "counts": [1], "num_lookahead": 0, "num_reserved": 0},
    "can_swap_out": lambda it: {"rows": [it.running]},
    "check": lambda _: {},
    "contents_of": lambda it: {"blocks": it.space.stored_blocks("device")},
    "computed_block_ids": lambda it: {"row": it.running, "group": 0},
    "draft_block_ids": lambda it: {"row": it.running, "group": 0},
    "drain_events": lambda _: {},
    "encoder_lengths": lambda it: {"rows": [it.row_with_encoder()]},
    "epochs": lambda it: {"row": it.running},
    "exceeds_cap": lambda it: {
        "token_ids": PROMPT,
        "tenant": "a",
        "keys": NO_KEYS,
        "num_lookahead": 0,
        "num_reserved": 0,
        "num_sequences": 1,
        "num_encoder_tokens": 0,
        "match": it.match,
    },
    "evict": lambda _: {"num_blocks": 1, "pool": "device"},
    "explain": lambda _: {**PROMPTED, "max_hit_tokens": None},
    "explanation": lambda it: {"row": it.running, "generation": None},
    "fill": lambda it: {"rows": [it.waiting], "token_ids": [1], "counts": [1]},
    "finish_load": lambda it: {"load": it.load, "num_tokens": None},
    "forget": lambda _: {"token_ids": PROMPT, "keys": NO_KEYS, "start": 0},
    "forget_branch": lambda _: {"token_ids": PROMPT, "keys": NO_KEYS},
    "fork": lambda it: {"row": it.running, "num_children": 1, "at": None},
    "free": lambda it: {
        "rows": [it.running],
        "num_generated": [3],
        "superseded_by": None,
        "keep_until_s": None,
        "priority": 0,
        "keeps_end": True,
    },
    "generation": lambda it: {"row": it.running},
    "generation_or_none": lambda it: {"row": it.running},
    "grow": lambda _: {"num_blocks": 0, "pool": "device", "run": 1},
    "hold": lambda it: {"block_ids": it.space.block_ids(it.running)[:1], "pool": "device"},
    "invalidate_memory": lambda it: it.space.acknowledge(it.plan.step_id) or {},  # type: ignore[func-returns-value]
    "keep_states": lambda it: {"row": it.row_with_states(), "position": 12},
    "lease": lambda _: {"token_ids": PROMPT, "until_s": 9.0, "keys": NO_KEYS},
    "lengths": lambda it: {"rows": [it.running]},
    "load": lambda _: {"token_ids": PROMPT, "num_tokens": 12, "keys": NO_KEYS, "epochs": (1, 1), "tenant": None},
    "mark_computed": lambda it: {"rows": [it.other]},
    "match": lambda _: {**PROMPTED, "max_hit_tokens": None, "max_replay_tokens": 0},
    "match_each": lambda _: {"token_ids": PROMPT, "keys": NO_KEYS},
    "most_blocks": lambda _: {"tenant": "a"},
    "num_allocatable": lambda it: {
        "matches": [it.match, it.match],
        "num_lookahead": 0,
        "tenants": ["a", None],
        "num_encoder_tokens": [0, 0],
    },
    "num_blocks": lambda it: {"rows": [it.running], "group": 0},
    "num_absent_blocks": lambda _: {"pool": "device"},
    "num_cached_blocks": lambda _: {"pool": "device"},
    "num_deferred_blocks": lambda _: {"pool": "device"},
    "num_free_blocks": lambda _: {"pool": "device"},
    "num_live_blocks": lambda _: {"pool": "device"},
    "num_tokens": lambda it: {"row": it.running},
    "observe": lambda _: {"observer": SpaceObserver()},
    "page_lists": lambda it: {"rows": [it.running], "group": 0},
    "next_victims": lambda _: {"num_blocks": 2, "pool": "device"},
    "plan_step": lambda _: {},
    "receipt": lambda it: {"row": it.running},
    "ref_counts": lambda _: {"pool": "device"},
    "release": lambda it: {"ticket": it.ticket},
    "remove_tenant": lambda _: {"name": "a"},
    "replace_drafts": lambda it: {"rows": [it.drafting], "token_ids": [7], "counts": [1]},
    "reset_prefix_cache": lambda _: {},
    "set_tenant": lambda _: {"name": "a", "limits": TenantLimits(cap=30)},
    "set_weights_epoch": lambda _: {"weights_epoch": 2},
    "shrink": lambda _: {"num_blocks": 2, "pool": "device", "run": 1},
    "slot_mapping": lambda it: {"plan": it.plan, "group": 0},
    "statistics": lambda _: {},
    "stored_block": lambda _: {"digest": DIGESTS[0].tobytes(), "group": 0},
    "stored_blocks": lambda _: {"pool": "device"},
    "supersede": lambda _: {"token_ids": PROMPT, "keys": NO_KEYS},
    "swap_in": lambda it: {"rows": [it.swapped]},
    "swap_out": lambda it: {"rows": [it.running]},
    "tenant_shares": lambda _: {"tenant": "a"},
    "touch": lambda _: {"token_ids": PROMPT, "keys": NO_KEYS},
    "truncate": lambda it: {"rows": [it.running], "lengths": [9]},
    "withdraw": lambda it: {"block_ids": it.space.block_ids(it.running)[:1], "pool": "device"},
}

FREE: Final[dict[str, dict[str, frozenset[str]]]] = {
    "free": {
        "num_generated": frozenset({"wrapped", "wrapped int64", "wrapped numbers", "wrapped int64 array"}),
    },
}
"""Numbers of which more than int32 holds are taken for the most that it holds."""


def test_every_public_method_and_every_parameter_has_good_arguments() -> None:
    methods = public_methods(BlockSpace)
    assert methods.keys() == GOOD.keys()
    for name, method in methods.items():
        good = GOOD[name](Setting())
        assert good.keys() == parameters_of(method).keys(), name


@pytest.mark.parametrize("name", GOOD)
def test_promise_5_odd_arguments_get_an_error_of_ours(name: str) -> None:
    setting = Setting()
    arguments = GOOD[name](setting)
    getattr(setting.space, name)(**arguments)
    complaints = []
    setting = Setting()
    good, before = GOOD[name](setting), setting.space.statistics()
    for call in calls_of(getattr(setting.space, name), FREE.get(name, {})):
        answered, complaint = outcome(call, getattr(setting.space, name), good)
        complaints += [complaint] if complaint else []
        setting.space.check()
        if answered:
            setting = Setting()
            good = GOOD[name](setting)
        else:
            assert setting.space.statistics() == before, f"{call.parameter}={call.value!r} has changed something"
    assert not complaints, "\n".join(complaints)
