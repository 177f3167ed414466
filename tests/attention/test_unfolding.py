"""Matrices read out of what a model makes of unit latents, and what is none."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from pagedkv.attention import Unfolding, UnfoldingReader

Unfold: TypeAlias = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

NUM_HEADS, FIRST, SECOND, PLAIN, VALUE = 3, 6, 2, 5, 4
pytestmark = pytest.mark.interpreted


def unfold_of(dtype: torch.dtype = torch.float32) -> Unfold:
    """Unfold as DeepSeek's models do: ``[1, 1, n, width]`` each into keys and values ``[1, heads, n, dim]``."""
    weight = torch.randn(NUM_HEADS * (PLAIN + VALUE), FIRST, generator=torch.Generator().manual_seed(3)).to(dtype)

    def unfold(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = (first[0, 0] @ weight.T).view(1, -1, NUM_HEADS, PLAIN + VALUE).transpose(1, 2)
        key = torch.cat([made[..., :PLAIN], second.expand(-1, NUM_HEADS, -1, -1)], dim=3)
        return key, made[..., PLAIN:]

    return unfold


def read(unfold: Unfold, dtype: torch.dtype = torch.float32) -> UnfoldingReader:
    """Let a layer of two tokens unfold what the reader hands out."""
    reader = UnfoldingReader({7: (FIRST, SECOND)})
    key, value = unfold(
        *reader.update(7, torch.randn(1, 1, 2, FIRST).to(dtype), torch.randn(1, 1, 2, SECOND).to(dtype))
    )
    query = torch.randn(1, NUM_HEADS, 2, PLAIN + SECOND).to(dtype)
    out = reader.attend(torch.nn.Identity(), query, key, value, None, {})
    assert out.shape == (1, 2, NUM_HEADS, value.shape[-1])
    return reader


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matrices_are_read(dtype: torch.dtype) -> None:
    unfold = unfold_of(dtype)
    reader = read(unfold, dtype)
    assert not reader.reasons
    found = reader.unfoldings[7]
    assert found.keys.shape == (NUM_HEADS, FIRST + SECOND, PLAIN + SECOND)
    assert found.values.shape == (NUM_HEADS, FIRST, VALUE), "the second vector is in no value"
    latent = torch.randn(5, FIRST + SECOND).to(dtype)
    key, value = unfold(latent[None, None, :, :FIRST], latent[None, None, :, FIRST:])
    query = torch.randn(5, NUM_HEADS, PLAIN + SECOND).to(dtype)
    scores = torch.einsum("thk,hsk->ths", query.double(), key[0].double())
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    absorbed = torch.einsum("thl,sl->ths", found.absorb(query).double(), latent.double())
    torch.testing.assert_close(absorbed, scores, rtol=tolerance, atol=tolerance)
    mixed = latent[:, None, :FIRST].expand(-1, NUM_HEADS, -1)
    torch.testing.assert_close(found.unfold(mixed), value[0].transpose(0, 1), rtol=tolerance, atol=tolerance)


def test_values_may_be_made_of_the_whole_latent() -> None:
    def unfold(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, _ = plain(first, second)
        return key, torch.cat([first, second], dim=3).expand(-1, NUM_HEADS, -1, -1)

    plain = unfold_of()
    assert read(unfold).unfoldings[7].num_value_dims == FIRST + SECOND


def normed(unfold: Unfold) -> Unfold:
    return lambda first, second: unfold(torch.nn.functional.rms_norm(first, (FIRST,)), second)


def shifted(unfold: Unfold) -> Unfold:
    return lambda first, second: unfold(first + 0.01, second)


def turned(unfold: Unfold) -> Unfold:
    """Turn the second vector by an angle that depends on the place, behind the cache."""

    def turn(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return unfold(first, second * torch.arange(second.shape[2])[:, None].cos())

    return turn


def bounded(unfold: Unfold) -> Unfold:
    def bound(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = unfold(first, second)
        return key, value.clamp(-1, 1)

    return bound


def broken(unfold: Unfold) -> Unfold:
    return lambda first, second: unfold(first * torch.nan, second)


@pytest.mark.parametrize(
    ("change", "what"),
    [(normed, "keys"), (shifted, "keys"), (turned, "keys"), (bounded, "values"), (broken, "keys")],
)
def test_what_is_not_linear_is_told(change: Callable[[Unfold], Unfold], what: str) -> None:
    reader = read(change(unfold_of()))
    assert not reader.unfoldings
    assert reader.reasons == {7: f"its {what} are not a linear function of latents"}


def test_latents_that_are_dropped_are_told() -> None:
    def unfold(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(side[:, :, :2] for side in plain(first, second))  # type: ignore[return-value]

    plain = unfold_of()
    assert "were unfolded from" in read(unfold).reasons[7]


def test_other_layers_are_let_be() -> None:
    reader = UnfoldingReader({7: (FIRST, SECOND)})
    key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 5)
    assert reader.update(1, key, value) == (key, value)
    out = reader.attend(torch.nn.Identity(), torch.randn(1, 2, 3, 4), key, value, None, {})
    assert out.shape == (1, 3, 2, 5)
    assert not reader.unfoldings
    assert not reader.reasons


def test_what_is_read_is_a_copy() -> None:
    """Weights that change in place leave it as it was."""
    weight = torch.eye(FIRST)

    def unfold(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del second
        made = (first @ weight).expand(-1, NUM_HEADS, -1, -1)
        return made, made

    found: Unfolding = read(unfold).unfoldings[7]
    before = found.keys.clone()
    weight.mul_(2)
    assert torch.equal(found.keys, before)
