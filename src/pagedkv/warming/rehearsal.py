"""Operations of every kind on small spaces, so that every loop that a space can reach is called once.

The loops depend only on the eviction policy and on whether a space has features: configurations that differ otherwise
share machine code. Results are not checked here; tests/warming checks that no loop is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from pagedkv.contract.answers import Allocation, Load
from pagedkv.contract.keys import MediaSpan, RequestKeys
from pagedkv.contract.space_config import DEFAULT_EVICTION, SpaceConfig, TenantLimits
from pagedkv.contract.spec import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    Replay,
    SlidingWindow,
)
from pagedkv.space import BlockSpace
from pagedkv.warming.rare_operations import (
    branch,
    continue_in_the_block_itself,
    continue_in_the_state_itself,
    keep_states_inside,
    refuse_drafts,
    refuse_rolling_back,
    share_open_blocks,
    step,
    write_over_kept_states,
)
from pagedkv.warming.rehearsals import FEATURES

PROMPT = tuple(range(1, 20))


def rehearse(eviction: str, features: str = FEATURES) -> None:
    """Do all operations of a space on spaces with this policy, with read-only and with writable token ids.

    ``features``: ``FEATURES``, or ``NO_FEATURES`` for spaces with pools that store only names.
    """
    build = _Build(eviction, features == FEATURES)
    for of in (lambda space: space, _taking_arrays):
        _serve(of(build.attention()))
        _serve(of(build.attention(in_order=True)))
        _swap(of(build.attention()))
        _look_ahead(of(build.attention()))
        _share(of(build.attention()))
        _bring(of(build.attention()))
        _change_weights(of(build.attention()))
        _overflow(of(build.attention()))
        _change_tenants(of(build.attention()))
        _keep_states(of(build.hybrid()))
        _replay(of(build.replaying()))
        _roll_back(of(build.plain()))
        _do_rare_things(build, of)


def _do_rare_things(build: "_Build", of: Callable[[BlockSpace], BlockSpace]) -> None:
    for operation in (branch, share_open_blocks, refuse_drafts, refuse_rolling_back):
        space = of(build.attention())
        operation(space, _tenant_of(space))
        space.check()
    branch(of(build.plain()), None)
    write_over_kept_states(of(build.few_states()))
    continue_in_the_state_itself(of(build.few_states()))
    _go_on_from_ends(of(build.few_states()))
    keep_states_inside(of(build.few_states()))
    continue_in_the_block_itself(of(build.few_blocks()))


class _TakingArrays:
    """A space that passes arrays to its methods in place of the tuples in this module.

    Token ids from a tuple or a list are read-only, those of an array are writable: two types for a compiler.
    """

    def __init__(self, space: BlockSpace) -> None:
        self._space = space

    def __getattr__(self, name: str) -> object:
        found = getattr(self._space, name)
        return partial(self._call, found) if callable(found) else found

    @staticmethod
    def _call(method: Callable[..., object], *args: object, **kws: object) -> object:
        return method(*(np.array(arg, np.int32) if isinstance(arg, tuple) else arg for arg in args), **kws)


def _taking_arrays(space: BlockSpace) -> BlockSpace:
    return cast("BlockSpace", _TakingArrays(space))


@dataclass(frozen=True, slots=True)
class _Build:
    """The builder of the spaces."""

    eviction: str
    has_features: bool

    def plain(self) -> BlockSpace:
        """Full attention alone."""
        return self._space((FullAttention(2),), 40, max_sequences=4, explain=self.has_features)

    def attention(self, *, in_order: bool = False) -> BlockSpace:
        """Attention by three rules, with every feature if features are on."""
        groups = (
            FullAttention(block_size=2),
            SlidingWindow(window=4, block_size=2, num_sink_tokens=2),
            ChunkedLocal(chunk_size=4, block_size=2),
        )
        if not self.has_features:
            return self._space(groups, 200, num_host_blocks=100, in_order=in_order, receipts=True)
        return self._space(
            groups,
            200,
            num_host_blocks=100,
            min_partial_hit=1,
            in_order=in_order,
            events=True,
            receipts=True,
            explain=True,
            leases=True,
            tenants={"one": TenantLimits(floor=4), "other": TenantLimits(cap=150)},
            weights_epoch=0,
            max_epoch_lag=1,
        )

    def hybrid(self) -> BlockSpace:
        """Full attention beside recurrent states, some of which are draft states."""
        state = RecurrentState(4, num_draft_states=3, max_checkpoints=4 if self.has_features else None)
        pools = {"device": 60, "state": 16}
        return self._space((FullAttention(block_size=2), state), pools, num_host_blocks={"device": 30, "state": 8})

    def few_blocks(self) -> BlockSpace:
        """Full attention with hits inside blocks, if features are on."""
        return self._space((FullAttention(4),), 8, min_partial_hit=int(self.has_features))

    def few_states(self) -> BlockSpace:
        """Full attention beside recurrent states, of which there are hardly more than rows need."""
        state = RecurrentState(4, max_checkpoints=4 if self.has_features else None)
        return self._space(
            (FullAttention(block_size=2), state),
            {"device": 60, "state": 8},
            events=self.has_features,
            explain=self.has_features,
        )

    def replaying(self) -> BlockSpace:
        """Windows that are computed again after they were evicted."""
        groups = (
            FullAttention(block_size=2),
            SlidingWindow(window=3, block_size=2, pool="windows", replay=Replay(4, 2)),
            SlidingWindow(window=3, block_size=2, num_sink_tokens=2, pool="windows", replay=Replay(4, 2)),
            SlidingWindow(window=4, block_size=2, pool="windows", prefix_caching=False),
        )
        return self._space(groups, {"device": 400, "windows": 40}, explain=self.has_features)

    def _space(
        self,
        groups: tuple[GroupSpec, ...],
        pools: int | dict[str, int],
        *,
        max_sequences: int = 8,
        **fields: Any,  # noqa: ANN401 - fields of the configuration
    ) -> BlockSpace:
        config = SpaceConfig(
            groups, pools, max_sequences=max_sequences, max_tokens=64, eviction=self.eviction, **fields
        )
        assert config.has_features == self.has_features or self.eviction != DEFAULT_EVICTION
        return BlockSpace(config)


def _tenant_of(space: BlockSpace, tenant: str = "one") -> str | None:
    return tenant if space.config.tenants else None


def _admitted(space: BlockSpace, prompt: tuple[int, ...] = PROMPT, tenant: str = "one") -> int:
    """Admit a prompt and compute it."""
    named = _tenant_of(space, tenant)
    hit = space.match(prompt)
    space.can_allocate(prompt, match=hit, tenant=named)
    answer = space.allocate(prompt, match=hit, tenant=named)
    assert isinstance(answer, Allocation), f"a prompt of {len(prompt)} tokens found no room: {answer}"
    step(space)
    return answer.row


def _serve(space: BlockSpace) -> None:
    """Admit, decode, query, fork, and end sequences."""
    space.advance(1.0)
    row = _admitted(space)
    for token in range(12):
        space.can_append([row])
        space.append([row], [token], num_lookahead=1)
        step(space)
    space.append_with_copies(space.fork(row, 2), [1, 2])
    space.append_with_copies([row], [3])
    space.can_append([row], [3], num_lookahead=2)
    space.append([row], [4, 5, 6], [3], num_draft=2)
    step(space)
    space.truncate([row], [int(space.lengths([row])[0]) - 2])
    space.explain(PROMPT)
    space.explain((*PROMPT[:7], *[99] * 9))
    space.mark_computed([row])
    _look(space, row)
    space.abort(space.plan_step().step_id)
    _abort(space, row)
    again = _admitted(space, (*PROMPT[:9], 77, 78, 79), "other")
    space.free([row, again], num_generated=[3, 1], keep_until_s=9.0 if space.config.leases else None)
    space.drain_events()
    space.reset_prefix_cache()


def _abort(space: BlockSpace, row: int) -> None:
    """Abort a step that allocated blocks to a row which continues; explain a prompt in between."""
    space.append([row], [90, 91, 92, 93, 94], [5])
    plan = space.plan_step()
    space.explain(PROMPT)
    space.abort(plan.step_id)
    step(space)


def _look(space: BlockSpace, row: int) -> None:
    for group in range(len(space.config.groups)):
        space.page_lists([row], group)
        space.computed_block_ids(row, group)
        space.block_ids(row, group)
    if space.config.counts_epochs:
        space.epochs(row)
    if space.config.receipts:
        space.receipt(row)
    if space.config.explain:
        space.explanation(row)
    space.statistics()
    space.ref_counts()
    stored = space.stored_blocks()
    if len(stored.digests):
        space.stored_block(stored.digests[0])
    space.check()


def _swap(space: BlockSpace) -> None:
    row = _admitted(space)
    other = int(space.fork(row)[0])
    space.can_swap_out([row, other])
    space.swap_out([row, other])
    step(space)
    space.free([other])
    space.can_swap_in([row])
    space.swap_in([row])
    step(space)
    space.swap_out([row])
    step(space)
    space.free([row])


def _look_ahead(space: BlockSpace) -> None:
    """Grow by tokens that are filled in later, some of them refused."""
    rows = [_admitted(space), _admitted(space, PROMPT[5:])]
    space.can_append(rows, [3, 1], unknown=True)
    space.append(rows, None, [1, 1], num_lookahead=1)
    first = space.plan_step()
    space.acknowledge(first.step_id)
    space.append(rows, None, [1, 1])
    second = space.plan_step()
    space.fill(rows, [5, 6], [1, 1])
    space.abort(second.step_id)
    space.free(rows)


def _share(space: BlockSpace) -> None:
    """Identical prompts of one step, branches, leases, supersession and forgetting."""
    rows = [
        space.allocate(PROMPT, tenant=_tenant_of(space)),
        space.allocate(PROMPT, tenant=_tenant_of(space), publish="prompt"),
    ]
    step(space)
    first, second = (answer.row for answer in rows if isinstance(answer, Allocation))
    space.fork(first, 1, at=6)
    space.advance(2.0)
    if space.config.leases:
        space.lease(PROMPT, 5.0)
    space.append([second], [70, 71, 72, 73], [4])
    step(space)
    space.free([int(space.fork(first)[0])], priority=1 if space.config.leases else 0)
    space.free([first], superseded_by=second)
    space.advance(9.0)
    space.free([second])
    space.touch(PROMPT)
    space.evict(2)
    space.forget(PROMPT, start=4)
    space.allocate(PROMPT, keys=RequestKeys(salt=b"a"), num_sequences=2, num_lookahead=2, tenant=_tenant_of(space))


def _bring(space: BlockSpace) -> None:
    """Prefixes from outside, blocks held for them, and content that turned out bad."""
    for num_tokens in (8, 4, None):
        load = space.load(PROMPT, 12, tenant=_tenant_of(space))
        if isinstance(load, Load):
            space.finish_load(load, num_tokens)
    answer = space.allocate(PROMPT, num_external_tokens=14, tenant=_tenant_of(space))
    assert isinstance(answer, Allocation), "a prompt that comes from elsewhere found no room"
    step(space)
    blocks = [block for block in space.block_ids(answer.row) if block]
    space.release(space.hold(blocks[:2]))
    space.withdraw(blocks[1:2])
    step(space)
    space.match(PROMPT, max_hit_tokens=5, max_replay_tokens=4)
    space.invalidate_memory()


def _change_weights(space: BlockSpace) -> None:
    if not space.config.counts_epochs:
        space.set_weights_epoch("other")
        return
    row = _admitted(space)
    for epoch in (1, 2):
        space.set_weights_epoch(epoch)
        space.explain(PROMPT)
        _admitted(space)
        space.append([row], [8])
        step(space)
        space.epochs(row)
    space.explain(PROMPT)


def _overflow(space: BlockSpace) -> None:
    """Allocate more than fits, so that blocks are evicted and a shortage is returned."""
    for start in range(0, 2_000, 100):
        prompt = tuple(range(start, start + 30))
        space.advance(3.0 + start)
        if space.config.leases:
            space.lease(prompt, 5_000.0)
        rows = [space.allocate(prompt, tenant=_tenant_of(space, tenant)) for tenant in ("one", "other")]
        step(space)
        space.free([answer.row for answer in rows if isinstance(answer, Allocation)])
    space.explain(tuple(range(30)))
    space.explain((5,) * 8, keys=RequestKeys(salt=b"b"))


def _change_tenants(space: BlockSpace) -> None:
    """Lower a tenant's cap, remove it, and let another one come; supersede a prompt that has ended."""
    for tenant in ("one", "other"):
        space.free([_admitted(space, tenant=tenant)])
        space.supersede(PROMPT)
    if not space.config.tenants:
        return
    space.exceeds_cap(PROMPT, tenant="one", match=space.match(PROMPT))
    space.lease(PROMPT[:9], 9.0)
    space.set_tenant("one", TenantLimits(cap=4))
    space.remove_tenant("one")
    space.set_tenant("third", TenantLimits(cap=40))
    space.set_tenant("fourth", TenantLimits())
    space.check()


