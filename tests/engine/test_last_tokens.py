"""LastTokens: what rows sampled last, filled in where the host does not have it."""

import numpy as np
import torch

from pagedkv.engine.runner import LastTokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_tokens_are_filled_in_by_row_and_others_stay() -> None:
    """Also in a view of a larger buffer; a row without a token counts as 0, which every vocabulary has."""
    last = LastTokens(6, DEVICE)
    last.keep(np.array([4, 0, 5], np.int32), torch.tensor([70, 80, -1], dtype=torch.int32, device=DEVICE))
    last.keep(np.array([0], np.int32), torch.tensor([81], dtype=torch.int32))
    buffer = torch.full((8,), 9, dtype=torch.int64, device=DEVICE)
    last.fill_in(buffer[:5], np.array([-1, 0, 4, -1, 5]))
    assert buffer.tolist() == [9, 81, 70, 9, 0, 9, 9, 9]
