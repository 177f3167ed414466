"""Acceptance of drafts: a draft is accepted where it equals the token that is sampled at its position.

After each draft a token is sampled as if all drafts before it were accepted: with the penalties, bans and noise of that
position. The first of these tokens depends on no draft, and each further one is valid while all drafts before it were
equal to the sampled tokens. So an answer has the tokens that it would have without drafts, greedy or not, and ends at
the same place: tokens sampled after one that ends it are dropped.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pagedkv.engine.sampled_rows import SampledRow
from pagedkv.engine.sampling import NO_TOKEN, SampledTokens

__all__ = ["DraftResult", "accept_drafts", "only"]


class DraftResult(NamedTuple):
    """The result of a row with drafts.

    Args:
        token_id: the last token appended to its answer, NO_TOKEN where the row failed.
        num_accepted: drafts accepted before that token.
        has_ended: whether that token ended the answer by a stop rule.
        failure: why the row has failed; None: it has not.
    """

    token_id: int
    num_accepted: int
    has_ended: bool = False
    failure: Exception | None = None


def accept_drafts(row: SampledRow, lines: range, token_ids: Sequence[int], sampled: SampledTokens) -> DraftResult:
    """Append a row's sampled tokens to its answer, up to the first that differs from its draft or ends the answer.

    Args:
        row: the row; lines: its lines of the logits.
        token_ids: the sampled tokens of all lines; sampled: their failures and log-probabilities.
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
    """Select lines, in this order; their rows are renumbered from 0."""
    places = {line: place for place, line in enumerate(lines)}
    which = torch.tensor(lines, dtype=torch.int64, device=sampled.token_ids.device)
    return SampledTokens(
        sampled.token_ids[which],
        tuple(replace(each, row=places[each.row]) for each in sampled.waiting if each.row in places),
        {places[line]: failure for line, failure in sampled.failures.items() if line in places},
        {places[line]: logprobs for line, logprobs in sampled.logprobs.items() if line in places},
    )
