"""Tokens of samples and beams: those of the trace for the first, others for each of the rest."""

import numpy as np

from pagedkv.simulation.virtual_clock import sequence_tokens


def test_samples_differ_at_each_position_and_in_each_request() -> None:
    """Also of requests with equal outputs: one request's second sample is not another one's fourth."""
    output = np.array([7, 7, 2**31 - 1], np.int32)
    made = [sequence_tokens(output, 8, number).reshape(8, 3) for number in range(200)]
    assert all((tokens[0] == output).all() for tokens in made)
    assert min(tokens.min() for tokens in made) >= 0
    for place in range(len(output)):
        others = [int(tokens[sequence, place]) for tokens in made for sequence in range(1, 8)]
        assert len(set(others) | {int(output[place])}) == len(others) + 1


def test_requests_without_end_have_tokens_for_their_samples() -> None:
    tokens = sequence_tokens(np.array([5], np.int32), 3, 2**31)
    assert (tokens >= 0).all()
    assert len(set(tokens.tolist())) == 3
