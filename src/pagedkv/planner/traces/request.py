"""The two values that flow through a replay: a request of a trace, and a request with tokens.

::

    trace file --TraceReader--> Request --tokenized()--> TokenizedRequest --Replayer--> ReplaySummary
                                seeded workload -------------^

A trace seldom has tokens. It has lengths and, at best, ids of prompt blocks. Figures about the trace alone need no more
than :class:`Request`. The block space matches and stores tokens, so its callers take :class:`TokenizedRequest`, from a
trace through :func:`pagedkv.planner.traces.tokens.tokenized` or from a generator of tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Request", "TokenizedRequest"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a trace.

    Args:
        arrival_s: seconds from the start of the trace; in a trace of sessions, from the session's start.
        input_length: tokens of the prompt, at least 1.
        output_length: generated tokens, possibly 0.
        block_ids: int64 ``[n]``, ids of the prompt's leading blocks; None: the trace has no ids. Equal ids mean an
            equal *whole prefix* up to the end of that block.
        block_size: tokens per id, whether this request has ids or not; 0: unknown.
        session: name of the request's conversation, if the trace has it.
        num_samples: sequences generated from the one prompt, at least 1.
        priority: requests of a higher priority are admitted first.
        prompt_token_ids: int32 ``[input_length]`` if the trace has tokens, instead of block ids.
        output_token_ids: int32 ``[output_length]`` if the trace has these too.
        tenant: a customer, a team, or one of several logs, if known.
        salt: blocks with equal tokens and different salts are different; None: no salt.
    """

    arrival_s: float
    input_length: int
    output_length: int
    block_ids: npt.NDArray[np.int64] | None = None
    block_size: int = 0
    session: str | None = None
    num_samples: int = 1
    priority: int = 0
    prompt_token_ids: npt.NDArray[np.int32] | None = None
    output_token_ids: npt.NDArray[np.int32] | None = None
    tenant: str | None = None
    salt: str | None = None

    @property
    def has_content(self) -> bool:
        """Whether the trace shows what the prompt shares with others, by its tokens or by ids of its blocks."""
        return self.block_ids is not None or self.prompt_token_ids is not None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedRequest:
    """One request with the tokens of its prompt and of its output.

    Args:
        arrival_s: as in :class:`Request`.
        prompt_token_ids: int32 ``[input_length]``, at least one token.
        output_token_ids: int32 ``[output_length]``, possibly none.
        session: as in :class:`Request`, like the arguments after it.
        has_content: False if the tokens are generated, since the trace has only lengths.
    """

    arrival_s: float
    prompt_token_ids: npt.NDArray[np.int32]
    output_token_ids: npt.NDArray[np.int32]
    session: str | None = None
    num_samples: int = 1
    priority: int = 0
    has_content: bool = True
    tenant: str | None = None
    salt: str | None = None

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_length(self) -> int:
        """Generated tokens."""
        return len(self.output_token_ids)