def _keep_states(space: BlockSpace) -> None:
    first = space.allocate(PROMPT)
    space.explain(PROMPT)  # finds a state that the open step still has to compute
    step(space)
    assert isinstance(first, Allocation), "a prompt found no room in empty pools"
    space.free([first.row])
    row = _admitted(space)
    space.can_append([row], [20])  # so many that the blocks of draft states are counted
    for _ in range(4):
        space.append([row], [1, 2, 3], [3], num_draft=2)
        step(space)
        space.truncate([row], [int(space.lengths([row])[0]) - 1])
    space.append([row], None, [1])
    plan = space.plan_step()
    space.acknowledge(plan.step_id)
    space.fill([row], [4])
    step(space)
    space.draft_block_ids(row, 1)
    space.swap_out([row])
    step(space)
    space.swap_in([row])
    step(space)
    space.free([row, _admitted(space)])
    space.match(np.array(PROMPT))
    _go_on_from_a_state(space)


def _go_on_from_ends(space: BlockSpace) -> None:
    """Serve turns of a conversation, each from where the last one ended."""
    for num_tokens in (11, 18, 24):
        row = _admitted(space, tuple(range(400, 400 + num_tokens)))
        space.append([row], [7])
        space.free([row], keeps_end=True)


def _go_on_from_a_state(space: BlockSpace) -> None:
    """Compute a prompt up to the position at which its last state is kept, and send it again."""
    prompt = tuple(range(300, 319))
    first = space.allocate(prompt[:18], prompt=prompt)
    assert isinstance(first, Allocation), "a prompt found no room"
    step(space)
    space.append([first.row], prompt[18:])
    step(space)
    space.free([first.row])
    space.free([_admitted(space, prompt)])


