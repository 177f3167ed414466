"""Kernels of others: chosen by layer, refused with a reason, and right where they are installed."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import Allocation, BlockSpace, FullAttention, SpaceConfig
from pagedkv.attention import (
    AttentionLayer,
    CPUBackend,
    GroupMetadata,
    KnownRanges,
    PreferringBackend,
    ReferenceBackend,
    StepMetadata,
    backend_for,
    flash_infer,
    varlen,
)
from pagedkv.attention.facts import LayerFacts, facts_of
from pagedkv.attention.flash_infer import list_pages
from pagedkv.attention.selection import LayerChoice, choose
from pagedkv.device import KeyValueShape, KVStorage, LatentShape
from pagedkv.errors import ConfigurationError
from tests.attention.paged import Case, paged_case
from tests.attention.test_on_gpu import group_there

pytestmark = pytest.mark.interpreted

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
RAGGED = [(0, 1), (6, 7), (0, 5), (7, 7), (3, 11), (40, 41), (12, 16), (15, 16), (0, 0), (0, 16), (100, 101)]
SHAPE = KeyValueShape(2, 2, 64, dtype=torch.bfloat16)
LAYER = AttentionLayer(0, 1, 4, 0.2)
FACTS = LayerFacts(LAYER, SHAPE, 256, 1, torch.bfloat16, "cuda", batch_invariant=False)
LAYERS = {
    "plain": LAYER,
    "window": replace(LAYER, window=6),
    "window of one": replace(LAYER, window=1),
    "soft cap": replace(LAYER, soft_cap=0.5),
    "all of it": replace(LAYER, window=9, soft_cap=0.5),
    "chunk": replace(LAYER, chunk=6),
}


def plain_varlen(  # noqa: PLR0913, PLR0917 - torch's arguments
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """What torch's documentation says of ``varlen_attn``, row by row."""
    assert cu_seq_k is None
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[2])
    counts = cu_seq_q.diff()
    assert max_q == counts.max()
    assert max_k == seqused_k.max()
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    for row, length in enumerate(seqused_k.tolist()):
        tokens = slice(int(cu_seq_q[row]), int(cu_seq_q[row + 1]))
        position = torch.arange(length)
        block, offset = block_table[row, position // key.shape[1]].long(), position % key.shape[1]
        keys, values = (
            side[block, offset].double().repeat_interleave(query.shape[1] // key.shape[2], 1) for side in (key, value)
        )
        asked = length - int(counts[row]) + torch.arange(int(counts[row]))[:, None]
        seen = position <= asked + window_size[1]
        if window_size[0] >= 0:
            seen &= position >= asked - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[tokens].double(), keys) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(2)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, values.nan_to_num()).to(query.dtype)
    return out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch_invariant": True}, "depend on the other rows"),
        ({"device": "cpu"}, "are not on a GPU"),
        ({"shape": LatentShape(2, 64)}, "does not store keys and values"),
        ({"layer": replace(LAYER, is_latent=True)}, "does not store keys and values"),
        ({"query_dtype": torch.float32}, "both must be float16"),
        ({"shape": replace(SHAPE, dtype=torch.float8_e4m3fn)}, "keys torch.float8_e4m3fn"),
        ({"layer": replace(LAYER, chunk=4)}, "has chunks"),
        ({"layer": replace(LAYER, has_sinks=True)}, "has learnt sinks"),
        ({"layer": replace(LAYER, window=4, num_sink_tokens=1)}, "sink tokens before its window"),
        ({"shape": KeyValueShape(2, 2, 64, 128, dtype=torch.bfloat16)}, "64 dimensions and values 128"),
        ({"element_stride": 8}, "8 elements lie between"),
        ({"shape": replace(SHAPE, key_dim=80, value_dim=80)}, "80 dimensions, FlashInfer serves 64, 128, 256"),
    ],
    ids=str,
)
def test_flashinfer_says_why_it_does_not_serve(change: dict[str, object], reason: str) -> None:
    assert flash_infer.refusal(FACTS, "0.7") is None
    told = flash_infer.refusal(replace(FACTS, **change), "0.7")  # type: ignore[arg-type]
    assert told is not None
    assert reason in told


def test_flashinfer_that_is_not_installed_is_told() -> None:
    told = flash_infer.refusal(FACTS, None)
    assert told is not None
    assert "is not installed" in told


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer": replace(LAYER, soft_cap=2.0)}, "soft cap"),
        ({"shape": replace(SHAPE, key_dim=264, value_dim=264)}, "264 dimensions"),
        ({"shape": replace(SHAPE, key_dim=60, value_dim=60)}, "60 dimensions"),
        ({"block_size": 16}, "blocks have 16 tokens"),
        ({"device": "cpu"}, "are not on a GPU"),
    ],
    ids=str,
)
def test_varlen_says_why_it_does_not_serve(change: dict[str, object], reason: str) -> None:
    assert varlen.refusal(replace(FACTS, batch_invariant=True), plain_varlen) is None
    told = varlen.refusal(replace(FACTS, **change), plain_varlen)  # type: ignore[arg-type]
    assert told is not None
    assert reason in told


