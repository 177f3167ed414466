"""Steps from a result of ``vllm bench serve --save-result --save-detailed``, as far as it determines them.

For each request, such a file has the send time, and the seconds to the first token and between further ones
(``start_times``, ``ttfts``, ``itls``). Two kinds of steps can be derived from these:

* If no request waited for its first token, and none ended, all running requests decoded. Such a step took the time
  between two tokens, for all these sequences; the context of each was its prompt and its tokens until then. Only the
  request that began first is read, so that no step counts twice.
* If a request ran alone, its first token took the step of its prompt, and the server's work before and after that step.
  Prompts longer than an engine computes at once take several steps, and are left out.

All other times mix steps of several kinds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagedkv.contract.arrays import Float64Array, Int64Array
from pagedkv.planner.traces.formats.parsing import check_range
from pagedkv.planner.traces.lines import Line
from pagedkv.simulation.calibration.steps import MeasuredSteps

__all__ = ["DETAILS", "is_bench_result", "steps_of_bench"]

DETAILS: Final = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
LONGEST_PROMPT: Final = 2048
"""Tokens that every engine computes in one step by default, at least."""
MOST_TOKENS: Final = 2**31
REMEDY: Final = "Write it with --save-result --save-detailed"


def is_bench_result(keys: Mapping[str, object]) -> bool:
    """Return whether the keys of an object are those of such a result, with or without details."""
    return "total_input_tokens" in keys and ("ttfts" in keys or "request_throughput" in keys)


@dataclass(frozen=True, slots=True)
class _Served:
    """The answered requests, in order of their first tokens.

    Args:
        start_s, first_s, last_s: float64 ``[n]``: times of sending, of the first and of the last token.
        token_s: times of each token, by request.
        num_prompt: int64 ``[n]``, tokens of the prompt.
    """

    start_s: Float64Array
    first_s: Float64Array
    last_s: Float64Array
    token_s: tuple[Float64Array, ...]
    num_prompt: Int64Array


def steps_of_bench(line: Line, result: Mapping[str, Any]) -> MeasuredSteps:
    """Extract the steps from a result. O(tokens log requests).

    Raises:
        TraceError: the result has no details, or they are inconsistent.
    """
    served, num_lumped = _served(line, result)
    decoding = _decoding_steps(served)
    prompts = _prompt_steps(served)
    columns = [np.concatenate(pair) for pair in zip(decoding, prompts, strict=True)]
    taken = (
        f"{len(decoding[0]):,} steps that only decode, and {len(prompts[0]):,} first tokens of requests that ran alone"
    )
    notes = [f"steps taken from {len(served.start_s):,} requests: {taken}"]
    if len(prompts[0]):
        notes.append("the step of a first token includes the time of the network and the server")
    if num_lumped:
        notes.append(f"{num_lumped:,} requests were left out, since their tokens did not arrive one by one")
    num_new, num_pairs, num_context, num_sequences = (column.astype(np.int64) for column in columns[1:])
    return MeasuredSteps(
        columns[0],
        num_new,
        num_pairs,
        num_context,
        num_sequences,
        source="result of vllm bench serve",
        notes=tuple(notes),
    )


def _served(line: Line, result: Mapping[str, Any]) -> tuple[_Served, int]:
    """Check the details; return the requests whose tokens arrived one by one, and the number of all others."""
    missing = [name for name in DETAILS if not isinstance(result.get(name), list)]
    if missing:
        raise line.fault(f"the result has no {missing[0]}", REMEDY)
    if len({len(result[name]) for name in DETAILS}) > 1:
        raise line.fault("the result has lists of different lengths", REMEDY)
    taken: list[tuple[float, float, Float64Array, int]] = []
    num_lumped = 0
    for start_s, ttft_s, itl_s, num_prompt, num_output in zip(*(result[name] for name in DETAILS), strict=True):
        if not num_output or not ttft_s:
            continue  # a failed request
        if not isinstance(itl_s, list) or len(itl_s) != num_output - 1:
            num_lumped += 1
            continue
        check_range(line, "a length", num_prompt, 1, MOST_TOKENS)
        token_s = start_s + ttft_s + np.concatenate([[0.0], np.cumsum(itl_s, dtype=np.float64)])
        taken.append((start_s, token_s[0], token_s, num_prompt))
    taken.sort(key=lambda one: one[1])
    return _Served(
        np.array([one[0] for one in taken], np.float64),
        np.array([one[1] for one in taken], np.float64),
        np.array([one[2][-1] for one in taken], np.float64),
        tuple(one[2] for one in taken),
        np.array([one[3] for one in taken], np.int64),
    ), num_lumped


def _decoding_steps(served: _Served) -> list[Float64Array]:
    """Return seconds, new tokens, pairs, context and sequences of steps that only decode."""
    if not len(served.start_s):
        return [np.zeros(0)] * 5
    starts, lasts = np.sort(served.start_s), np.sort(served.last_s)
    all_tokens = np.sort(np.concatenate(served.token_s))
    by_last = np.argsort(served.last_s, kind="stable")
    num_tokens = np.array([len(token_s) for token_s in served.token_s])
    began = np.concatenate([[0], np.cumsum(served.num_prompt)])
    ended = np.concatenate([[0], np.cumsum((served.num_prompt + num_tokens)[by_last])])
    begins, ends = _token_intervals(served)
    num_first = np.searchsorted(served.first_s, begins, "right")
    num_over = np.searchsorted(lasts, begins, "right")
    is_none_waiting = np.searchsorted(starts, ends, "left") == num_first
    is_none_ending = np.searchsorted(lasts, ends, "left") == num_over
    kept = is_none_waiting & is_none_ending & (ends > begins)
    num_sequences = (num_first - num_over)[kept]
    emitted = np.searchsorted(all_tokens, begins[kept], "right")
    context = began[num_first[kept]] + emitted - ended[num_over[kept]]
    return [(ends - begins)[kept], num_sequences, context, context, num_sequences]


def _token_intervals(served: _Served) -> tuple[Float64Array, Float64Array]:
    """Return the times between tokens; at each moment, those of the running request that began first."""
    begins, ends, read_until_s = [], [], -np.inf
    for token_s in served.token_s:
        is_unread = token_s[:-1] >= read_until_s
        begins.append(token_s[:-1][is_unread])
        ends.append(token_s[1:][is_unread])
        read_until_s = max(read_until_s, token_s[-1])
    return np.concatenate(begins), np.concatenate(ends)


def _prompt_steps(served: _Served) -> list[Float64Array]:
    """Return the same for requests that ran alone until their first token."""
    starts, lasts = np.sort(served.start_s), np.sort(served.last_s)
    num_sent = np.searchsorted(starts, served.first_s, "left")
    num_over = np.searchsorted(lasts, served.start_s, "right")
    alone = (num_sent - num_over == 1) & (served.num_prompt <= LONGEST_PROMPT)
    lengths = served.num_prompt[alone]
    seconds = (served.first_s - served.start_s)[alone]
    return [seconds, lengths, lengths * (lengths + 1) // 2, lengths, np.ones(len(lengths))]