def _replay(space: BlockSpace) -> None:
    """Compute lost windows again; use media keys; write to rows with blocks that others still have to compute."""
    space.free([_admitted(space)])
    for start in range(100, 2_100, 100):
        space.free([_admitted(space, tuple(range(start, start + 19)))])
    answer = space.allocate(PROMPT, match=space.match(PROMPT, max_replay_tokens=8))
    assert isinstance(answer, Allocation), "a prompt whose windows are gone found no room"
    children = space.fork(answer.row, 2)
    space.can_append(children, [1, 1], num_lookahead=1)
    space.append(children, [1, 2], num_lookahead=1)
    step(space)
    space.append([answer.row], [50, 51, 52, 53, 54], [5])
    step(space)
    space.free(children)
    space.free([answer.row])
    keys = RequestKeys(lora_name="a", media=(MediaSpan(2, 6, b"m"),))
    space.allocate(PROMPT, keys=keys)
    space.explain(PROMPT, keys=keys)
    space.explain((*PROMPT[:4], 7, 7, *PROMPT[6:]))
    step(space)
    space.check()


def _roll_back(space: BlockSpace) -> None:
    row = _admitted(space)
    space.truncate([row], [len(PROMPT) - 4])
    space.append([row], [5, 6], [2])
    step(space)
    space.free([row])
    foreign = np.zeros((len(PROMPT) // 2, 32), np.uint8)
    space.explain(PROMPT, digests=foreign)
    space.allocate(PROMPT, digests=foreign)
    step(space)
