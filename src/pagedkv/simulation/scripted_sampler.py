"""Answers of the trace in place of a sampler's.

Outputs of the requests under way, concatenated in one array, to gather tokens of many requests at once.

A sampler of known tokens: the outputs of the trace, and the parent of each beam.

It replaces a model. Tokens of requests that decode together are laid out for many steps ahead, so that a step takes one
row of an array.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.scheduling import Batch, Decoding, Request

LEAST_ROOM: Final = 4096


class OutputStore:
    """Outputs by numbers of requests. It takes at most twice the memory of its outputs at their largest.

    >>> store = OutputStore()
    >>> store.put(7, np.array([1, 2, 3], np.int32))
    >>> store.put(8, np.array([4, 5, 6], np.int32))
    >>> store.of(8, 1, 2).tolist(), store.together([8, 7], np.array([0, 1]), 2).tolist()
    ([5, 6], [[4, 2], [5, 3]])
    """

    def __init__(self) -> None:
        self._tokens = np.empty(LEAST_ROOM, np.int32)
        self._num_used = 0
        self._spans: dict[int, tuple[int, int]] = {}

    def put(self, number: int, token_ids: Int32Array) -> None:
        """Store an output, in place of an earlier one of this number. O(tokens), and now and then O(all tokens)."""
        self.drop(number)
        if self._num_used + len(token_ids) > len(self._tokens):
            self._move(len(token_ids))
        start, stop = self._num_used, self._num_used + len(token_ids)
        self._tokens[start:stop] = token_ids
        self._spans[number] = start, stop
        self._num_used = stop

    def drop(self, number: int) -> None:
        """Drop an output, if there is one."""
        self._spans.pop(number, None)

    def of(self, number: int, first: int, count: int) -> Int32Array:
        """Return some tokens of an output, fewer where it ends: int32 ``[count]``. Raises KeyError."""
        start, stop = self._spans[number]
        return self._tokens[start + first : min(start + first + count, stop)].copy()

    def together(self, numbers: Sequence[int], firsts: Int64Array, count: int) -> Int32Array:
        """Return equally many tokens of several outputs: int32 ``[count, outputs]``. Raises KeyError.

        Args:
            numbers: numbers of the outputs.
            firsts: int64 ``[outputs]``, place of the first token in each.
            count: tokens of each; no output may end earlier.
        """
        spans = self._spans
        places = np.array([spans[number][0] for number in numbers], np.int64) + firsts
        tokens: Int32Array = self._tokens[places + np.arange(count)[:, np.newaxis]]
        return tokens

    def _move(self, num_more: int) -> None:
        """Move the outputs into a new array of twice their size."""
        num_held = sum(stop - start for start, stop in self._spans.values())
        moved = np.empty(max(LEAST_ROOM, 2 * (num_held + num_more)), np.int32)
        self._num_used = 0
        for number, (start, stop) in self._spans.items():
            end = self._num_used + stop - start
            moved[self._num_used : end] = self._tokens[start:stop]
            self._spans[number] = self._num_used, end
            self._num_used = end
        self._tokens = moved


FIRST_STEPS_AHEAD: Final = 4
MOST_STEPS_AHEAD: Final = 64
"""Most steps whose tokens are laid out ahead. The number is small after each change of the running requests, since
changes are frequent, and grows fourfold each time without a change."""
TOKEN_MASK: Final = 2**31 - 1
SEQUENCE_STRIDE: Final = 0x61C88647
"""Odd, so that its first ``TOKEN_MASK`` multiples differ."""


class ScriptedSampler:
    """Samples the tokens of every batch.

    Args:
        seed: seed of the whole replay.
        has_beams: whether the sequences of a request are beams.
    """

    def __init__(self, seed: int, *, has_beams: bool) -> None:
        self._parents = BeamParents(seed) if has_beams else None
        self._outputs = OutputStore()
        self._decoding: Decoding | None = None
        self._tokens = np.zeros((0, 0), np.int32)
        self._num_taken = 0

    def loader(self, number: int, load: Callable[[], TokenizedRequest]) -> Callable[[int], Int32Array]:
        """Make the function that returns a request's known tokens, from the one that makes all of its tokens."""
        return partial(self._load, number, load)

    def _load(self, number: int, load: Callable[[], TokenizedRequest], num_generated: int) -> Int32Array:
        request = load()
        self._outputs.put(number, request.output_token_ids)
        return np.concatenate((request.prompt_token_ids, request.output_token_ids[:num_generated]))

    def forget(self, request: Request) -> None:
        """Drop the state of a request that is preempted or has ended."""
        self._outputs.drop(request.number)
        if self._parents is not None:
            self._parents.forget(request)

    def answers(self, request: Request) -> list[Int32Array]:
        """Return all tokens that each sequence of a request generates; before :meth:`forget`. Empty without any."""
        if not request.max_new_tokens:
            return []
        return np.split(self._next_tokens(request, 0, request.max_new_tokens), request.num_sequences)

    def sample(self, batch: Batch) -> Int32Array:
        """Return the tokens that follow a batch: int32 ``[batch.num_samples]``."""
        decoded = self._next_decoded(batch.decoding) if batch.decoding is not None else batch.decoded_token_ids
        first = [
            self._next_tokens(chunk.request, chunk.request.num_generated, 1)
            for chunk in batch.prefilling
            if chunk.num_samples
        ]
        return np.concatenate((decoded, *first)) if first else decoded

    def _next_tokens(self, request: Request, num_generated: int, num_tokens: int) -> Int32Array:
        """Return the next tokens of a request: int32 ``[num_sequences * num_tokens]``, sequence by sequence."""
        token_ids = self._outputs.of(request.number, num_generated, num_tokens)
        if request.num_sequences == 1:
            return token_ids
        return sequence_tokens(token_ids, request.num_sequences, request.number)

    def _next_decoded(self, decoding: Decoding) -> Int32Array:
        if self._decoding is not decoding:
            self._decoding, self._num_taken = decoding, 0
            self._tokens = self._ahead(decoding, FIRST_STEPS_AHEAD)
        elif self._num_taken == len(self._tokens):
            self._num_taken = 0
            self._tokens = self._ahead(decoding, min(4 * len(self._tokens), MOST_STEPS_AHEAD))
        self._num_taken += 1
        tokens: Int32Array = self._tokens[self._num_taken - 1]
        return tokens

    def _ahead(self, decoding: Decoding, num_wanted: int) -> Int32Array:
        """Lay out the next tokens of requests that decode together: int32 ``[steps, sequences]``."""
        num_ahead = min(num_wanted, decoding.num_steps_left)
        if len(decoding.rows) == len(decoding.requests):
            numbers = [request.number for request in decoding.requests]
            return self._outputs.together(numbers, np.array(decoding.num_before) + decoding.num_steps, num_ahead)
        by_sequence = np.concatenate(
            [
                self._next_tokens(request, num_before + decoding.num_steps, num_ahead)
                for request, num_before in zip(decoding.requests, decoding.num_before, strict=True)
            ]
        )
        return np.ascontiguousarray(by_sequence.reshape(len(decoding.rows), num_ahead).T)

    def parents(self, batch: Batch) -> Mapping[Request, list[int]]:
        """Return the parent of each beam, for every request of a batch that has decoded beams."""
        if self._parents is None or batch.decoding is None:
            return {}
        return {request: self._parents.draw(request) for request in batch.decoding.requests}


