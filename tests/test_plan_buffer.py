"""A plan as one buffer: what goes in comes out, anywhere, without a copy; what is no plan is refused with numbers."""

import os
import pickle
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from pagedkv import Allocation, BlockSpace, FullAttention, RecurrentState, SlidingWindow, SpaceConfig, StepPlan
from pagedkv.contract.plan import BlockMoves, DraftStates, NewBlocks, TableWrites, TokenRanges, UnknownTokens
from pagedkv.errors import PlanError
from tests.plan_packing import SUMS, XXH3, Parts, as_plain, pack, parts_of, sealed
from tests.space.spaces import allocate, new_space, run_step, tokens

int32s = st.integers(0, 2**31 - 1)


def int32(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def columns(draw: st.DrawFn, *numbers: st.SearchStrategy[int], least: int = 0) -> list[npt.NDArray[np.int32]]:
    """Draw arrays of equal length."""
    drawn = draw(st.lists(st.tuples(*numbers), min_size=least, max_size=9))
    return [int32([line[column] for line in drawn]) for column in range(len(numbers))]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Parts, tuple[str, ...], int]:
    """Any plan that may be: its parts, the names of its pools, and the number of its groups."""
    names = tuple(draw(st.lists(st.text(max_size=9), min_size=1, max_size=3, unique=True)))
    num_groups = len(names) + draw(st.integers(0, 2))

    def moves() -> tuple[BlockMoves, ...]:
        drawn = [BlockMoves(name, *columns(draw, int32s, int32s)) for name in names]
        return tuple(part for part in drawn if len(part.src_ids))

    writes = []
    for group in range(num_groups):
        if draw(st.booleans()):
            rows, starts, counts = columns(draw, int32s, int32s, st.integers(1, 9), least=1)
            ids = draw(st.lists(int32s, min_size=int(counts.sum()), max_size=int(counts.sum())))
            writes.append(TableWrites(group, rows, starts, counts, int32(ids)))
    rows, starts, lengths = columns(draw, int32s, st.integers(0, 2**30), st.integers(1, 2**30))
    new = [NewBlocks(name, *columns(draw, int32s)) for name in names]
    outside = draw(st.sets(st.integers(0, num_groups - 1), max_size=num_groups - 1))
    return (
        Parts(
            draw(st.integers(0, 2**63 - 1)),
            moves(),
            moves(),
            moves(),
            tuple(writes),
            TokenRanges(rows, starts, starts + lengths),
            tuple(part for part in new if len(part.block_ids)),
            {group: TokenRanges(rows, starts // 2, starts + lengths) for group in outside},
            UnknownTokens(lengths // 2, lengths // 3) if len(rows) and draw(st.booleans()) else None,
            DraftStates(starts + lengths // 2) if len(rows) and draw(st.booleans()) else None,
        ),
        names,
        num_groups,
    )


@given(plans())
def test_a_plan_comes_out_of_its_buffer_as_it_went_in(drawn: tuple[Parts, tuple[str, ...], int]) -> None:
    parts, names, num_groups = drawn
    has_draft_states = parts.draft_states is not None
    packed = pack(parts, names, num_groups, has_draft_states=has_draft_states)
    plan = StepPlan.from_buffer(packed)
    assert as_plain(parts_of(plan)) == as_plain(parts)
    assert plan.buffer.tobytes() == packed
    assert plan == StepPlan.from_buffer(bytearray(packed))
    assert hash(plan) == hash(StepPlan.from_buffer(memoryview(packed)))
    for step_id in (parts.step_id ^ 1, parts.step_id ^ 2**40):
        other = Parts(step_id, *list(vars(parts).values())[1:])
        assert plan != StepPlan.from_buffer(pack(other, names, num_groups, has_draft_states=has_draft_states))


def busy_plan() -> StepPlan:
    """A plan with something in every part, of a space with two groups and two pools."""
    groups = FullAttention(4), SlidingWindow(8, 4, pool="window")
    sizes = {"device": 60, "window": 40}
    space = new_space(*groups, num_blocks=sizes, num_host_blocks=sizes)
    rows = [allocate(space, tokens(10, first=100 * index)) for index in range(4)]
    run_step(space)
    space.swap_out(rows[0])
    run_step(space)
    space.swap_in(rows[0])
    space.swap_out(rows[3])
    (child,) = space.fork(rows[1])
    space.append([rows[2], int(child)], [7, 8], num_lookahead=5)
    return space.plan_step()


def test_every_part_of_a_plan_is_a_read_only_aligned_view_of_its_buffer() -> None:
    plan = busy_plan()
    parts = (*plan.swaps_out, *plan.swaps_in, *plan.copies)
    assert {part.pool for part in parts} == {new.pool for new in plan.new_blocks} == {"device", "window"}
    moves = [array for part in parts for array in (part.src_ids, part.dst_ids)]
    writes = [array for part in plan.table_writes for array in (part.rows, part.starts, part.counts, part.block_ids)]
    compute = [plan.compute.rows, plan.compute.starts, plan.compute.ends]
    base = plan.buffer.ctypes.data
    for array in [plan.buffer, *moves, *writes, *compute, *(part.block_ids for part in plan.new_blocks)]:
        assert array.dtype == np.int32
        assert not array.flags.writeable
        assert np.shares_memory(array, plan.buffer)
        assert (array.ctypes.data - base) % 16 == 0
    assert plan.buffer.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        plan.buffer[0] = 0


@pytest.mark.parametrize("as_what", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.int32).copy()])
def test_from_buffer_copies_nothing_and_gives_no_way_to_write(as_what: object) -> None:
    assert callable(as_what)
    source = as_what(busy_plan().buffer.tobytes())
    plan = StepPlan.from_buffer(source)
    assert np.shares_memory(plan.buffer, np.frombuffer(source, np.uint8))
    assert not plan.compute.rows.flags.writeable
    if isinstance(source, np.ndarray):
        assert source.flags.writeable


def test_a_plan_is_the_same_in_another_process() -> None:
    plan = busy_plan()
    program = (
        "import sys; from pagedkv import StepPlan; plan = StepPlan.from_buffer(sys.stdin.buffer.read());"
        "print(plan.step_id, plan.compute.ends.tolist(), [m.pool for m in plan.copies]);"
        "sys.stdout.flush(); sys.stdout.buffer.write(plan.buffer)"
    )
    packed = plan.buffer.tobytes()
    said = subprocess.run([sys.executable, "-c", program], input=packed, capture_output=True, check=True).stdout
    first, _, rest = said.partition(b"\n")
    assert first.decode() == f"{plan.step_id} {plan.compute.ends.tolist()} {[m.pool for m in plan.copies]}"
    assert rest == packed
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - our own bytes


def test_an_empty_step_is_a_plan_too() -> None:
    plan = new_space().plan_step()
    assert as_plain(parts_of(StepPlan.from_buffer(plan.buffer))) == as_plain(parts_of(plan))
    assert (len(plan.compute.rows), plan.table_writes, plan.new_blocks) == (0, (), ())


# Where things stand in the buffer of a space with one pool, "device", and one group: see the module's drawing.
SMALL = {"compute offset": 16 + 6 * 4 + 2, "runs length": 16 + 4 * 4 + 3, "name": 16 + 9 * 4}


def small_plan() -> npt.NDArray[np.int32]:
    """One sequence of 6 tokens in 2 blocks."""
    space = new_space()
    allocate(space, tokens(6))
    return space.plan_step().buffer.copy()


def sealed_again(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Give changed words the checksum that belongs to them, so that what else is wrong with them is noticed."""
    return np.frombuffer(sealed(words.tobytes()), np.int32)


def set_word(word: int, value: int) -> npt.NDArray[np.int32]:
    words = small_plan()
    assert words[word] != value
    words[word] = value
    return sealed_again(words)


def in_part(part: int, word: int, value: int) -> npt.NDArray[np.int32]:
    """Change a word of a part's arrays."""
    return set_word(int(small_plan()[16 + 4 * part + 2]) + word, value)


def overlapped_plan(counts: int = 0, length: int = 1) -> npt.NDArray[np.int32]:
    """A plan of one row with an unknown token, and so many more said to be; or told of so many ranges."""
    space = new_space()
    row = allocate(space, tokens(6))
    space.plan_step()
    space.append([row], None)
    words = space.plan_step().buffer.copy()
    line = 16 + 4 * 8
    assert words[line] == 10
    words[words[line + 2]] += counts
    words[line + 3] = length
    return sealed_again(words)


def drafting_plan(first: int = 0, length: int = 1) -> npt.NDArray[np.int32]:
    """A plan of one row with a draft, whose state begins so much later; or told of so many ranges."""
    space = new_space(RecurrentState(4, pool="device", num_draft_states=2))
    row = allocate(space, tokens(6))
    run_step(space)
    space.append([row], tokens(2), [2], num_draft=1)
    words = space.plan_step().buffer.copy()
    line = 16 + 4 * (words[3] - 1)
    assert words[line] == 11
    words[words[line + 2]] += first
    words[line + 3] = length
    return sealed_again(words)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: b"", "at least 16 words of 4 bytes, got 0 bytes"),
        (lambda: small_plan().tobytes()[:-1], "at least 16 words of 4 bytes"),
        (lambda: small_plan()[:20], "has 88 words, but the buffer 20"),
        (lambda: np.append(small_plan(), np.int32(0)), "has 88 words, but the buffer 89"),
        (lambda: small_plan().astype(np.float32), "must be of integers or bytes, got float32"),
        (lambda: small_plan()[::2], "must be contiguous bytes"),
        (lambda: [1, 2], "must be contiguous bytes"),
        (lambda: set_word(0, 5), "this is no plan: it begins with 0x5"),
        (lambda: small_plan().byteswap(), "this is no plan"),
        (lambda: set_word(1, 3), "has version 3 of the layout, this library reads version 5"),
        (lambda: set_word(2, 75), "has 75 words, but the buffer 88"),
        (lambda: set_word(3, 10), r"names groups \[\d+\] as outside prefix caching, of 1 tables"),
        (lambda: set_word(3, 11), "11 parts do not fit 88 words with 1 pools and 1 tables"),
        (lambda: set_word(3, 2**31 - 1), "2147483647 parts do not fit 88 words"),
        (lambda: set_word(5, -1), "a step of which -1 is a half"),
        (lambda: set_word(6, 0), "no plan has 0 pools"),
        (lambda: set_word(6, 2), "no plan has 2 pools, 1 groups, 1 tables"),
        (lambda: set_word(7, 2**30), "9 parts do not fit 88 words with 1 pools and 1073741824 tables"),
        (lambda: set_word(12, 2), "no plan has 1 pools, 2 groups, 1 tables"),
        (lambda: set_word(12, 0), "no plan has 1 pools, 0 groups, 1 tables"),
        (lambda: set_word(13, 3), "a checksum of kind 3, which this library does not know"),
        (lambda: set_word(16, 2), "names part 2 of 0 where part 1 of 0 belongs"),
        (
            lambda: set_word(SMALL["compute offset"], 76),
            "part 7 of 0 has 1 words from word 76 on; it begins at 72",
        ),
        (lambda: set_word(SMALL["runs length"], -1), "part 5 of 0 has -1 words"),
        (lambda: set_word(SMALL["runs length"], 2**31 - 1), "part 5 of 0 has 2147483647 words"),
        (lambda: set_word(SMALL["runs length"], 0), "part 5 of 0 has 0 words from word 56 on"),
        (lambda: set_word(SMALL["name"], 3), "the names of 1 pools take 8 bytes, but their part has 12"),
        (lambda: set_word(SMALL["name"], 9), "takes 9 bytes, but only 8 are left"),
        (lambda: set_word(SMALL["name"] + 1, -1), "the name of pool 0 is not UTF-8"),
        (lambda: in_part(4, 0, -3), "word 56 is negative: -3"),
        (lambda: in_part(4, 8, 3), "the runs of group 0 count 3 entries, the shortest 3, but 2 are there"),
        (lambda: in_part(4, 8, 0), "the runs of group 0 count 0 entries"),
        (lambda: in_part(6, 4, 6), "range 0 begins at 6 and ends at 6"),
        (lambda: overlapped_plan(counts=7), "range 0 ends at 7 with 8 unknown tokens"),
        (lambda: drafting_plan(first=2), "range 0 ends at 8, before its first draft state, 9"),
        (lambda: drafting_plan(length=2), "the part of draft states has 2 values, but 1 ranges are computed"),
        (lambda: overlapped_plan(length=2), "the part of unknown tokens has 2 values, but 1 ranges are computed"),
    ],
)
def test_a_buffer_that_is_no_plan_is_refused(broken: object, message: str) -> None:
    assert callable(broken)
    with pytest.raises(PlanError, match=message):
        StepPlan.from_buffer(broken())


