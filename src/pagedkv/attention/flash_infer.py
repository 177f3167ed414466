"""FlashInfer's kernels for layers that they can serve, if it is installed and a step's lengths are on the host.

They take the blocks that a step's rows read as compressed sparse rows of "pages".

Decoding rows and prompts share one call of its prefill kernels, planned once per step for all layers with equal reads.
FlashInfer splits long rows depending on the other rows of the step, so the rounding of its answers depends on them.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch

from pagedkv.attention.backend import AttentionLayer, GroupMetadata, KnownRanges
from pagedkv.attention.facts import LayerFacts, shared_refusal
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.device import KVStorage


class PageList(NamedTuple):
    """Pages of the places of a step that have tokens.

    Args:
        query_indptr: int32 ``[rows + 1]``, tokens before each of them.
        page_indptr: int32 ``[rows + 1]``, pages before each of them.
        last_page_len: int32 ``[rows]``, tokens in the last page of each.
        places, columns: int64 ``[pages]``, row and column of each page's block in the block tables.
    """

    query_indptr: Int32Array
    page_indptr: Int32Array
    last_page_len: Int32Array
    places: Int64Array
    columns: Int64Array


def list_pages(known: KnownRanges, layer: AttentionLayer, block_size: int) -> PageList:
    """List the pages of each place from the first one that its first query sees. O(places + pages)."""
    places = np.flatnonzero(known.starts < known.ends)
    starts, ends = known.starts[places].astype(np.int64), known.ends[places].astype(np.int64)
    first_seen = np.maximum(starts - layer.window + 1, 0) if layer.window else np.zeros_like(starts)
    first = first_seen // block_size
    counts = -(-ends // block_size) - first
    page_indptr = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(page_indptr[-1]) - np.repeat(page_indptr[:-1], counts)
    return PageList(
        np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
        page_indptr.astype(np.int32),
        ((ends - 1) % block_size + 1).astype(np.int32),
        np.repeat(places, counts),
        np.repeat(first, counts) + within,
    )


PACKAGE: Final = "flashinfer"
DIMENSIONS: Final = (64, 128, 256)
WORKSPACE_NBYTES: Final = 2**27
"""Size of the workspace of partial answers, as FlashInfer's documentation recommends."""


def installed_version() -> str | None:
    """Return the installed version; None if it is not installed. Imports nothing."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def refusal(facts: LayerFacts, version: str | None) -> str | None:
    """Return the reason why FlashInfer cannot serve a layer; None if it can.

    Args:
        facts: facts of the layer.
        version: the installed version.
    """
    if version is None:
        return "FlashInfer is not installed: pip install flashinfer-python"
    if facts.batch_invariant:
        return "FlashInfer's answers depend on the other rows of a step: choose batch_invariant=False"
    reason = shared_refusal(facts)
    if reason is not None:
        return reason
    dim = getattr(facts.shape, "key_dim", 0)
    if dim not in DIMENSIONS:
        return f"heads have {dim} dimensions, FlashInfer serves {', '.join(map(str, DIMENSIONS))}"
    return None


@final
class FlashInferAttention:
    """Attention of some layers by FlashInfer.

    Args:
        storage: storage of the keys.
        layers: layers to serve, by number.
        query_dtype: type of queries and answers.

    Raises:
        ImportError: FlashInfer is missing, or its import fails.
    """

    def __init__(self, storage: KVStorage, layers: Mapping[int, AttentionLayer], query_dtype: torch.dtype) -> None:
        package = importlib.import_module(PACKAGE)
        self._layers = dict(layers)
        self._dtype = query_dtype
        self._pairs = {
            number: (storage.keys(layer.group, layer.index), storage.values(layer.group, layer.index))
            for number, layer in layers.items()
        }
        workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=storage.device)
        wrappers: dict[tuple[object, ...], _Planned] = {}
        self._planned: dict[int, _Planned] = {}
        for number, layer in layers.items():
            keys = self._pairs[number][0]
            kind = (layer.group, layer.num_heads, keys.shape[2:], layer.window, layer.soft_cap, layer.scale)
            if kind not in wrappers:
                wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
                wrappers[kind] = _Planned(wrapper, number)
            self._planned[number] = wrappers[kind]

    def attend(self, number: int, query: torch.Tensor, group: GroupMetadata, known: KnownRanges) -> torch.Tensor:
        """Compute attention of a step's queries, ``[tokens, heads, dim]``, with lengths on the host."""
        planned = self._planned[number]
        if number == planned.first_layer or planned.made_for is not group:
            self._plan(planned, number, group, known)
        if not planned.num_tokens:
            return query.new_empty(query.shape)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        count = planned.num_tokens
        planned.wrapper.run(query[:count].contiguous(), self._pairs[number], out=out[:count])
        return out

    def _plan(self, planned: "_Planned", number: int, group: GroupMetadata, known: KnownRanges) -> None:
        layer, keys = self._layers[number], self._pairs[number][0]
        _, block_size, num_key_heads, dim = keys.shape
        pages = list_pages(known, layer, block_size)
        planned.made_for, planned.num_tokens = group, int(pages.query_indptr[-1])
        if not planned.num_tokens:
            return
        places, columns = torch.from_numpy(np.stack([pages.places, pages.columns])).to(keys.device)
        planned.wrapper.plan(
            torch.from_numpy(pages.query_indptr),
            torch.from_numpy(pages.page_indptr),
            group.block_tables[places, columns],
            torch.from_numpy(pages.last_page_len),
            layer.num_heads,
            num_key_heads,
            dim,
            block_size,
            causal=True,
            sm_scale=layer.scale,
            window_left=layer.window - 1,
            logits_soft_cap=layer.soft_cap or None,
            q_data_type=self._dtype,
            kv_data_type=keys.dtype,
            o_data_type=self._dtype,
        )


class _Planned:
    """A FlashInfer wrapper, the layer that plans it, and the step of its plan."""

    def __init__(self, wrapper: Any, first_layer: int) -> None:  # noqa: ANN401 - FlashInfer's own
        self.wrapper = wrapper
        self.first_layer = first_layer
        self.made_for: GroupMetadata | None = None
        self.num_tokens = 0
