"""Tokens for every request of a trace: its own, or else a fixed function of block ids, the same on every machine.

Tokens of prompts or outputs in the trace are used. All others are generated.

An id of a trace stands for a block of tokens *together with everything before it*: equal ids mean an equal
whole prefix. So the tokens of a block may be a function of its id and the offset alone. Equal prefixes stay equal, and
different prefixes differ from the first token of the first block whose ids differ, whatever block size the replay
uses. (Text that two different blocks had in common cannot be restored from a trace, and is lost.)

Tokens that no id covers are not shared, since the trace shows no sharing of them: the end of a prompt past its ids,
prompts without ids, and all output.

The function is splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014): the token at offset o is the o-th number, reduced to 31 bits, of the generator that starts from a
mixed key. Keys are disjoint by construction::

    bit 63    bits 62..1            bit 0
    0         block id ------------------        tokens that ids cover
    1         number of the request  part        part 0: rest of the prompt, part 1: output
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.planner.traces.request import Request, TokenizedRequest

__all__ = ["block_token_ids", "tokenize", "tokenized", "unique_token_ids"]

GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER: Final = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER: Final = np.uint64(0x94D049BB133111EB)
UNIQUE_KEYS: Final = 1 << 63
PROMPT_PART: Final = 0
OUTPUT_PART: Final = 1


def block_token_ids(block_ids: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int32]:
    """Make the tokens of blocks.

    Args:
        block_ids: int64 ``[n]``, none negative.
        block_size: tokens of each block.

    Returns:
        int32 ``[n * block_size]``, none negative. O(n * block_size), 2 to 10 ns a token.
    """
    return _numbers(block_ids.astype(np.uint64), block_size)


def unique_token_ids(request_number: int, part: int, num_tokens: int) -> npt.NDArray[np.int32]:
    """Make tokens that differ from those of all block ids and of all other requests and parts.

    Args:
        request_number: position of the request in its trace, from 0.
        part: ``PROMPT_PART`` or ``OUTPUT_PART``.
        num_tokens: number of tokens.

    Returns:
        int32 ``[num_tokens]``, none negative.
    """
    key = UNIQUE_KEYS | request_number << 1 | part
    return _numbers(np.array([key], dtype=np.uint64), num_tokens)


def tokenized(requests: Iterable[Request]) -> Iterator[TokenizedRequest]:
    """Yield each request of a trace with its tokens; requests are numbered from 0."""
    for number, request in enumerate(requests):
        yield tokenize(request, number)


def tokenize(request: Request, number: int) -> TokenizedRequest:
    """Return a request with its tokens; ``number`` is its position in the trace, from 0."""
    return TokenizedRequest(
        arrival_s=request.arrival_s,
        prompt_token_ids=_prompt_token_ids(request, number),
        output_token_ids=_output_token_ids(request, number),
        session=request.session,
        num_samples=request.num_samples,
        priority=request.priority,
        has_content=request.has_content,
        tenant=request.tenant,
        salt=request.salt,
    )


def _prompt_token_ids(request: Request, number: int) -> npt.NDArray[np.int32]:
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if request.block_ids is None:
        return unique_token_ids(number, PROMPT_PART, request.input_length)
    covered = block_token_ids(request.block_ids, request.block_size)[: request.input_length]
    rest = unique_token_ids(number, PROMPT_PART, request.input_length - len(covered))
    return np.concatenate((covered, rest))


def _output_token_ids(request: Request, number: int) -> npt.NDArray[np.int32]:
    if request.output_token_ids is not None:
        return request.output_token_ids
    return unique_token_ids(number, OUTPUT_PART, request.output_length)


def _numbers(keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.int32]:
    """Draw ``count`` 31-bit numbers from the generator of each key, generator by generator."""
    seeds = keys.copy()
    _mix(seeds)
    steps = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN_GAMMA
    states = seeds[:, np.newaxis] + steps
    _mix(states)
    return (states >> np.uint64(33)).astype(np.int32).ravel()


def _mix(numbers: npt.NDArray[np.uint64]) -> None:
    """Apply splitmix64's finaliser, a bijection of 64-bit numbers, to each number in place."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= FIRST_MULTIPLIER
    numbers ^= numbers >> np.uint64(27)
    numbers *= SECOND_MULTIPLIER
    numbers ^= numbers >> np.uint64(31)