class BeamParents:
    """Draws the parent of each new beam: independently, each beam with equal probability.

    In population genetics this is the Wright-Fisher process (Fisher 1930; Wright 1931): going back in time, any two
    of k beams have a common ancestor a mean of k tokens ago. Each request has its own generator.

    Args:
        seed: seed of the whole replay.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[int, np.random.Generator] = {}

    def draw(self, request: Request) -> list[int]:
        """Draw the parent of each new beam, as positions among the old ones."""
        generator = self._generators.get(request.number)
        if generator is None:
            generator = self._generators[request.number] = np.random.default_rng((self._seed, request.number))
        parents: list[int] = generator.integers(request.num_sequences, size=request.num_sequences).tolist()
        return parents

    def forget(self, request: Request) -> None:
        """Drop the generator of a request that has ended, or restarts."""
        self._generators.pop(request.number, None)


def sequence_tokens(token_ids: Int32Array, num_sequences: int, number: int) -> Int32Array:
    """Make the tokens of samples or beams from those of the first: different at each position, and in each request.

    Requests and sequences are numbered together by Cantor's pairing, so that no two of the first 65,000 requests get
    equal tokens, even if the trace has equal outputs for them.

    Args:
        token_ids: int32 ``[n]``, none negative.
        num_sequences: number of sequences.
        number: number of the request.

    Returns:
        int32 ``[num_sequences * n]``, sequence by sequence, none negative.
    """
    sequences = np.arange(num_sequences, dtype=np.int64)
    diagonals = number + sequences
    pairs = diagonals * (diagonals + 1) // 2 + sequences
    offsets = np.where(sequences > 0, (pairs & TOKEN_MASK) * SEQUENCE_STRIDE, 0)
    return ((token_ids + offsets[:, np.newaxis]) & TOKEN_MASK).astype(np.int32).ravel()