@given(st.integers(0, 87), st.integers(-(2**31), 2**31 - 1), st.sampled_from((XXH3, SUMS)))
def test_a_changed_word_is_noticed_wherever_it_is(word: int, value: int, kind: int) -> None:
    words = sealed_as(kind)
    StepPlan.from_buffer(words)
    if words[word] != value:
        words[word] = value
        with pytest.raises(PlanError):
            StepPlan.from_buffer(words)


@given(st.lists(st.integers(0, 88 * 32 - 1), min_size=1, max_size=8, unique=True), st.sampled_from((XXH3, SUMS)))
def test_flipped_bits_are_noticed(places: list[int], kind: int) -> None:
    spoilt = bytearray(sealed_as(kind).tobytes())
    for place in places:
        spoilt[place // 8] ^= 1 << place % 8
    with pytest.raises(PlanError):
        StepPlan.from_buffer(spoilt)


@given(st.integers(16, 87), st.integers(16, 87), st.sampled_from((XXH3, SUMS)))
def test_exchanged_words_are_noticed(one: int, other: int, kind: int) -> None:
    words = sealed_as(kind)
    if words[one] != words[other]:
        words[[one, other]] = words[[other, one]]
        with pytest.raises(PlanError):
            StepPlan.from_buffer(words)


def sealed_as(kind: int) -> npt.NDArray[np.int32]:
    """A plan with a checksum of one kind."""
    words = small_plan()
    words[13] = kind
    return sealed_again(words).copy()


def test_a_plan_is_sealed_by_what_is_installed_and_says_by_what() -> None:
    """With the package xxhash by it, without it by sums; a plan of the other kind then says what to install."""
    program = """
import sys
sys.modules["xxhash"] = None
import numpy as np
from pagedkv import BlockSpace, FullAttention, SpaceConfig, StepPlan
from pagedkv.errors import MissingExtraError
space = BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=9, max_sequences=2, max_tokens=20))
space.allocate(range(6))
plan = space.plan_step()
assert plan.buffer[13] == 2 and StepPlan.from_buffer(plan.buffer.tobytes()) == plan
print(plan.buffer.tobytes().hex())
try:
    StepPlan.from_buffer(bytes.fromhex(sys.argv[1]))
except MissingExtraError as problem:
    assert "xxhash" in str(problem)
else:
    raise AssertionError("read without the package")
"""
    words = small_plan()
    assert words[13] == XXH3
    command = [sys.executable, "-c", program, words.tobytes().hex()]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert not ran.returncode, ran.stderr
    assert StepPlan.from_buffer(bytes.fromhex(ran.stdout)).compute.ends.tolist() == [6]


@given(st.integers(0, 87), st.integers(-(2**31), 2**31 - 1))
def test_no_changed_word_leads_outside_of_the_buffer(word: int, value: int) -> None:
    """Whatever a word is changed to, reading raises ours or gives parts of the numbers that the buffer has."""
    words = small_plan()
    words[word] = value
    try:
        plan = StepPlan.from_buffer(sealed_again(words))
    except PlanError:
        return
    writes = plan.table_writes[0]
    assert len(writes.block_ids) == writes.counts.sum() == 2
    assert len(plan.compute.rows) == len(plan.compute.starts) == len(plan.compute.ends) == 1
    assert len(plan.new_blocks[0].block_ids) == 2


def test_moves_stand_in_the_order_of_the_pools_whichever_was_copied_in_first() -> None:
    """The first fork writes into a block that is full in the first pool, and partly filled in the second."""
    groups = (FullAttention(2, pool="first"), FullAttention(4, pool="second"))
    space = BlockSpace(SpaceConfig(groups, num_blocks={"first": 50, "second": 50}, max_sequences=4, max_tokens=100))
    rows = []
    for length in (2, 3):
        allocation = space.allocate(range(length))
        assert isinstance(allocation, Allocation)
        rows.append(allocation.row)
    children = [int(space.fork(row)[0]) for row in rows]
    space.append(children[0], [9])  # copies in the second pool alone
    space.append(children[1], [9])  # ... and in both
    plan = space.plan_step()
    assert [moves.pool for moves in plan.copies] == ["first", "second"]
    assert StepPlan.from_buffer(plan.buffer.tobytes()) == plan
