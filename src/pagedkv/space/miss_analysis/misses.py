"""The third pass: the cause for each token that does not hit, in runs of equal cause."""

from itertools import groupby, pairwise
from typing import TypeAlias

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.miss_causes import Miss, MissCause
from pagedkv.space.miss_analysis.case import Case, Finding, Lack, name_of
from pagedkv.space.miss_analysis.lacks import first_lack_of_chains
from pagedkv.space.miss_analysis.prompt_digests import digests_up_to
from pagedkv.space.miss_analysis.verdicts import cause_of_ghost, verdict_of
from pagedkv.space.prompts import NO_DIGESTS
from pagedkv.space.state import Group
from pagedkv.tables.block_fates import FORGOTTEN, NAMED, NEVER, find_fates

__all__ = ["misses_of"]

_Run: TypeAlias = tuple[int, int, MissCause]
"""First token, end and cause of tokens that do not hit."""


def misses_of(case: Case, finding: Finding) -> tuple[Miss, ...]:
    """Return the cause for each token that does not hit, in runs."""
    end, num_tokens = case.hit.num_tokens, len(case.prompt.tokens)
    if finding.verdict.cause is MissCause.NOT_CACHING:
        return (Miss(0, num_tokens, MissCause.NOT_CACHING),)
    runs = [*_up_to_the_bound(case, finding), (max(end, case.bounded), case.most, MissCause.BOUNDED)]
    runs.append((max(end, case.most), num_tokens, MissCause.NOT_FULL))
    joined = []
    for cause, same in groupby((run for run in runs if run[0] < run[1]), key=lambda run: run[2]):
        pieces = list(same)
        joined.append(Miss(pieces[0][0], pieces[-1][1], cause))
    return tuple(joined)


def _up_to_the_bound(case: Case, finding: Finding) -> list[_Run]:
    """Return why tokens that could have hit did not: runs from the hit's end to the bound."""
    start, stop, cause = case.hit.num_tokens, case.bounded, finding.verdict.cause
    if start >= stop:
        return []
    if cause in {MissCause.BEING_COMPUTED, MissCause.LOADING}:
        return [(start, stop, cause)]
    lack = first_lack_of_chains(case, stop, finding.lack)
    if lack is None:  # all that is cached, or only windows and states
        group = case.state.cached_groups[0]
        whole = start, stop, cause
        return [whole] if group.keeps_whole_prefix else _by_block(case, group, whole, finding.lack)
    known = case.aligned(lack.start)
    if known > start:
        rest = known, stop, verdict_of(case, lack).cause
        return [(start, known, cause), *_by_block(case, lack.group, rest, lack)]
    return _by_block(case, lack.group, (start, stop, cause), lack)


def _by_block(case: Case, group: Group, whole: _Run, lack: Lack | None) -> list[_Run]:
    """Return what happened to each block, in runs.

    Args:
        case: the case; group: the group whose blocks are examined.
        whole: the tokens, and why the first block does not hit if it has no ghost; this cause also holds for the
            blocks behind it, up to one with a ghost.
        lack: a lack, maybe of another group; its digests are reused.
    """
    start, stop, cause = whole
    size, first = group.block_size, start // group.block_size
    fates = np.empty(stop // size - first, np.int32)
    known = lack.digests if lack is not None and lack.group.lane == group.lane else NO_DIGESTS
    find_fates(group.pool.arrays, name_of(group), digests_up_to(case, group, stop // size, known)[first:], fates)
    begins = _begins_of_runs(fates)
    runs: list[_Run] = []
    is_gone = False
    for index, fate in zip(begins, fates[begins].tolist(), strict=True):
        if fate > NEVER:
            cause, is_gone = cause_of_ghost(group, fate), True
        elif fate != NAMED and is_gone:
            cause, is_gone = MissCause.UNKNOWN if fate == FORGOTTEN else MissCause.NEVER_STORED, False
        runs.append((max(start, (first + index) * size), stop, cause))
    return [(begin, after[0], why) for (begin, _, why), after in pairwise([*runs, (stop, stop, cause)])]


def _begins_of_runs(fates: Int32Array) -> list[int]:
    """Return where runs of equal fates begin."""
    begins: list[int] = np.flatnonzero(np.append(True, fates[1:] != fates[:-1])[: len(fates)]).tolist()
    return begins
