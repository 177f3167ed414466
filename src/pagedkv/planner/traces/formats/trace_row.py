"""The header and the row of the pagedkv trace format, and the conversion between requests and rows.

Reading, writing and sorting share this description of keys and defaults. Values are checked where a trace is read
(:mod:`pagedkv.planner.traces.formats.pagedkv_trace`).
"""

from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from pagedkv.planner.traces.block_runs import MAX_BLOCK_ID, expand_runs, run_lengths
from pagedkv.planner.traces.formats.parsing import MAX_TOKEN_ID, SessionName
from pagedkv.planner.traces.request import Request

__all__ = ["FORMAT_NAME", "FORMAT_VERSION", "MAX_TOKEN_ID", "TraceHeader", "TraceRow", "request_of", "row_of"]

FORMAT_NAME: Final = "pagedkv-trace"
FORMAT_VERSION: Final = 1

_BlockId = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class TraceHeader(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The first line."""

    format: str
    version: int
    block_size: int | None = None


class TraceRow(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Every other line. Keys are written in this order; a key with its default value is left out."""

    arrival_s: float
    session: SessionName | None = None
    tenant: SessionName | None = None
    input_length: int | None = None
    output_length: int | None = None
    num_samples: int = 1
    priority: int = 0
    block_runs: list[tuple[int, int]] | None = None
    block_ids: list[_BlockId] | None = None
    token_ids: list[_TokenId] | None = None
    output_token_ids: list[_TokenId] | None = None


def row_of(request: Request) -> TraceRow:
    """Return a request as a row in canonical form: ids in the longest runs, both lengths always present.

    A request with tokens and block ids keeps only its tokens, which determine the ids.
    """
    block_ids = request.block_ids if request.prompt_token_ids is None else None
    return TraceRow(
        arrival_s=float(request.arrival_s),
        session=request.session,
        tenant=request.tenant,
        input_length=request.input_length,
        output_length=request.output_length,
        num_samples=request.num_samples,
        priority=request.priority,
        block_runs=None if block_ids is None else run_lengths(block_ids),
        token_ids=_listed(request.prompt_token_ids),
        output_token_ids=_listed(request.output_token_ids),
    )


def request_of(row: TraceRow, input_length: int, output_length: int, block_size: int) -> Request:
    """Return the request of a checked row."""
    return Request(
        arrival_s=row.arrival_s,
        input_length=input_length,
        output_length=output_length,
        block_ids=_block_ids(row),
        block_size=block_size,
        session=row.session,
        num_samples=row.num_samples,
        priority=row.priority,
        prompt_token_ids=_as_array(row.token_ids),
        output_token_ids=_as_array(row.output_token_ids),
        tenant=row.tenant,
    )


def _block_ids(row: TraceRow) -> npt.NDArray[np.int64] | None:
    if row.block_runs is not None:
        return expand_runs(row.block_runs)
    return None if row.block_ids is None else np.array(row.block_ids, np.int64)


def _listed(token_ids: npt.NDArray[np.int32] | None) -> list[int] | None:
    return None if token_ids is None else token_ids.tolist()


def _as_array(token_ids: list[int] | None) -> npt.NDArray[np.int32] | None:
    return None if token_ids is None else np.array(token_ids, np.int32)
