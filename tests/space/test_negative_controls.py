"""Negative controls: spaces that are broken in one place each; the state machine must notice every one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from pagedkv import AllocStatus, BlockSpace, RequestKeys
from pagedkv.blocks import tenant_charges
from pagedkv.blocks.digests import ExtraKeyArrays
from pagedkv.blocks.prefix_index import find
from pagedkv.blocks.record import FREE, HOLD_STEP, OPEN_STEP, QUEUE, SETTLED_STEP, PoolArrays
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.space import admission, epochs, forking, growing, loading, planning, swapping, tenants
from pagedkv.space.matching import match_chain
from pagedkv.space.rows import NAME_IN_POOL, SPAN, GroupArrays
from tests.choosing import long_but
from tests.plan_packing import Parts, parts_of, repacked
from tests.space.controls import replace_method, require_noticed, require_noticed_in_tangles
from tests.space.operations import Sabotage


def in_plans(tamper: Callable[[Parts], Parts]) -> Sabotage:
    """Break the plans that a space hands out."""

    def sabotage(space: BlockSpace) -> None:
        def with_tampering(plan_step: Callable[..., object]) -> Callable[..., object]:
            def wrapped() -> StepPlan:
                plan = cast("StepPlan", plan_step())
                return repacked(tamper(parts_of(plan)), like=plan)

            return wrapped

        replace_method(space, "plan_step", with_tampering)

    return sabotage


@pytest.mark.parametrize(
    ("mix_name", "tamper"),
    [
        ("full", lambda plan: replace(plan, copies=())),
        pytest.param(
            "full",
            lambda plan: replace(plan, swaps_in=tuple(replace(m, src_ids=m.src_ids[::-1]) for m in plan.swaps_in)),
            marks=pytest.mark.long,  # it takes some nine seconds to notice
        ),
        ("full", lambda plan: replace(plan, swaps_in=())),
        ("full", lambda plan: replace(plan, swaps_out=())),
        ("full", lambda plan: replace(plan, table_writes=())),
        ("full", lambda plan: replace(plan, new_blocks=())),
        ("full and window in one pool", lambda plan: replace(plan, table_writes=plan.table_writes[:1])),
        ("window with sinks", lambda plan: replace(plan, compute=replace(plan.compute, starts=plan.compute.ends - 1))),
    ],
    ids=[
        "no copies",
        "swaps mixed up",
        "no swaps in",
        "no swaps out",
        "no tables",
        "no new blocks",
        "one table",
        "last token only",
    ],
)
def test_a_plan_that_says_too_little_is_noticed(mix_name: str, tamper: Callable[[Parts], Parts]) -> None:
    require_noticed(mix_name, in_plans(tamper))


@pytest.mark.parametrize(
    ("mix_name", "group"), [("window with sinks", 0), ("full and window in one pool", 1), ("all rules, swapping", 1)]
)
def test_a_window_that_slides_one_block_early_is_noticed(mix_name: str, group: int) -> None:
    def sabotage(space: BlockSpace) -> None:
        parameters = space._state.groups[group].arrays.parameters

        def acknowledge_with_narrow_window(acknowledge: Callable[..., object]) -> Callable[..., object]:
            def wrapped(step_id: int) -> None:
                parameters[SPAN] -= space.block_size(group)
                acknowledge(step_id)
                parameters[SPAN] += space.block_size(group)

            return wrapped

        replace_method(space, "acknowledge", acknowledge_with_narrow_window)

    require_noticed(mix_name, sabotage)


def test_a_salt_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_salt = RequestKeys.first_block_key
    monkeypatch.setattr(RequestKeys, "first_block_key", lambda keys, epoch: with_salt(replace(keys, salt=b""), epoch))
    require_noticed("window with sinks", first_seed=5)


def test_a_weights_epoch_that_drops_nothing_is_noticed() -> None:
    def sabotage(space: BlockSpace) -> None:
        replace_method(space, "reset_prefix_cache", lambda _: lambda: None)

    require_noticed("full", sabotage)


@pytest.mark.long  # the machine needs many runs
def test_counted_epochs_that_drop_nothing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "drop_stale", lambda _pool, _bound: 0)
    monkeypatch.setattr(BlockSpace, "check", lambda _: None)  # which would say so at once
    require_noticed("full")


def test_plans_that_are_of_no_epoch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "date_computed", lambda *_: None)
    monkeypatch.setattr(BlockSpace, "check", lambda _: None)
    require_noticed("window with sinks")


@contextmanager
def no_step_in_flight(space: BlockSpace) -> Iterator[None]:
    """Pretend meanwhile that every planned step is over."""
    pools = space._state.all_pools
    settled = [int(pool.arrays.counts[SETTLED_STEP]) for pool in pools]
    for pool in pools:
        pool.arrays.counts[SETTLED_STEP] = pool.arrays.counts[OPEN_STEP] - 1
        pool.arrays.records[:, HOLD_STEP] = 0
    yield
    for pool, step in zip(pools, settled, strict=True):
        pool.arrays.counts[SETTLED_STEP] = step


@pytest.mark.parametrize("mix_name", ["full", "chunk and full", "without caching"])
def test_a_block_freed_while_a_step_uses_it_is_noticed(mix_name: str) -> None:
    def sabotage(space: BlockSpace) -> None:
        def free_at_once(free: Callable[..., object]) -> Callable[..., object]:
            def wrapped(rows: object) -> None:
                with no_step_in_flight(space):
                    free(rows)

            return wrapped

        replace_method(space, "free", free_at_once)

    require_noticed(mix_name, sabotage)


@pytest.mark.long  # the machine rarely forges a digest: it takes two minutes to notice
def test_a_hit_that_is_not_verified_is_noticed() -> None:
    def sabotage(space: BlockSpace) -> None:
        loops = space._state.loops
        verified = loops[match_chain]

        def trusting(  # noqa: PLR0913, PLR0917 - the arguments of match_chain
            pool: PoolArrays,
            group: GroupArrays,
            tokens: Int32Array,
            extra_ids: Int32Array,
            extra_keys: ExtraKeyArrays,
            digests: Uint32Array,
            out: Int32Array,
        ) -> tuple[int, int, int]:
            if not len(digests):
                return verified(pool, group, tokens, extra_ids, extra_keys, digests, out)
            found = [find(pool, int(group.parameters[NAME_IN_POOL]), digest) for digest in digests[: len(out)]]
            num_hits = (*found, 0).index(0)
            out[:num_hits] = found[:num_hits]
            num_free = int((pool.records[found[:num_hits], QUEUE] == FREE).sum())
            return num_hits, num_hits, num_free

        loops[match_chain] = trusting

    require_noticed("full", sabotage)


def test_an_abort_that_withdraws_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "withdraw_since", lambda *_: 0)
    require_noticed_in_tangles("state and full", first_seed=4)


def test_an_abort_that_forgets_which_blocks_were_new_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "renew_new_blocks", lambda *_: None)
    require_noticed("full")


def test_drafts_that_are_published_are_noticed() -> None:
    def sabotage(space: BlockSpace) -> None:
        def without_drafts(append: Callable[..., object]) -> Callable[..., object]:
            return lambda *args, **options: append(*args, **(options | {"num_draft": 0}))

        replace_method(space, "append_with_copies", without_drafts)

    require_noticed("full", sabotage)


@pytest.mark.parametrize(
    ("question", "answer", "first_seed"),
    [
        ("can_append", True, 0),
        ("can_allocate", AllocStatus.OK, 0),
        ("can_swap_out", AllocStatus.OK, 0),
        ("can_swap_in", AllocStatus.OK, 6),
    ],
)
def test_a_question_that_is_always_answered_yes_is_noticed(question: str, answer: object, first_seed: int) -> None:
    def sabotage(space: BlockSpace) -> None:
        replace_method(space, question, lambda _: lambda *_args, **_options: answer)

    require_noticed("full", sabotage, first_seed=first_seed)


@pytest.mark.long
@pytest.mark.parametrize("name", ["charge_hits", "charge_to", pytest.param("keep_caps", marks=pytest.mark.long)])
def test_hits_that_are_charged_to_nobody_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are operations that are charged to another tenant, and caps that hits exceed."""
    for module in (tenant_charges, admission, forking, loading, swapping):
        monkeypatch.setattr(module, name, lambda *_: None, raising=False)
    require_noticed("full, tenants", first_seed=6)


