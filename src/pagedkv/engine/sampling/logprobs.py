"""Log-probabilities of chosen tokens and of the likeliest ones, for answers and for prompts.

They are computed from the model's unchanged logits, before penalties, filters and temperature, as is usual: a logit
minus the logarithm of the row's mass, rounded to float32. The logits of a long prompt are never in memory as a whole:
a few rows are computed at a time, or a slice of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, final

import torch

from pagedkv.engine.sampling.drawing import TiledScores, elements_at_once, log_mass, tiled
from pagedkv.errors import TensorError

LOGITS_ON_CPU: Final = 2**22
Wish: TypeAlias = int | tuple[int, ...]
"""What is told beside a row's token: a number of the likeliest tokens, or tokens by id."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Args:
        token_id: the token at the position; logprob: its log-probability.
        rank: number of tokens that are at least as likely, this one included: 1 is the likeliest.
        top: the requested number of likeliest tokens, each with its log-probability, the likeliest first; or the
            tokens that were named, in their order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class LogprobColumns(NamedTuple):
    """Log-probabilities of some rows' tokens, as tensors that may still be on the device.

    Args:
        rows: the rows; counts: the requested number of further tokens of each.
        own: float32 ``[n]``, log-probabilities of the rows' tokens; ranks: int64 ``[n]``.
        top_ids: int64 ``[n, most]``; top: float32 ``[n, most]``: the likeliest tokens, the likeliest first, or those
            that were named.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    own: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def by_row(self, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Copy them to the host, by row; waits for the device. ``token_ids``: the token of each of these rows."""
        logprobs = _token_logprobs(token_ids, self.own, self.ranks, self.top_ids, self.top, self.counts)
        return dict(zip(self.rows, logprobs, strict=True))


def logprob_columns(
    tiles: TiledScores, rows: Sequence[int], places: torch.Tensor, tokens: torch.Tensor, wishes: Sequence[Wish]
) -> LogprobColumns:
    """Compute log-probabilities of some rows' tokens on the device of the scores.

    Args:
        tiles: the model's unchanged logits.
        rows: the rows; places, tokens: these rows and the token of each, int64 ``[n]`` on the scores' device.
        wishes: what is told of each beside its token.

    Cost: two passes over these rows. Memory: a bounded number of scores.
    """
    mass = log_mass(tiles, places)
    own = tiles.scores[places, tokens]
    ranks = _ranks(tiles.scores, places, own)
    ids, values = tiles.largest(places, max([1, *(wish for wish in wishes if isinstance(wish, int))]))
    counts = [wish if isinstance(wish, int) else len(wish) for wish in wishes]
    if any(not isinstance(wish, int) for wish in wishes):
        ids, values = _with_named(tiles, places, wishes, ids, values)
    return LogprobColumns(rows, counts, (own - mass).float(), ranks, ids, (values - mass[:, None]).float())


