"""CompressedLayer: a layer whose model compresses tokens into entries (DeepSeek-V4, 2026), over blocks.

The model's own compressor makes an entry of every ``ratio`` tokens, and of the ``ratio`` before them where entries
overlap. It asks its cache for the vectors of tokens that are not compressed yet, and for all entries. Here both are in
blocks: vectors of tokens in a chunk, or a window, of as many tokens as entries are made of; entries as long as the
sequence, one for several tokens. So what is rolled back, copied, swapped or hit is rolled back, copied, swapped or hit
with the tokens::

    tokens    0 1 2 3 | 4 5 6 7 | 8 9            a pass computes 6 .. 9, ratio 4
    vectors           | 4 5 6 7 | 8 9            written: 6 .. 9; read: 4 .. 7, and 0 .. 3 before them if they overlap
    entries      0         1                     written: 1; read: 0 and 1

Where entries overlap, the entry before the first new one is computed once more and dropped, for the vectors of its
tokens: the arithmetic is the model's own, with or without a cache. A pass has one sequence, as the model counts entries
for all of its rows together.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, final

import torch

from pagedkv.probe.layers import CompanionPlace, CompressedPlace


class BlocksOfSequence(Protocol):
    """Access to what the blocks of one sequence hold, for the time of a pass that computes some of its positions."""

    @property
    def computed(self) -> tuple[int, int]:
        """The positions that the pass computes: the first, and the one behind the last."""

    def read(self, place: CompanionPlace, first: int, stop: int) -> torch.Tensor:
        """Copy vectors, or entries, out of blocks: ``[stop - first, dim]``."""

    def write(self, place: CompanionPlace, first: int, vectors: torch.Tensor) -> None:
        """Write vectors, or entries, ``[n, dim]``, into blocks, from ``first`` on."""


@final
class CompressedLayer:
    """What the model takes for its layer of the cache.

    Args:
        places: where what each compressor keeps is, by its name.
        current: returns the blocks of the pass under way.
    """

    is_sliding = True

    def __init__(self, places: Mapping[str, CompressedPlace], current: Callable[[], BlocksOfSequence]) -> None:
        self._places = places
        self._current = current

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keep vectors of this pass's tokens, ``[1, tokens, dim]`` each.

        Returns:
            those of whole entries that are to be made, and the position of the first.
        """
        blocks, place = self._current(), self._places[name]
        start, stop = blocks.computed
        blocks.write(place.raw, start, torch.cat([kv[0], gate[0]], dim=1))
        first, end = start // place.ratio, stop // place.ratio
        if first == end:
            return kv[:, :0], gate[:, :0], start
        first -= self._num_again(place, first)
        kept = blocks.read(place.raw, first * place.ratio, end * place.ratio)[None]
        vectors, gates = kept.split([kv.shape[2], gate.shape[2]], dim=2)
        return vectors.contiguous(), gates.contiguous(), first * place.ratio

    def update_overlap_state(self, *_: object) -> tuple[None, None]:
        """Tell nothing of the tokens before: they are among those that :meth:`store_compression_weights` returned."""
        return None, None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Keep the entries that were made, ``[1, entries, dim]``; return all of the sequence."""
        blocks, place = self._current(), self._places[name]
        start, stop = blocks.computed
        first, end = start // place.ratio, stop // place.ratio
        if first < end:
            blocks.write(place.entries, first, compressed[0, self._num_again(place, first) :])
        return blocks.read(place.entries, 0, end)[None] if end else compressed

    @staticmethod
    def _num_again(place: CompressedPlace, first: int) -> int:
        """Return how many entries are computed once more, before the first new one."""
        return int(place.overlaps and first > 0)
