"""The CPU back end against the reference: ragged shapes, every capability, poisoned blocks around."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv.attention import AttentionLayer, CPUBackend, ReferenceBackend
from pagedkv.errors import ConfigurationError
from tests.attention.paged import Case, paged_case

pytestmark = pytest.mark.interpreted

RAGGED = [(0, 1), (6, 7), (0, 5), (7, 8), (3, 11), (40, 41), (12, 16), (15, 16), (16, 17), (0, 16)]
DECODING = [(0, 1), (3, 4), (4, 5), (60, 61), (15, 16)]

LAYERS = {
    "plain": AttentionLayer(0, 1, 4, 0.3),
    "window": AttentionLayer(0, 1, 4, 0.3, window=6),
    "window of one": AttentionLayer(0, 1, 4, 0.3, window=1),
    "wide window": AttentionLayer(0, 1, 4, 0.3, window=100),
    "chunk": AttentionLayer(0, 1, 4, 0.3, chunk=8),
    "chunk across blocks": AttentionLayer(0, 1, 4, 0.3, chunk=6),
    "soft cap": AttentionLayer(0, 1, 4, 0.3, soft_cap=0.5),
    "sinks": AttentionLayer(0, 1, 4, 0.3, has_sinks=True),
    "all of it": AttentionLayer(0, 1, 4, 0.3, window=6, soft_cap=0.5, has_sinks=True),
}


def both(case: Case, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer as the reference does, and as the CPU back end does."""
    sinks = torch.linspace(-1, 1, layer.num_heads) if layer.has_sinks else None
    with torch.inference_mode():
        expected = ReferenceBackend(case.storage, [layer]).attend(0, case.query, case.step, sinks=sinks)
        return expected, CPUBackend(case.storage, [layer]).attend(0, case.query, case.step, sinks=sinks)


@pytest.mark.parametrize("ranges", [RAGGED, DECODING], ids=["ragged", "decoding"])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_reference(name: str, ranges: list[tuple[int, int]]) -> None:
    expected, found = both(paged_case(ranges), LAYERS[name])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("name", ["plain", "window", "chunk"])
def test_long_prompts(name: str, dim: int) -> None:
    case = paged_case([(0, 81), (70, 90)], num_heads=2, num_key_heads=1, dims=(dim, dim))
    expected, found = both(case, replace(LAYERS[name], num_heads=2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_as_many_tokens_as_sequences_are_not_a_token_each() -> None:
    """Who computes nothing, and who computes two tokens, in one step."""
    expected, found = both(paged_case([(5, 5), (3, 5), (7, 8)]), LAYERS["plain"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_key_heads", "dims"), [(1, 1, (3, 5)), (6, 1, (8, 2)), (4, 4, (16, 8))])
def test_any_heads_and_dimensions(num_heads: int, num_key_heads: int, dims: tuple[int, int]) -> None:
    layer = AttentionLayer(0, 0, num_heads, 0.3, window=5)
    expected, found = both(
        paged_case(RAGGED, num_heads=num_heads, num_key_heads=num_key_heads, dims=dims, block_size=3), layer
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_a_window_left_is_not_read() -> None:
    """Null blocks stand where the window moved on; poisoned, they would show."""
    layer = AttentionLayer(0, 0, 4, 0.3, window=6)
    case = paged_case([(20, 21), (33, 40)], first_kept=12)
    for side in (case.storage.keys(0, 0), case.storage.values(0, 0)):
        side[0] = torch.nan
    expected, found = both(case, layer)
    assert not expected.isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_dimensions_that_are_constants_of_the_code(dim: int) -> None:
    case = paged_case(DECODING[:3], num_heads=4, num_key_heads=2, dims=(dim, dim))
    expected, found = both(case, LAYERS["plain"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_is_read_in_place_with_sums_in_float32(name: str) -> None:
    expected, found = both(paged_case(DECODING, dtype=torch.bfloat16), LAYERS[name])
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-4)  # one rounding: half of 2**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    expected, found = both(paged_case(RAGGED, dtype=dtype), LAYERS["plain"])
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_reach_their_slots_alone(dtype: torch.dtype) -> None:
    case = paged_case([(2, 7), (0, 3)], dtype=dtype)
    layer = AttentionLayer(0, 0, 4, 0.3)
    key, value = torch.randn(2, 2, 8, 8).transpose(1, 2)[:, :8].to(dtype)  # strided, as models hand them over
    pool = case.storage.pool_of(0).device_bytes
    before = pool.clone()
    ReferenceBackend(case.storage, [layer]).write(0, key, value, case.step)
    expected = pool.clone()
    pool.copy_(before)
    CPUBackend(case.storage, [layer]).write(0, key, value, case.step)
    assert torch.equal(pool, expected)
    assert not torch.equal(pool, before)


def test_slots_of_minus_one_are_skipped() -> None:
    case = paged_case([(0, 3)])
    case.step.groups[0].slot_mapping.fill_(-1)
    before = case.storage.pool_of(0).device_bytes.clone()
    CPUBackend(case.storage, [LAYERS["plain"]]).write(0, torch.ones(3, 2, 8), torch.ones(3, 2, 8), case.step)
    assert torch.equal(case.storage.pool_of(0).device_bytes, before)


@pytest.mark.parametrize("name", ["window", "soft cap", "sinks", "chunk"])
def test_each_capability_shows(name: str) -> None:
    """Negative control: without it the answer is another one."""
    case, layer = paged_case(RAGGED), LAYERS[name]
    _, with_it = both(case, layer)
    _, without = both(case, LAYERS["plain"])
    assert not torch.allclose(with_it, without, rtol=1e-3, atol=1e-3)


def test_a_part_of_a_step_answers_as_the_whole() -> None:
    case, layer = paged_case(RAGGED), LAYERS["window"]
    _, whole = both(case, layer)
    offsets = case.step.groups[0].query_start_loc.tolist()
    places = [1, 4, 8]
    tokens = np.concatenate([np.arange(offsets[place], offsets[place + 1]) for place in places])
    part = case.step.select(torch.tensor(places), torch.from_numpy(tokens))
    with torch.inference_mode():
        found = CPUBackend(case.storage, [layer]).attend(0, case.query[tokens], part)
    torch.testing.assert_close(found, whole[tokens])


@pytest.mark.parametrize("name", ["plain", "window", "chunk"])
def test_unfolded_keys_are_attended_to_alike(name: str) -> None:
    layer, case = replace(LAYERS[name], is_latent=True), paged_case(RAGGED)
    num_keys = sum(stop - layer.first_seen(start) for start, stop in RAGGED)
    key, value = torch.randn(num_keys, 4, 8), torch.randn(num_keys, 4, 5)
    expected = ReferenceBackend(case.storage, [layer]).attend_unfolded(0, case.query, key, value, case.step)
    found = CPUBackend(case.storage, [layer]).attend_unfolded(0, case.query, key, value, case.step)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [{"window": -1}, {"window": 4, "chunk": 4}, {"soft_cap": -1.0}, {"num_heads": 0}])
def test_layers_are_checked(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        AttentionLayer(**{"group": 0, "index": 0, "num_heads": 4, "scale": 1.0, **bad})  # type: ignore[arg-type]
