"""LastTokens: the last sampled token of each row, in device memory, so that the next step does not wait for the host.

A step that is launched before the host has the sampled tokens takes them from here, by row::

    token ids of the step   | 17 | -1 | -1 | 40 41 42 |       as the host has them: two are not known
    sources, a row or -1    | -1 |  3 |  5 | -1 -1 -1 |
    token ids, filled in    | 17 | a  | b  | 40 41 42 |       a, b: what rows 3 and 5 sampled last
"""

from typing import final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.engine.sampling.sending import sent

__all__ = ["LastTokens"]


@final
class LastTokens:
    """The tokens of all rows of a space.

    Args:
        max_rows: rows of the space.
        device: where steps are computed.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._device = device

    def keep(self, rows: npt.NDArray[np.integer], token_ids: torch.Tensor) -> None:
        """Store a token for each of these rows; one that has none (below 0) counts as 0. The host does not wait.

        Args:
            rows: integers ``[n]``; where a row is named twice, either of its tokens stays.
            token_ids: integers ``[n]``, on the device or on the host.
        """
        where = sent(torch.from_numpy(rows.astype(np.int64)), self._device)
        self._token_ids[where] = sent(token_ids, self._device).long().clamp(min=0)

    def fill_in(self, token_ids: torch.Tensor, sources: npt.NDArray[np.integer]) -> None:
        """Replace token ids by the last ones of rows.

        Args:
            token_ids: int64 ``[n]`` on the device, changed in place.
            sources: integers ``[n]``: the row whose last token replaces it, -1 where the token stays.
        """
        rows = sent(torch.from_numpy(sources.astype(np.int64)), self._device)
        token_ids.copy_(torch.where(rows >= 0, self._token_ids[rows.clamp(min=0)], token_ids))
