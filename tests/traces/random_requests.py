"""Random requests, as a trace could hold them, and requests as plain values that compare."""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from pagedkv.planner.traces import Request
from pagedkv.planner.traces.request import MAX_BLOCK_ID

__all__ = ["as_values", "traces"]

BLOCK_IDS = st.integers(0, 6) | st.integers(0, MAX_BLOCK_ID)
TOKEN_IDS = st.integers(0, 9) | st.integers(0, 2**31 - 1)


def as_values(requests: Iterable[Request]) -> list[dict[str, object]]:
    """Write requests as values. Where there is no id, what an id stands for has no meaning, and is left out."""
    return [_values(request) for request in requests]


def _values(request: Request) -> dict[str, object]:
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    if request.block_ids is None or len(request.block_ids) == 0:
        del values["block_size"]
    return {
        name: (value.tolist(), value.dtype.str) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


TIMES = st.sampled_from([0.0, 0.1, 2.5]) | st.floats(0, 1e11)


@st.composite
def traces(draw: st.DrawFn, *, in_order: bool = True) -> list[Request]:
    """Draw requests of one block size, with tokens, ids or neither."""
    block_size = draw(st.integers(1, 20))
    times = draw(st.lists(TIMES, min_size=1, max_size=10))
    return [_request(draw, time, block_size) for time in (sorted(times) if in_order else times)]


def _request(draw: st.DrawFn, arrival_s: float, block_size: int) -> Request:
    input_length, output_length = draw(st.integers(1, 40)), draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["lengths", "ids", "run", "tokens"]))
    num_ids = draw(st.sampled_from([input_length // block_size, -(-input_length // block_size)]))
    return Request(
        arrival_s=arrival_s,
        input_length=input_length,
        output_length=output_length,
        block_ids=_block_ids(draw, kind, num_ids),
        block_size=block_size,
        session=draw(st.none() | st.text(max_size=3)),
        num_samples=draw(st.sampled_from([1, 1, 2, 65_536])),
        priority=draw(st.sampled_from([0, 0, -(2**31), 2**31 - 1])),
        prompt_token_ids=_token_ids(draw, input_length) if kind == "tokens" else None,
        output_token_ids=_token_ids(draw, output_length) if draw(st.booleans()) else None,
    )


def _block_ids(draw: st.DrawFn, kind: str, num_ids: int) -> npt.NDArray[np.int64] | None:
    if kind == "ids":
        return np.array(draw(st.lists(BLOCK_IDS, min_size=num_ids, max_size=num_ids)), np.int64)
    if kind == "run":
        return draw(st.integers(0, MAX_BLOCK_ID - num_ids)) + np.arange(num_ids, dtype=np.int64)
    return None


def _token_ids(draw: st.DrawFn, num_tokens: int) -> npt.NDArray[np.int32]:
    return np.array(draw(st.lists(TOKEN_IDS, min_size=num_tokens, max_size=num_tokens)), np.int32)
