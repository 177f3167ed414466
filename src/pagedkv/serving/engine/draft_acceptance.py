"""Judging drafts: which guesses are what would have been sampled, and what the answer gains by them.

Behind each draft a token is sampled as if the drafts before it were the answer's: with the penalties, bans and noise of
that position. So the first of these tokens is what no guess could change; as long as the guess is the token, the next
one stands as well. An answer is token for token what it is without guesses, drawn or not, and ends where it would: what
was sampled behind a token that ends it is nobody's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pagedkv.serving.engine.sampled_rows import SampledRow
from pagedkv.serving.engine.sampling import NO_TOKEN, SampledTokens

__all__ = ["DraftResult", "accept_drafts", "only"]


class DraftResult(NamedTuple):
    """What came of a row with drafts.

    Args:
        token_id: the last token that its answer gained, NO_TOKEN where it failed.
        num_accepted: drafts that it gained before.
        has_ended: whether that token is the answer's last by its own rules.
        failure: why the row has failed.
    """

    token_id: int
    num_accepted: int
    has_ended: bool = False
    failure: Exception | None = None


def accept_drafts(row: SampledRow, lines: range, token_ids: Sequence[int], sampled: SampledTokens) -> DraftResult:
    """Let a row's answer grow by what was sampled, up to the first token that was guessed wrong or ends it.

    Args:
        row: the row; lines: which of those sampled are its own.
        token_ids: of all lines; sampled: what else is known of them.
    """
    row.request.num_drafted += len(row.drafts)
    for num_accepted, line in enumerate(lines):
        if line in sampled.failures:
            return DraftResult(NO_TOKEN, num_accepted, failure=sampled.failures[line])
        has_ended = row.sample.take(token_ids[line], sampled.logprobs.get(line))
        if has_ended or row.drafts[num_accepted : num_accepted + 1] != (token_ids[line],):
            return DraftResult(token_ids[line], num_accepted, has_ended)
        row.request.num_accepted += 1
    raise AssertionError("behind the last draft nothing is guessed")


def only(sampled: SampledTokens, lines: Sequence[int]) -> SampledTokens:
    """Leave out all but some lines; those that are left are numbered anew."""
    places = {line: place for place, line in enumerate(lines)}
    which = torch.tensor(lines, dtype=torch.int64, device=sampled.token_ids.device)
    return SampledTokens(
        sampled.token_ids[which],
        tuple(replace(each, row=places[each.row]) for each in sampled.waiting if each.row in places),
        {places[line]: failure for line, failure in sampled.failures.items() if line in places},
        {places[line]: told for line, told in sampled.logprobs.items() if line in places},
    )
