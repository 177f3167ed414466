"""Shared by tests of explanations: a question that changes nothing, and whose answer adds up."""

import numpy as np
import numpy.typing as npt

from pagedkv import BlockSpace, Explanation, FullAttention, GroupSpec, MissCause, RequestKeys, SlidingWindow
from pagedkv.contract.keys import NO_KEYS
from tests.space.spaces import new_space, tokens, unchanged

__all__ = ["HYBRID", "OURS", "PROMPT", "THEIRS", "causes", "changed", "explained", "new"]

PROMPT = tokens(20)
HYBRID = (FullAttention(4), SlidingWindow(8, 4))
OURS, THEIRS = RequestKeys(salt=b"ours"), RequestKeys(salt=b"theirs")


def explained(
    space: BlockSpace, prompt: npt.ArrayLike = PROMPT, keys: RequestKeys = NO_KEYS, **asked: int
) -> Explanation:
    """Explain why a prompt misses; assert that this changes nothing, and that the answer adds up."""
    with unchanged(space):
        answer = space.explain(prompt, keys=keys, **asked)  # type: ignore[arg-type]
    assert answer.num_hit_tokens == space.match(prompt, keys=keys, **asked).num_tokens  # type: ignore[arg-type]
    require_sum(answer)
    return answer


def require_sum(answer: Explanation) -> None:
    """Its misses are all the tokens that do not hit, and begin with the cause."""
    ends = [answer.num_hit_tokens, *(miss.end for miss in answer.misses)]
    assert ends[:-1] == [miss.start for miss in answer.misses]
    assert ends[-1] == answer.num_tokens
    assert all(miss.num_tokens > 0 for miss in answer.misses)
    assert answer.misses[0].cause is answer.cause


def causes(answer: Explanation) -> list[tuple[MissCause, int]]:
    """Count the tokens of each cause."""
    return [(miss.cause, miss.num_tokens) for miss in answer.misses]


def new(*groups: GroupSpec, num_blocks: int = 101) -> BlockSpace:
    """Build a space that records evicted content."""
    return new_space(*groups, explain=True, num_blocks=num_blocks)


def changed(prompt: npt.NDArray[np.int32], position: int) -> npt.NDArray[np.int32]:
    """Change one token of a prompt."""
    other = prompt.copy()
    other[position] += 1000
    return other
