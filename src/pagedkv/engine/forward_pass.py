"""What a model meets in a pass over blocks: its calls of attention and of ``Cache.update``, and its cache object.

A pass has some tokens of a step: all of them in one flat row ``[1, tokens]``; or, since recurrent layers need rows of
equal length, one sequence, or all decoding sequences, ``[sequences, 1]``. The tokens are always in the order of the
step's metadata.

Keys are written when the cache is updated and read when attention is called; both find their layer by number. Latents
are written as well. A layer with a known unfolding attends to the latents in their blocks, and ignores the keys and
values that the model unfolds from the pass's own tokens. For any other layer ``update`` returns the latents of every
position that the pass sees, sequence after sequence; the model unfolds keys and values from these, and calls attention
with them::

    update(latents of this pass)  ->  | sequence 0: positions 0 .. end | sequence 1: 0 .. end | ...

Where an indexer selects what is attended to, sequences are in rows, and what the model reads is padded to the longest
(:mod:`pagedkv.attention.selected`): the keys of the indexer, and the latents of the layers that it selects for.

The cache object passes updates on to the pass under way, and keeps only its recurrent states. Layers without state are
those of the dense cache, since models look at their types.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch

from pagedkv.attention import AttentionBackend, KeysInRows, Span, StepMetadata, Unfolding, gather, spans
from pagedkv.device import Transfers
from pagedkv.engine.compressed_layer import CompressedLayer
from pagedkv.errors import EngineError
from pagedkv.probe import compat
from pagedkv.probe.compat import listening
from pagedkv.probe.layers import CompanionPlace, EngineGroups


@final
class ForwardPass:
    """The attention and cache of one pass.

    Args:
        groups: the groups of the layers, and the place of each layer in them.
        backend: attention over blocks; transfers: writes latents.
        step: the metadata of this pass's tokens.
        positions: int64 ``[rows, tokens of a row]``.
        unfoldings: of layers that attend to latents without unfolding them, by number of the call; None: none.
        add_up: sums a tensor over all ranks, in place, for compiled layers; None: there is one rank.

    Attributes:
        rows: what the rows see of their sequences, where an indexer selects what is attended to; None: none does.
    """

    def __init__(
        self,
        groups: EngineGroups,
        backend: AttentionBackend,
        transfers: Transfers,
        step: StepMetadata,
        positions: torch.Tensor,
        unfoldings: Mapping[int, Unfolding] | None = None,
        add_up: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self._add_up = add_up
        self._groups = groups
        self._unfoldings = {} if unfoldings is None else unfoldings
        self._backend = backend
        self._transfers = transfers
        self._step = step
        self._positions = positions
        self._num_calls = 0
        self._begun = -1
        self.rows: KeysInRows | None = None
        if groups.sparse:
            layer = groups.attention[min(groups.sparse)]
            self.rows = KeysInRows(layer, positions, step.num_keys)

    @property
    def offsets(self) -> torch.Tensor:
        """Difference of each token's position and its place in its row: int64 ``[rows, tokens]``."""
        places = torch.arange(self._positions.shape[1], device=self._positions.device)
        return self._positions - places

    def update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values, ``[rows, heads, tokens, dim]`` each; return those to be attended to."""
        if layer_idx in self._groups.latents:
            return self._update_latents(layer_idx, key, value)
        if key is value:
            return self._update_one(layer_idx, key)
        self._backend.write(self._groups.writers[layer_idx], _flat(key), _flat(value), self._step)
        return key, value

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Compute the next call: ``[rows, heads, tokens, dim]`` -> ``[rows, tokens, heads, value_dim]``."""
        del module
        number = self._num_calls
        if number >= len(self._groups.attention):
            raise EngineError(f"the model calls attention {number + 1} times in a pass, {number} when it was probed")
        self._num_calls += 1
        if number in self._groups.sparse:
            return self._attend_selected(number, query, key, value, mask, options)
        unfolding = self._unfoldings.get(number)
        if unfolding is not None:
            out = unfolding.attend(self._backend, number, _flat(query), self._step)
        elif self._groups.attention[number].is_latent:
            out = self._backend.attend_unfolded(number, _flat(query), _flat(key), _flat(value), self._step)
        else:
            out = self._backend.attend(number, _flat(query), self._step, sinks=options.get("s_aux"))
        return out.view(query.shape[0], query.shape[2], query.shape[1], -1)

    @property
    def mask(self) -> torch.Tensor | None:
        """The causal mask that the model is given, bool, or zero and minus infinity; None: it needs none."""
        if self.rows is None or not self._groups.compressed:
            return None if self.rows is None else self.rows.mask
        zeros = torch.zeros(self.rows.mask.shape, dtype=torch.float32, device=self.rows.mask.device)
        return zeros.masked_fill(~self.rows.mask, -torch.inf)

    def add_up(self, partial: torch.Tensor) -> None:
        """Sum a compiled layer's partial result over all ranks, in place. Raises RankLostError: a rank is lost."""
        assert self._add_up is not None, "layers have partial results only where there are several ranks"
        self._add_up(partial)

    def begin_layer(self, layer_idx: int) -> None:
        """Begin a layer that has its own keys: the next call of :meth:`attend_begun` is of this layer."""
        self._begun = self._groups.writers[layer_idx]

    def attend_begun(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the keys and values of the begun layer, and compute its call. Shapes as of :meth:`attend`."""
        self._num_calls += 1
        self._backend.write(self._begun, _flat(key), _flat(value), self._step)
        out = self._backend.attend(self._begun, _flat(query), self._step, sinks=sinks)
        return out.view(query.shape[0], query.shape[2], query.shape[1], -1)

    def make_mask(self, options: dict[str, Any]) -> None:
        """Return None: the back end applies the rule of each layer's group."""

    def run(
        self, call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], *given: torch.Tensor
    ) -> torch.Tensor:
        """Call a model with token ids, positions and wanted tokens, and compute its calls of attention in this pass.

        Raises EngineError if it calls attention more or fewer times than in the probe.
        """
        with listening(self):
            logits = call(*given)
        if self._num_calls != len(self._groups.attention):
            raise EngineError(
                f"the model called attention {self._num_calls} times in a pass, {len(self._groups.attention)} times "
                "when it was probed"
            )
        return logits

    # Selected keys

    def update_indexer(self, layer_idx: int, keys: torch.Tensor) -> torch.Tensor:
        """Write the keys of a layer's indexer, ``[rows, tokens, dim]``; return all that the rows see of them."""
        assert self.rows is not None, f"the indexer of layer {layer_idx} was not found by the probe"
        place = self._groups.indexers[layer_idx]
        group = self._step.groups[place.group]
        self._put(place, keys.flatten(0, 1), group.slot_mapping)
        return self.rows.read(self._blocks(place), group)

    def _attend_selected(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Compute a call whose keys an indexer has selected, by indices or by a mask that it returns."""
        layer, rows = self._groups.attention[number], self.rows
        storage, group = self._transfers.storage, self._step.groups[layer.group]
        indices, sinks, unfolding = options.get("indices"), options.get("s_aux"), self._unfoldings.get(number)
        assert rows is not None, f"call {number} is sparse, and the pass has no rows"
        if unfolding is not None and isinstance(indices, torch.Tensor):
            latents = storage.latents(layer.group, layer.index)
            return rows.attend_latents(layer, unfolding, query, latents, group, indices, sinks)
        if isinstance(indices, torch.Tensor):
            seen = rows.selected(indices)
        elif isinstance(mask, torch.Tensor) and (layer.window or mask is not rows.mask):
            seen = mask if mask.dtype is torch.bool else mask == 0
        else:
            raise EngineError(f"the model tells attention call {number} not which keys its indexer selects")
        if not layer.is_latent:
            views = storage.keys(layer.group, layer.index), storage.values(layer.group, layer.index)
            key, value = (rows.read(blocks, group).transpose(1, 2).to(query.dtype) for blocks in views)
        return rows.attend(layer, query, key, value, seen, sinks)

    def _update_one(self, layer_idx: int, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys, which are its values too, ``[rows, 1, tokens, dim]``; return all that the rows see."""
        assert self.rows is not None, f"layer {layer_idx} keeps one tensor, and the pass has no rows"
        place = self._groups.sources[layer_idx]
        group = self._step.groups[place.group]
        self._transfers.write_latents(place.group, place.index, _flat(key)[:, 0], group.slot_mapping)
        seen = self.rows.read(self._transfers.storage.latents(place.group, place.index), group)[:, None]
        return seen, seen

    # Compressed entries, of one sequence

    @property
    def computed(self) -> tuple[int, int]:
        """The positions that the pass computes of its sequence."""
        first, last = int(self._positions[0, 0]), int(self._positions[0, -1])
        return first, last + 1

    def read(self, place: CompanionPlace, first: int, stop: int) -> torch.Tensor:
        """Copy vectors, or entries, out of blocks: ``[stop - first, dim]``."""
        return gather(self._blocks(place), self._step.groups[place.group], Span(0, 0, first, stop, first))

    def write(self, place: CompanionPlace, first: int, vectors: torch.Tensor) -> None:
        """Write vectors, or entries, ``[n, dim]``, into blocks, from ``first`` on."""
        size = self._blocks(place).shape[1]
        where = first + torch.arange(len(vectors), device=vectors.device)
        slots = self._step.groups[place.group].block_tables[0].long()[where // size] * size + where % size
        self._put(place, vectors, slots)

    def _put(self, place: CompanionPlace, vectors: torch.Tensor, slots: torch.Tensor) -> None:
        if place.name is None:
            self._transfers.write_latents(place.group, place.index, vectors, slots)
        else:
            self._transfers.write_companion(place.group, place.name, place.index, vectors, slots)

    def _blocks(self, place: CompanionPlace) -> torch.Tensor:
        storage = self._transfers.storage
        if place.name is None:
            return storage.latents(place.group, place.index)
        return storage.companion(place.group, place.name, place.index)

    # Latents

    def _update_latents(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place, number = self._groups.sources[layer_idx], self._groups.writers[layer_idx]
        latent = torch.cat([_flat(key)[:, 0], _flat(value)[:, 0]], dim=1)
        group = self._step.groups[place.group]
        self._transfers.write_latents(place.group, place.index, latent, group.slot_mapping)
        if number in self._unfoldings:
            return key, value
        blocks = self._transfers.storage.latents(place.group, place.index)
        if self.rows is not None and number in self._groups.sparse:
            whole = self.rows.read(blocks, group)[:, None]
            first, second = torch.split(whole, list(self._groups.latents[layer_idx]), dim=-1)
            return first, second
        seen = torch.cat([gather(blocks, group, span) for span in spans(self._groups.attention[number], group)])
        first, second = torch.split(seen[None, None], list(self._groups.latents[layer_idx]), dim=-1)
        return first, second


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape ``[rows, heads, tokens, dim]`` to ``[rows * tokens, heads, dim]``; a view if there is one row."""
    return tensor.transpose(1, 2).flatten(0, 1)


@final
class PagedCache(compat.Cache):
    """The cache of one engine, for all of its passes.

    Args:
        model: the model, whose dense cache it replaces; groups: of its layers.

    Attributes:
        forward_pass: the pass under way.
    """

    def __init__(self, model: compat.Model, groups: EngineGroups) -> None:
        self._pristine: list[Any] = list(compat.dense_cache(model).layers)
        for layer_idx, places in groups.compressed.items():
            self._pristine[layer_idx] = CompressedLayer(places, self._current)
        super().__init__(layers=list(self._pristine))
        self.forward_pass: ForwardPass | None = None

    def begin(self, forward_pass: ForwardPass) -> None:
        """Make a pass the one under way."""
        self.forward_pass = forward_pass
        if forward_pass.rows is not None:
            compat.place_indexers(self, forward_pass.rows.positions)

    @property
    def mask(self) -> torch.Tensor | None:
        """The causal mask of the pass under way, which indexers read; None where there are none."""
        return None if self.forward_pass is None else self.forward_pass.mask

    def load_states(self, states: Mapping[int, compat.State], recurrent: Iterable[int], *, is_prompt: bool) -> None:
        """Set the states of recurrent layers, before a pass.

        Args:
            states: the states that recurrent layers continue, by number of the layer, each ``[sequences, ...]``; they
                are changed in place. None where sequences begin.
            recurrent: numbers of all recurrent layers.
            is_prompt: they are to take the tokens as a prompt's, also where it is one token.
        """
        for layer_idx in recurrent:
            layer = compat.empty_layer(self._pristine[layer_idx])
            compat.load_state(layer, states.get(layer_idx, {}), is_prompt=is_prompt)
            self.layers[layer_idx] = layer

    def states(self, layer_idx: int) -> compat.State:
        """Return the state of a recurrent layer after the pass."""
        return compat.state_tensors(self.layers[layer_idx])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass keys and values on to the pass under way."""
        return self._current().update(layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Pass the keys of an indexer on to the pass under way."""
        return self._current().update_indexer(layer_idx, indexer_key_states)

    def _current(self) -> ForwardPass:
        if self.forward_pass is None:
            raise EngineError("the engine's cache was used outside of a step")
        return self.forward_pass

    def get_seq_length(  # type: ignore[override]  # a tensor, where a layer adds it to places
        self, layer_idx: int | None = None
    ) -> "int | torch.Tensor":
        """Return the number of tokens before the pass, as models use it.

        Without a layer it is for masks, which are not made here: 0. A layer adds it to ``arange(tokens)`` for its
        positions (Llama 4): it gets the offset of every token.
        """
        if layer_idx is None or self.forward_pass is None:
            return 0
        offsets = self.forward_pass.offsets
        return offsets[0] if len(offsets) == 1 else offsets
