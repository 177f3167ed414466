"""Prompts that end in drafts: in one step the certain tokens are admitted, and the drafts appended.

Slots for the drafts are reserved with the certain tokens, so that appending finds them: all or nothing::

    [ hit | certain tokens, computed and published | drafts, computed | lookahead slots ]
      at most to the last certain token, whose logits verify the first draft
"""

from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import Row
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space import growing
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import StepLedger

__all__ = ["NO_DRAFTS", "append_drafts", "split_drafts"]

NO_DRAFTS: Final = np.zeros(0, np.int32)


def split_drafts(
    state: SpaceState, tokens: Int32Array, num_draft: int, num_sequences: int
) -> tuple[Int32Array, Int32Array]:
    """Split a prompt into certain tokens and drafts.

    Raises:
        TokenError: no token would be certain, or a group is a recurrent state.
        ConfigurationError: several sequences share the prompt.
    """
    if state.is_recurrent:
        raise TokenError(
            "drafts cannot be allocated where a group is a recurrent state: allocate the certain tokens, then append "
            "the drafts, for which it needs num_draft_states"
        )
    if num_draft >= len(tokens):
        raise TokenError(f"num_draft = {num_draft} leaves none of {len(tokens)} tokens certain: one at least must be")
    if num_sequences > 1:
        raise ConfigurationError(
            f"num_draft = {num_draft} with num_sequences = {num_sequences}: fork first, then append drafts to each"
        )
    return tokens[:-num_draft], tokens[-num_draft:]


def append_drafts(state: SpaceState, ledger: StepLedger, row: Row, drafts: Int32Array, num_lookahead: int) -> None:
    """Append drafts to a row that has slots reserved for them and for the lookahead."""
    batch = np.array([row], np.int32)
    growth = growing.as_growth(state, batch, [len(drafts)], num_lookahead, len(drafts))
    copies = growing.append(state, ledger, growth, drafts)
    assert copies == [], f"row {row} lacked slots that were reserved for {len(drafts)} drafts"