def test_a_cap_that_is_not_asked_about_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "growth_shortage", lambda *_: None)
    require_noticed("full, tenants")


@pytest.mark.long
def test_a_removed_tenant_that_stays_charged_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "move_charges", lambda *_: None)
    require_noticed("full, tenants", first_seed=6)


@pytest.mark.long
def test_a_lower_cap_that_evicts_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes minutes."""
    monkeypatch.setattr(tenants, "_keep_within", lambda *_: None)
    require_noticed("full, tenants", first_seed=12)


TOLD = ("planned", "acknowledging")
RARELY_TOLD = ("admitted", "forked", "aborted", "declaring", "truncating", "returned")  # it takes minutes to notice


@pytest.mark.parametrize("name", long_but(TOLD, (*TOLD, *RARELY_TOLD)))
def test_an_operation_that_is_on_no_receipt_is_noticed(name: str) -> None:
    def sabotage(space: BlockSpace) -> None:
        if space._state.receipts is not None:
            setattr(space._state.receipts, name, lambda *_: None)

    require_noticed("full", sabotage)


def test_receipts_that_are_handed_out_for_other_rows_are_noticed() -> None:
    def sabotage(space: BlockSpace) -> None:
        replace_method(space, "free", lambda free: lambda rows, **options: cast("Any", free)(rows, **options)[::-1])

    require_noticed("full", sabotage)
