"""Runs and ends of a sequence that grows, and changes."""

import hashlib

import numpy as np
from hypothesis import given, strategies as st

from pagedkv.contract.keys import MediaSpan, RequestKeys
from pagedkv.tiers import Run, RunChain, runs_of

KEYS = RequestKeys("tuned", "2", b"secret", (MediaSpan(5, 2, b"picture"),))


def content(runs: list[Run]) -> list[tuple[object, ...]]:
    return [(run.key, run.parent, run.first_token, run.token_ids.tolist(), run.salt, run.extra_keys) for run in runs]


@given(st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=5))
def test_a_chain_has_the_runs_of_its_tokens_whatever_it_had_before(sequences: list[list[int]]) -> None:
    chain, longest = RunChain(2, 3, KEYS), np.zeros(0, np.int32)
    for tokens in sequences:
        token_ids = np.array(tokens, np.int32)
        chain.extend(token_ids)
        if token_ids.tolist() != longest[: len(token_ids)].tolist():
            longest = token_ids
        assert content(chain.runs) == content(runs_of(longest, 2, 3, KEYS))
        assert chain.num_blocks == len(longest) // 2


def test_an_end_has_the_tokens_behind_the_last_whole_run_and_a_key_of_its_own() -> None:
    chain = RunChain(2, 3)
    chain.extend(np.arange(20, dtype=np.int32))
    keys = {run.key for run in chain.runs}
    for num_blocks in range(11):
        end = chain.end(num_blocks)
        first = num_blocks // 3 * 6
        assert (end.first_token, end.token_ids.tolist()) == (first, list(range(first, 2 * num_blocks)))
        assert end.key == chain.end_key(num_blocks)
        keys.add(end.key)
    assert len(keys) == 3 + 11


def test_content_that_another_engine_names_is_known_by_its_name_alone() -> None:
    run = Run.named(b"chunk 1")
    assert (run.key, run.extra_keys, len(run.token_ids)) == (hashlib.sha256(b"chunk 1").digest(), b"chunk 1", 0)
    assert run.key != Run.named(b"chunk 2").key
