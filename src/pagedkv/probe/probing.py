"""What a model's layers keep and read, found out by one pass of two tokens; what is refused before and there.

Some models are refused before the probe, for reasons that a probe of two tokens cannot find. With rotary factors that
depend on the longest position of a pass, one sequence would change another's output. Layers in training mode would not
compute the same logits twice.

The probe watches the attention function that the model calls by name, the mask function, whose results return as masks
of calls, and ``Cache.update``. A call reads the source whose tensors it has as arguments. A call right after an update
with tensors of no source has unfolded them from that update (latents).

Masks of transformers are functions of (batch, head, query, key); windows and chunks are closures in them. To find out
which rule such a function follows (full, window or chunk), it is asked which keys some queries see. What fits no rule
at every query asked is a real mask.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, assert_never, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.errors import RankLostError, UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.compat import PROBE, BorrowedModel, listening
from pagedkv.probe.layers import CallSpec, EntrySpec, ModelLayers, Rule, SourceSpec, StateSpec

BY_LENGTH: Final = {
    "longrope": "its rotary factors are others once any sequence of the pass is longer than the original context",
    "dynamic": "its rotary factors depend on the longest position of the pass (dynamic NTK)",
}


def require_supported(model: compat.Model) -> None:
    """Refuse a model that would answer wrongly, or not reproducibly. Changes nothing.

    Raises:
        UnsupportedModelError: which model, why, and what to do.
        MissingExtraError: transformers is too old.
    """
    compat.require_version()
    compat.refuse_encoder(model)
    name = type(model).__name__
    if model.training:
        raise UnsupportedModelError(f"{name} is in training mode, where dropout changes answers: call model.eval()")
    for rule in sorted(compat.position_rules(model)):
        if rule in BY_LENGTH:
            raise UnsupportedModelError(
                f"{name}: rope_type is {rule!r}: {BY_LENGTH[rule]}, so a request's answer would depend on its "
                "neighbours. Set rope_type to 'default' in config.rope_parameters, and stay within the original "
                "context, or use a model with another rule (llama3, yarn, linear)"
            )


NUM_POSITIONS: Final = 2**17
"""Positions at which mask functions are evaluated; longer windows count as full attention."""
FURTHER_QUERIES: Final = 12


def rule_of_mask(mask: Callable[..., Any], num_positions: int = NUM_POSITIONS) -> Rule | None:
    """Return the rule of a mask function; None if it follows none. O(positions) for each query.

    A function that looks up positions among the tokens of its pass is a real mask: it fails beyond them.
    """
    try:
        return _rule(mask, num_positions)
    except IndexError:
        return None


def _rule(mask: Callable[..., Any], num_positions: int) -> Rule | None:
    last = num_positions - 1
    first = _first_seen(mask, last)
    if first is None:
        return None
    if first == 0:
        return _if_everywhere(mask, Rule("full"), num_positions)
    window = _if_everywhere(mask, Rule("window", last - first + 1), num_positions)
    if window is not None:
        return window
    # Of a chunk's start all divisors may be its length: the true one ends where the keys seen begin anew.
    next_start = _first_seen(mask, first - 1)
    return None if next_start is None else _if_everywhere(mask, Rule("chunk", first - next_start), num_positions)


def _if_everywhere(mask: Callable[..., Any], rule: Rule, num_positions: int) -> Rule | None:
    for query in _queries(rule.extent, num_positions):
        if _first_seen(mask, query) != _first_of_rule(rule, query):
            return None
    return rule


def _first_of_rule(rule: Rule, query: int) -> int:
    match rule.kind:
        case "full":
            return 0
        case "window":
            return max(0, query - rule.extent + 1)
        case "chunk":
            return query // rule.extent * rule.extent
        case _:
            assert_never(rule.kind)


def _queries(extent: int, num_positions: int) -> Iterator[int]:
    yield from (0, 1, num_positions // 3, num_positions // 2)
    for near in range(extent - 2, extent + FURTHER_QUERIES - 2):
        if 0 <= near < num_positions:
            yield near


def _first_seen(mask: Callable[..., Any], query: int) -> int | None:
    """Return the first key that a query sees, if it sees exactly the keys from there to its own position."""
    zero = torch.tensor(0)
    keys = torch.arange(query + 3)
    seen = torch.as_tensor(mask(zero, zero, torch.tensor(query), keys)).expand(len(keys))
    first = int(seen.int().argmax())
    expected = (keys >= first) & (keys <= query)
    return first if bool(seen.any()) and torch.equal(seen, expected) else None


NUM_TOKENS: Final = 2
KNOWN_TENSORS: Final = frozenset({"s_aux", "position_ids", "cache_position", "logits_to_keep"})
"""Keywords of attention calls with tensors that are supported, or that change no result."""
SEE_TABLE: Final = "docs/engine.md lists what is supported"


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    layer_idx: int
    key: torch.Tensor
    value: torch.Tensor
    is_one: bool


@dataclass(slots=True, eq=False)
class _Recorder:
    """Records updates and calls, and computes them as a dense model does."""

    model_name: str
    device: torch.device
    indexed: frozenset[int] = frozenset()
    updates: list[_Update] = field(default_factory=list)
    sources: list[SourceSpec] = field(default_factory=list)
    calls: list[CallSpec] = field(default_factory=list)
    entries: list[EntrySpec] = field(default_factory=list)
    masks: dict[int, Rule | None] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    unread: int | None = None

    def note_update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, *, is_one: bool) -> None:
        if self.unread is not None:
            raise self._bypassed(self.unread)
        if any(update.layer_idx == layer_idx for update in self.updates):
            raise self._refusal(f"layer {layer_idx} keeps two tensors of keys a token", SEE_TABLE)
        self.updates.append(_Update(layer_idx, key, value, is_one))
        self.unread = len(self.updates) - 1

    def note_indexer_keys(self, layer_idx: int, keys: torch.Tensor) -> None:
        self.entries.append(EntrySpec(layer_idx, 1, keys.shape[-1], keys.dtype))

    def make_mask(self, options: dict[str, Any]) -> torch.Tensor:
        function = cast("Callable[..., Any]", options["mask_function"])
        with self.device:  # the device of the tensors that masks look up
            mask = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()[None, None]
            rule = None if mask.is_meta else rule_of_mask(function)
        if mask.is_meta:
            with compat.Zeros():
                rule = rule_of_mask(function)
        self.kept.append(mask)  # a freed mask's address could be that of a later one
        self.masks[_address(mask)] = rule
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        number = len(self.calls)
        source = self._source_of(number, key, value)
        scale = options.get("scaling")
        scale = key.shape[-1] ** -0.5 if scale is None else float(scale)
        layer_idx = self.updates[source].layer_idx
        is_sparse = layer_idx in self.indexed
        if is_sparse:
            self._require_selection(number, mask, options)
        else:
            self._require_options(number, module, options)
        is_sharing = any(call.source == source for call in self.calls)
        soft_cap = float(options.get("softcap") or 0.0)
        sinks = options.get("s_aux")
        rule = self._rule_of(number, layer_idx, mask, options)
        pair_width = query.shape[-1] + value.shape[-1]
        self.calls.append(
            CallSpec(
                source, is_sharing, query.shape[1], scale, soft_cap, sinks is not None, rule, pair_width, is_sparse
            )
        )
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return out.transpose(1, 2).contiguous()

    def _source_of(self, number: int, key: torch.Tensor, value: torch.Tensor) -> int:
        """Return the index of the update that a call reads, and record it as a source when it is first read."""
        for index, update in reversed(list(enumerate(self.updates))):
            if _same(update.key, key) and _same(update.value, value):
                if index == self.unread:
                    self._note_source(update, is_latent=False)
                return index
        if self.unread is None:
            raise self._refusal(
                f"attention call {number} reads keys that no layer gave to the cache (cross-attention, or keys that "
                "are changed after they are shared)",
                SEE_TABLE,
            )
        index, update = self.unread, self.updates[self.unread]
        if update.key.shape[1] != 1 or update.value.shape[1] != 1:
            raise self._refusal(
                f"layer {update.layer_idx} changes its keys or values after they went into the cache", SEE_TABLE
            )
        self._note_source(update, is_latent=True)
        return index

    def _note_source(self, update: _Update, *, is_latent: bool) -> None:
        if update.key.dtype != update.value.dtype or update.key.shape[1] != update.value.shape[1]:
            raise self._refusal(
                f"layer {update.layer_idx} keeps keys {update.key.dtype} of {update.key.shape[1]} heads and values "
                f"{update.value.dtype} of {update.value.shape[1]}",
                SEE_TABLE,
            )
        self.sources.append(
            SourceSpec(
                update.layer_idx,
                update.key.shape[1],
                update.key.shape[-1],
                0 if update.is_one else update.value.shape[-1],
                update.key.dtype,
                is_latent and not update.is_one,
            )
        )
        self.unread = None

    def _rule_of(self, number: int, layer_idx: int, mask: object, options: dict[str, Any]) -> Rule:
        rule = self._named_rule(number, layer_idx, mask, options)
        if rule.extent == 1:
            raise UnsupportedModelError(
                f"{self.model_name}: attention call {number} sees one token alone ({rule.kind} of 1), for which "
                "transformers' own cache keeps all tokens: its dense answers are none that blocks could be held "
                "against. Set sliding_window, or attention_chunk_size, to 2 or more"
            )
        return rule

    def _named_rule(self, number: int, layer_idx: int, mask: object, options: dict[str, Any]) -> Rule:
        if layer_idx in self.indexed:
            return Rule("full")  # which keys an indexer leaves out is another question at each step
        if mask is None:
            window = options.get("sliding_window")
            return Rule("window", int(window)) if window else Rule("full")
        rule = self.masks.get(_address(mask)) if isinstance(mask, torch.Tensor) else None
        if rule is None:
            raise self._refusal(
                f"attention call {number} needs a mask of its own, which is neither causal nor a window nor a chunk",
                SEE_TABLE,
            )
        return rule

    def _require_selection(self, number: int, mask: object, options: dict[str, Any]) -> None:
        """Refuse a call of a layer with an indexer that is not told which keys the indexer selected."""
        is_told = isinstance(options.get("indices"), torch.Tensor)
        is_masked = isinstance(mask, torch.Tensor) and _address(mask) not in self.masks
        if not (is_told or is_masked):
            raise self._refusal(
                f"attention call {number} is not told which keys its layer's indexer selects, neither by indices nor "
                "by a mask",
                SEE_TABLE,
            )

    def _require_options(self, number: int, module: torch.nn.Module, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and name not in KNOWN_TENSORS:
                raise self._refusal(f"attention call {number} is given {name!r}, which is not known here", SEE_TABLE)
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise self._refusal(f"attention call {number} is not causal", SEE_TABLE)

    def _bypassed(self, index: int) -> UnsupportedModelError:
        return self._refusal(
            f"layer {self.updates[index].layer_idx} computes attention by itself, not through transformers' attention "
            "interface",
            SEE_TABLE,
        )

    def _refusal(self, reason: str, remedy: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.model_name}: {reason}; paged memory would answer wrongly. {remedy}")

    def finish(self, cache: compat.Cache, num_vocabulary: int) -> ModelLayers:
        if self.unread is not None:
            raise self._bypassed(self.unread)
        if not self.sources:
            raise self._refusal(
                "no layer called transformers' attention interface with keys from the cache (it computes attention by "
                "itself, or has none)",
                SEE_TABLE,
            )
        compressed = [
            EntrySpec(layer_idx, ratio, dim, dtype, num_raw, raw_dim, name)
            for layer_idx, layer in enumerate(cache.layers)
            for name, ratio, dim, dtype, num_raw, raw_dim in compat.compressed_entries(layer)
        ]
        return ModelLayers(
            tuple(self.calls),
            tuple(self.sources),
            tuple(_states(cache)),
            num_vocabulary,
            (*self.entries, *compressed),
        )


def probe(model: compat.Model) -> ModelLayers:
    """Find out what a model keeps and reads. Changes nothing.

    Args:
        model: any decoder, in evaluation mode; on the meta device (:func:`~pagedkv.probe.compat.make_without_weights`)
            it is asked the same, and nothing is computed.

    Raises:
        UnsupportedModelError: paged memory would answer wrongly for it: which layer, and why.

    Cost: one forward pass of two tokens.
    """
    cache = compat.dense_cache(model)
    indexed = frozenset(number for number, layer in enumerate(cache.layers) if compat.has_indexer(layer))
    recorder = _Recorder(type(model).__name__, model.device, indexed)
    update, update_indexer = cache.update, cache.update_indexer

    def watched(
        key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = update(key, value, layer_idx, *args, **options)
        recorder.note_update(layer_idx, keys, values, is_one=key is value)
        return keys, values

    def watched_indexer(keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        recorder.note_indexer_keys(layer_idx, keys)
        return update_indexer(keys, layer_idx)

    cast("Any", cache).update = watched  # of this cache object alone
    cast("Any", cache).update_indexer = watched_indexer
    tokens = torch.tensor([[1, 2]], device=model.device)
    positions = torch.arange(NUM_TOKENS, device=model.device)[None]
    inputs: dict[str, object] = {"input_ids": tokens, "position_ids": positions}
    if not compat.accepts(model, "position_ids"):
        raise recorder._refusal(  # noqa: SLF001
            "it takes no position_ids: it does not place tokens by numbers that the engine could give", SEE_TABLE
        )
    wanted = torch.tensor([NUM_TOKENS - 1], device=model.device)
    try:
        with torch.inference_mode(), BorrowedModel(model).calling(PROBE), listening(recorder), compat.computing(model):
            logits = compat.forward(model, wanted, cache, **inputs)
    except (UnsupportedModelError, RankLostError):
        raise
    except Exception as problem:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails with two tokens, positions and a cache: {type(problem).__name__}: {problem}"
        ) from problem
    return recorder.finish(cache, logits.shape[-1])


def _states(cache: compat.Cache) -> list[StateSpec]:
    states = []
    for layer_idx, layer in enumerate(cache.layers):
        tensors = compat.state_tensors(layer) if compat.is_linear(layer) else {}
        if tensors:
            shapes = ((name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in sorted(tensors.items()))
            states.append(StateSpec(layer_idx, tuple(shapes)))
    return states


def _same(kept: torch.Tensor, read: torch.Tensor) -> bool:
    if kept is read:
        return True
    is_alike = kept.shape == read.shape and kept.dtype == read.dtype
    return is_alike and not kept.is_meta and torch.equal(kept, read)


def _address(tensor: torch.Tensor) -> int:
    """Return a number that a tensor shares with its views alone, also where it has no memory."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - data_ptr() is 0 on the meta device