def _with_named(
    tiles: TiledScores, places: torch.Tensor, wishes: Sequence[Wish], ids: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the tokens that rows name, and their scores, in the place of the likeliest; rows become equally long."""
    num_likeliest = ids.shape[1]
    width = max(num_likeliest, *(0 if isinstance(wish, int) else len(wish) for wish in wishes))
    ids = torch.nn.functional.pad(ids, (0, width - num_likeliest))
    values = torch.nn.functional.pad(values, (0, width - num_likeliest))
    for line, wish in enumerate(wishes):
        if not isinstance(wish, int):
            ids[line, : len(wish)] = torch.tensor(wish, device=ids.device)
            values[line] = tiles.scores[places[line], ids[line]]
    return ids, values


def logprobs_of(
    tiles: TiledScores, rows: Sequence[int], token_ids: Sequence[int], wishes: Sequence[Wish]
) -> list[TokenLogprobs]:
    """Return log-probabilities of some rows' tokens.

    Args:
        tiles: the model's unchanged logits.
        rows: the rows; token_ids: the token of each; wishes: what is told of each beside its token.

    Cost: that of :func:`logprob_columns`.
    """
    device = tiles.scores.device
    places, tokens = torch.tensor(rows, device=device), torch.tensor(token_ids, device=device)
    return list(logprob_columns(tiles, rows, places, tokens, wishes).by_row(token_ids).values())


def _ranks(scores: torch.Tensor, places: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Count the scores of each row that are at least that of its token."""
    num_at_once = max(1, elements_at_once(scores.device) // max(1, scores.shape[1]))
    parts = [
        (scores[places[start : start + num_at_once]] >= own[start : start + num_at_once, None]).sum(dim=1)
        for start in range(0, len(places), num_at_once)
    ]
    return torch.cat(parts)


def _token_logprobs(
    token_ids: Sequence[int],
    own: torch.Tensor,
    ranks: torch.Tensor,
    top_ids: torch.Tensor,
    top: torch.Tensor,
    counts: Sequence[int],
) -> list[TokenLogprobs]:
    columns = zip(token_ids, own.tolist(), ranks.tolist(), top_ids.tolist(), top.tolist(), counts, strict=True)
    return [
        TokenLogprobs(int(token), logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, rank, ids, values, count in columns
    ]


def prompt_logprobs(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    next_ids: Sequence[int],
    count: int,
    *,
    elements: int = LOGITS_ON_CPU,
) -> list[TokenLogprobs]:
    """Return log-probabilities of a prompt's tokens, computed a few positions at a time.

    Args:
        hidden: ``[positions, width]``, the input of the model's head.
        head: maps ``[n, width]`` to the model's final logits, ``[n, vocabulary]``.
        next_ids: the token that follows each position.
        count: the number of likeliest tokens of each position.
        elements: most logits in memory at a time; one row always fits.

    Raises:
        TensorError: the numbers of positions and of next tokens differ.
    """
    if len(hidden) != len(next_ids):
        raise TensorError(f"{len(hidden)} positions need as many next tokens, got {len(next_ids)}")
    logprobs: list[TokenLogprobs] = []
    num_at_once = 1
    while len(logprobs) < len(hidden):
        start = len(logprobs)
        logits = head(hidden[start : start + num_at_once]).float()
        some = next_ids[start : start + len(logits)]
        scores = logits.detach().contiguous()
        logprobs += logprobs_of(tiled(scores), range(len(some)), some, [count] * len(some))
        num_at_once = max(1, elements // logits.shape[1])
    return logprobs


@final
class SlicedLogprobs:
    """Log-probabilities of rows whose logits are added in slices of the vocabulary, for a very large head.

    The mass is summed slice by slice (M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018).
    Ranks compare each slice with the logit of the row's token, so these logits are given at the start.

    Args:
        token_ids: the token of each row.
        own_logits: float32 ``[rows]``, the logit of each row's token.
        count: the number of likeliest tokens of each row.
    """

    def __init__(self, token_ids: Sequence[int], own_logits: torch.Tensor, count: int) -> None:
        self._token_ids = token_ids
        self._count = count
        self._own = own_logits.float()
        self._num_seen = 0
        self._mass = torch.full_like(self._own, -torch.inf, dtype=torch.float64)
        self._ranks = torch.zeros_like(self._own, dtype=torch.int64)
        self._top = self._own.new_zeros(len(self._own), 0)
        self._top_ids = torch.zeros_like(self._top, dtype=torch.int64)

    def add(self, logits: torch.Tensor) -> None:
        """Add the next slice: float ``[rows, tokens]``, of the token ids that follow the last slice's.

        Raises:
            TensorError: another number of rows.
        """
        if logits.ndim != 2 or len(logits) != len(self._own):  # noqa: PLR2004 - rows and tokens
            raise TensorError(f"a slice of {len(self._own)} rows must be [rows, tokens], got {list(logits.shape)}")
        logits = logits.float()
        self._mass = torch.logaddexp(self._mass, logits.logsumexp(dim=1).double())
        self._ranks += (logits >= self._own[:, None]).sum(dim=1)
        values, ids = logits.topk(min(self._count, logits.shape[1]), dim=1)
        values, ids = torch.cat([self._top, values], dim=1), torch.cat([self._top_ids, ids + self._num_seen], dim=1)
        self._top, places = values.topk(min(self._count, values.shape[1]), dim=1)
        self._top_ids = ids.gather(1, places)
        self._num_seen += logits.shape[1]

    def by_row(self) -> list[TokenLogprobs]:
        """Return the log-probabilities of each row; to be called after the last slice."""
        own, top = (self._own - self._mass).float(), (self._top - self._mass[:, None]).float()
        return _token_logprobs(self._token_ids, own, self._ranks, self._top_ids, top, [self._count] * len(own))
