"""Keys that an indexer selects: each query attends to these alone, however long the other rows are."""

from dataclasses import replace

import pytest
import torch

from pagedkv.attention import AttentionLayer, KeysInRows, ReferenceBackend, Unfolding, selected
from tests.attention.paged import Case, paged_case

PLAIN = AttentionLayer(group=0, index=1, num_heads=4, scale=0.5)
LAYERS = {"plain": PLAIN, "sinks": replace(PLAIN, has_sinks=True), "soft cap": replace(PLAIN, soft_cap=2.0)}
RANGES = {"decoding": [(16, 17), (0, 1), (8, 9)], "drafts": [(3, 6), (20, 23)], "a prompt": [(5, 18)]}
K = 4


def positions_of(ranges: list[tuple[int, int]]) -> torch.Tensor:
    return torch.stack([torch.arange(start, stop) for start, stop in ranges])


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_all_keys_selected_are_attention_by_its_definition(name: str, ranges: str) -> None:
    layer, case = LAYERS[name], paged_case(RANGES[ranges])
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0]) if layer.has_sinks else None
    expected = ReferenceBackend(case.storage, [layer]).attend(0, case.query, case.step, sinks=sinks)
    torch.testing.assert_close(attended(case, layer, RANGES[ranges], None, sinks), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranges", RANGES)
def test_a_key_that_is_not_selected_has_no_weight(ranges: str) -> None:
    """Keys that are left out may be anything, and those that are selected may be few."""
    case = paged_case(RANGES[ranges])
    positions = positions_of(RANGES[ranges])
    chosen = torch.stack([positions - back for back in range(K)], dim=-1).clamp(min=0)
    found = attended(case, PLAIN, RANGES[ranges], chosen, None)
    windowed = replace(PLAIN, window=K)
    expected = ReferenceBackend(case.storage, [windowed]).attend(0, case.query, case.step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_selected_beyond_the_mask_is_not_seen() -> None:
    """As where fewer keys are there than are to be selected."""
    rows = rows_of(RANGES["decoding"])
    everything = torch.arange(17).expand(3, 1, 17)
    assert torch.equal(rows.selected(everything), rows.mask)
    assert rows.mask.sum(dim=-1).flatten().tolist() == [17, 1, 9]
    assert rows.positions.tolist() == 3 * [list(range(17))]


def test_padding_of_a_graph_changes_no_answer() -> None:
    """Keys beyond the longest row, and a row without tokens, whose table is of null blocks."""
    case = paged_case(RANGES["decoding"])
    group = case.step.groups[0]
    padded = replace(group, block_tables=torch.nn.functional.pad(group.block_tables, (0, 0, 0, 1)))
    keys = case.storage.keys(0, 1)
    few, many = rows_of(RANGES["decoding"]), rows_of([*RANGES["decoding"], (0, 1)], num_beyond=15)
    assert torch.equal(many.read(keys, padded)[:3, :17], few.read(keys, group))
    assert many.read(keys, padded).shape[:2] == (4, 32)
    assert many.read(keys, padded).isfinite().all()
    assert torch.equal(many.mask[:3, ..., :17], few.mask)
    assert not many.mask[..., 17:].any()


def rows_of(ranges: list[tuple[int, int]], num_beyond: int = 0) -> KeysInRows:
    return KeysInRows(PLAIN, positions_of(ranges), max(stop for _, stop in ranges) + num_beyond)


def attended(
    case: Case,
    layer: AttentionLayer,
    ranges: list[tuple[int, int]],
    indices: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, group = rows_of(ranges), case.step.groups[0]
    query = case.query.view(len(ranges), -1, *case.query.shape[1:]).transpose(1, 2)
    views = case.storage.keys(0, layer.index), case.storage.values(0, layer.index)
    key, value = (rows.read(blocks, group).transpose(1, 2) for blocks in views)
    seen = rows.mask if indices is None else rows.selected(indices)
    return rows.attend(layer, query, key, value, seen, sinks).flatten(0, 1)


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_latents_are_attended_to_as_the_keys_that_they_unfold_to(
    name: str, ranges: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one piece, and a few tokens at a time."""
    layer, case = replace(LAYERS[name], is_latent=True), paged_case(RANGES[ranges], num_key_heads=1, dims=(8, 8))
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0]) if layer.has_sinks else None
    group, rows = case.step.groups[0], rows_of(RANGES[ranges])
    latents = case.storage.keys(0, 1)[:, :, 0]
    unfolding = Unfolding(torch.randn(4, 8, 6), torch.randn(4, 5, 3))
    query = torch.randn(len(rows.mask), 4, rows.mask.shape[2], 6)
    positions = positions_of(RANGES[ranges])
    indices = torch.stack([positions, positions - 2, positions + 3], dim=-1)  # of which the last is not seen
    indices[indices < 0] = 100
    whole = rows.read(latents, group)
    key = torch.einsum("rtl,hlk->rhtk", whole, unfolding.keys)
    value = torch.einsum("rtl,hlv->rhtv", whole[..., :5], unfolding.values)
    few = indices.clamp(max=whole.shape[1] - 1)
    expected = rows.attend(layer, query, key, value, rows.selected(few), sinks)
    for most in (2**27, 1):
        monkeypatch.setattr(selected, "MOST_ELEMENTS", most)
        found = rows.attend_latents(layer, unfolding, query, latents, group, indices, sinks)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
