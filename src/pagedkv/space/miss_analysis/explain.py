"""The passes in their order: for ``BlockSpace.explain``, for observers, and for a prompt that is given a row."""

from pagedkv.contract.miss_causes import Explanation, Miss, MissCause
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.miss_analysis.case import Case, Finding, Verdict, open_case
from pagedkv.space.miss_analysis.lacks import first_lack
from pagedkv.space.miss_analysis.misses import misses_of
from pagedkv.space.miss_analysis.verdicts import verdict_of
from pagedkv.space.state import SpaceState

__all__ = ["explain", "explain_misses", "is_bare"]


def explain(state: SpaceState, prompt: Prompt, hit: PrefixHit, *, is_thorough: bool = True) -> Explanation:
    """Explain a hit that was found just now.

    Args:
        state: the space.
        prompt: the prompt.
        hit: its hit.
        is_thorough: whether to compare all blocks that continue the hit, and to explain all tokens that do not hit;
            else only the latest continuation, and the first block. O(blocks of the pool + of the prompt), or O(1).
    """
    case = open_case(state, prompt, hit, is_thorough=is_thorough)
    finding = _why_it_ends(case)
    misses = misses_of(case, finding) if is_thorough else ()
    verdict, index = finding.verdict, None if finding.lack is None else finding.lack.group.index
    return Explanation(len(prompt.tokens), hit.num_tokens, verdict.cause, verdict.position, index, *verdict[2:], misses)


def explain_misses(state: SpaceState, hit: PrefixHit) -> tuple[Miss, ...]:
    """Return why the tokens of a prompt do not hit, comparing only the latest continuation. O(tokens)."""
    case = open_case(state, hit.prompt, hit, is_thorough=False)
    return misses_of(case, _why_it_ends(case))


def _why_it_ends(case: Case) -> Finding:
    """Return why the hit ended, and which block it lacks, if it lacks one."""
    end = case.hit.num_tokens
    cause = _cause_without_a_block(case)
    if cause is not None:
        return Finding(Verdict(cause, end), None)
    lack = first_lack(case, case.aligned(end) + case.alignment)
    if lack is None:
        return Finding(Verdict(MissCause.BEING_COMPUTED, end), None)
    return Finding(verdict_of(case, lack), lack)


def _cause_without_a_block(case: Case) -> MissCause | None:
    """Return why no longer hit was possible, whatever is cached; None if one was possible."""
    if not case.state.config.prefix_caching:
        return MissCause.NOT_CACHING
    if case.hit.num_tokens >= case.most:
        return MissCause.NOT_FULL
    if case.hit.num_tokens >= case.bounded:
        return MissCause.BOUNDED
    return None if case.hit.loading is None else MissCause.LOADING


def is_bare(state: SpaceState, hit: PrefixHit) -> bool:
    """Return whether the block behind a hit has no extra keys of its own, and no earlier epoch matters for it."""
    if hit.num_tokens:
        return not hit.prompt.keys.media
    return not state.former_epochs and not hit.prompt.has_extra_keys(state.identity_epoch)