def test_a_torch_whose_varlen_takes_no_block_table_is_told() -> None:
    def of_old(query: torch.Tensor, window_size: tuple[int, int] = (-1, -1)) -> torch.Tensor:
        del window_size
        return query

    told = varlen.refusal(FACTS, of_old)
    assert told is not None
    assert f"varlen_attn of torch {torch.__version__} takes no block_table, no seqused_k" in told
    assert varlen.refusal(FACTS, None) == f"torch {torch.__version__} has no varlen_attn"


def test_the_plain_varlen_takes_what_torchs_takes() -> None:
    """The stand-in has torch's parameters, in torch's order, where torch has those that are needed."""
    function = varlen.installed_function()
    if function is None or "block_table" not in inspect.signature(function).parameters:
        pytest.skip(f"varlen_attn of torch {torch.__version__} takes no block table")
    theirs = [name for name in inspect.signature(function).parameters if name != "return_aux"]
    assert list(inspect.signature(plain_varlen).parameters) == theirs


@pytest.mark.parametrize("name", ["plain", "window", "window of one"])
@pytest.mark.parametrize("num_key_heads", [2, 4])
def test_varlen_is_asked_for_the_right_thing(name: str, num_key_heads: int) -> None:
    """By torch's own description of it; torch's kernel runs on a GPU alone, and not in every version."""
    case, layer = paged_case(RAGGED, num_key_heads=num_key_heads), LAYERS[name]
    group, known = group_and_known(case)
    found = varlen.VarlenAttention(case.storage, {3: layer}, plain_varlen).attend(3, case.query, group, known)
    expected = ReferenceBackend(case.storage, [layer]).attend(0, case.query, case.step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_first_that_does_not_refuse_serves() -> None:
    assert choose(["flashinfer", "varlen"], {"flashinfer": None, "varlen": None}) == LayerChoice("flashinfer", ())
    assert choose(["varlen", "flashinfer"], {"flashinfer": None, "varlen": "why"}) == LayerChoice(
        "flashinfer", ("varlen: why",)
    )
    assert choose(["varlen"], {"flashinfer": None, "varlen": "why"}) == LayerChoice("own", ("varlen: why",))
    assert choose([], {"flashinfer": None}) == LayerChoice("own", ())


def test_layers_that_all_refuse_are_our_own_and_say_why() -> None:
    case = paged_case(RAGGED)
    layers = [LAYERS["plain"], LAYERS["chunk"]]
    own = CPUBackend(case.storage, layers)
    backend = PreferringBackend(
        own, case.storage, layers, prefer=["flashinfer", "varlen"], query_dtype=torch.float32, batch_invariant=False
    )
    assert [choice.name for choice in backend.choices] == ["own", "own"]
    assert all(len(choice.reasons) == 2 for choice in backend.choices)
    for number in (0, 1):
        expected = own.attend(number, case.query, case.step)
        assert torch.equal(backend.attend(number, case.query, case.step), expected)


def test_a_step_whose_lengths_the_host_does_not_know_is_our_own() -> None:
    """Who takes lengths from the host is asked for no such step."""
    asked = []

    def noting(*arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - torch's
        asked.append(options["seqused_k"].tolist())
        return plain_varlen(*arguments, **options)

    case = paged_case(RAGGED)
    own = CPUBackend(case.storage, [LAYER])
    backend = PreferringBackend(
        own, case.storage, [LAYER], prefer=["varlen"], query_dtype=torch.float32, batch_invariant=True
    )
    backend._others[0] = varlen.VarlenAttention(case.storage, {0: LAYER}, noting)
    expected = own.attend(0, case.query, case.step)
    assert torch.equal(backend.attend(0, case.query, case.step), expected)
    assert not asked
    group, known = group_and_known(case)
    told = replace(case.step, groups=(replace(group, known=known),))
    torch.testing.assert_close(backend.attend(0, case.query, told), expected, rtol=1e-5, atol=1e-5)
    assert len(asked) == 1


@pytest.mark.parametrize("prefer", ["flashinfer", ["flash"], [1], 3])
def test_unknown_preferences_are_refused(prefer: object) -> None:
    with pytest.raises(ConfigurationError, match="prefer must be some of"):
        backend_for(
            paged_case(RAGGED).storage,
            [LAYER],
            max_places=1,
            max_tokens=1,
            max_length=1,
            query_dtype=torch.float32,
            prefer=prefer,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", ["plain", "window", "window of one"])
def test_page_lists_are_the_plain_ones(name: str, block_size: int) -> None:
    layer = LAYERS[name]
    pages = list_pages(known_of(RAGGED), layer, block_size)
    places, columns, indptr, tokens, last = [], [], [0], [0], []
    for place, (start, stop) in enumerate(RAGGED):
        if start < stop:
            mine = range(layer.first_seen(start) // block_size, (stop - 1) // block_size + 1)
            places += [place] * len(mine)
            columns += list(mine)
            indptr.append(len(columns))
            tokens.append(tokens[-1] + stop - start)
            last.append(stop - (stop - 1) // block_size * block_size)
    assert pages.places.tolist() == places
    assert pages.columns.tolist() == columns
    assert pages.page_indptr.tolist() == indptr
    assert pages.query_indptr.tolist() == tokens
    assert pages.last_page_len.tolist() == last


def test_lengths_are_known_unless_tokens_are_not() -> None:
    """A range that ends in unknown tokens is an upper bound, and nothing is told of it."""
    space = BlockSpace(SpaceConfig((FullAttention(4),), 20))
    given = space.allocate(range(6))
    assert isinstance(given, Allocation)
    plan = space.plan_step()
    known = KnownRanges.of(plan, 0)
    assert known is not None
    assert (known.starts.tolist(), known.ends.tolist()) == ([0], [6])
    space.append([given.row], None, [1])
    assert KnownRanges.of(space.plan_step(), 0) is None


def known_of(ranges: list[tuple[int, int]]) -> KnownRanges:
    return KnownRanges(*(np.array([each[side] for each in ranges], np.int32) for side in (0, 1)))


def group_and_known(case: Case) -> tuple[GroupMetadata, KnownRanges]:
    (group,) = case.step.groups
    return group, KnownRanges(group.starts.numpy(), group.seq_lens.numpy())


if DEVICE.type == "cuda":
    IS_INSTALLED = flash_infer.installed_version() is not None

    def there(case: Case) -> tuple[KVStorage, StepMetadata, torch.Tensor]:
        """The same case on the GPU, whose lengths the host knows."""
        storage = KVStorage(case.storage.config, case.storage.shapes, DEVICE)
        storage.pool_of(0).device_bytes.copy_(case.storage.pool_of(0).device_bytes)
        group, known = group_and_known(case)
        moved = replace(group_there(group), known=known)
        return storage, StepMetadata((moved,), case.step.num_places, case.step.num_tokens), case.query.to(DEVICE)

    def preferring(storage: KVStorage, layers: list[AttentionLayer]) -> PreferringBackend:
        backend = backend_for(
            storage,
            layers,
            max_places=len(RAGGED),
            max_tokens=64,
            max_length=128,
            query_dtype=torch.bfloat16,
            batch_invariant=False,
            prefer=("flashinfer", "varlen"),
        )
        assert isinstance(backend, PreferringBackend)
        return backend

    @pytest.mark.skipif(not IS_INSTALLED, reason="FlashInfer is not installed")
    @pytest.mark.parametrize("block_size", [4, 16])
    @pytest.mark.parametrize("name", LAYERS)
    def test_flashinfer_equals_the_reference(name: str, block_size: int) -> None:
        """Also from steps that it is not to serve: unknown lengths, and chunks, are ours."""
        case, layer = paged_case(RAGGED, dims=(64, 64), dtype=torch.bfloat16, block_size=block_size), LAYERS[name]
        expected = ReferenceBackend(case.storage, [layer]).attend(0, case.query, case.step)
        storage, step, query = there(case)
        backend = preferring(storage, [layer, replace(layer, index=0)])
        assert backend.choices[0].name == ("own" if layer.chunk else "flashinfer")
        unknown = replace(step, groups=(replace(step.groups[0], known=None),))
        for given in (step, unknown, step):
            found = backend.attend(0, query, given)
            torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=3e-2, atol=3e-2)
        other = ReferenceBackend(case.storage, [replace(layer, index=0)]).attend(0, case.query, case.step)
        found = backend.attend(1, query, step)
        torch.testing.assert_close(found.cpu().double(), other.double(), rtol=3e-2, atol=3e-2)

    @pytest.mark.skipif(not IS_INSTALLED, reason="FlashInfer is not installed")
    def test_what_is_captured_is_our_own() -> None:
        """A graph is to serve other lengths than those that the host knows now."""
        case = paged_case(RAGGED, dims=(64, 64), dtype=torch.bfloat16)
        storage, step, query = there(case)
        backend = preferring(storage, [LAYER])
        unknown = replace(step, groups=(replace(step.groups[0], known=None),))
        expected = backend.attend(0, query, unknown)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = backend.attend(0, query, step)
        graph.replay()
        assert torch.equal(captured[: len(query)], expected[: len(query)])

    def test_what_is_not_installed_is_told_there() -> None:
        storage, _, _ = there(paged_case(RAGGED, dims=(64, 64), dtype=torch.bfloat16))
        (choice,) = preferring(storage, [LAYER]).choices
        facts = facts_of(storage, LAYER, torch.bfloat16, batch_invariant=False)
        expected = flash_infer.refusal(facts, flash_infer.installed_version())
        assert choice.name == ("flashinfer" if expected is None else "own")
        assert (f"flashinfer: {expected}" in choice.reasons) == (expected is not None)
