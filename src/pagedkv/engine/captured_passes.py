"""Forward passes as CUDA graphs, one for each padded number of tokens, as long as the model stays as it was captured.

Launching a model's kernels one by one takes the host longer than a GPU needs for a step of few tokens. A graph launches
all of them at once, with the addresses and sizes of its capture. So everything that changes from step to step is in
permanent buffers: tables, ranges and slots in those of the metadata, token ids and positions in those here::

    tokens of the step    | t t t t t t t t t t t |        11: the graph of 16 is replayed
    buffers               | t t t t t t t t t t t 0 0 0 0 0 |
    slots                 | s s s s s s s s s s s - - - - - |    padding is written to no slot, and attended by no row

Decoded tokens, drafts and chunks of prompts are treated alike, since a row's range is read on the device. Steps without
chunks, whose tokens all have their logits wanted, have graphs of their own, with fewer kernels. With recurrent layers
or an indexer, which take rows of equal length, only steps that decode one token of every sequence are captured.

A graph is captured when a step first needs it, but for the largest, which shows how much memory graphs take.

An indexer scores all keys of a row, so there is a graph for each padded number of keys too. What is beyond a row's last
key is masked::

    tokens of the step    | t t t |           4 rows, of which one is padding
    keys of row 0         | 0 1 2 ... 299 - - - |           512 keys
    keys of row 1         | 0 1 2 ... 24 - - -  - - |

A graph is used once it is proven: after the step of its capture, the logits of another step must equal those of the
same calls one by one, bit for bit. If they differ, or the capture fails, steps run call by call, and
:attr:`CapturedPasses.state` has the reason.

Graphs are dropped when the model changes. Since a graph has addresses, it is invalid once a weight was moved, replaced
or converted, a module replaced (as by an adapter), a hook registered, or the model set to training. Weights may change
in place.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import getitem, is_not
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from pagedkv.attention import StepMetadata
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.device import BlockTables
from pagedkv.errors import EngineError
from pagedkv.probe import compat
from pagedkv.probe.layers import EngineGroups

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
ADAPTER_STATE: Final = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""What PEFT's layers keep of adapters: which are active, whether any is, and which the weights hold already."""


@final
class ModelWatch:
    """The state of a model when this was made.

    Args:
        model: the model.

    Attributes:
        has_hooks: whether any module has a hook of its forward pass.

    It keeps references to the weights, also if the model drops them: a graph that is replayed before the change is
    noticed still reads allocated memory. Cost: O(modules + weights).
    """

    def __init__(self, model: compat.Model) -> None:
        self._model = model
        self._tables: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        self._parts: list[object] = []
        for module in model.modules():
            for table in (module._modules, module._parameters, module._buffers):  # noqa: SLF001 - torch's own names
                for name, part in table.items():
                    if part is not None:
                        self._tables.append(table)
                        self._names.append(name)
                        self._parts.append(part)
        self._weights = [part for part in self._parts if isinstance(part, torch.Tensor)]
        self._kept = [weight.detach() for weight in self._weights]
        self._addresses = list(map(torch.Tensor.data_ptr, self._weights))
        self._is_training = model.training
        self._adapted = [module for module in model.modules() if hasattr(module, ADAPTER_STATE[0])]
        self._adapters = self._active_adapters()
        self._num_hooks = RemovableHandle.next_id
        self.has_hooks = self._find_hooks()

    def has_changed(self) -> bool:
        """Return whether any part of the model was replaced. Cost: 70 us for the 8B shape of Llama 3."""
        try:
            if any(map(is_not, map(getitem, self._tables, self._names), self._parts)):
                return True
        except KeyError:
            return True
        return (
            list(map(torch.Tensor.data_ptr, self._weights)) != self._addresses
            or self._model.training != self._is_training
            or self._active_adapters() != self._adapters
            or self._has_other_hooks()
        )

    def _active_adapters(self) -> list[str]:
        """Return the active adapters of every module with adapters."""
        return [repr([getattr(module, name, None) for name in ADAPTER_STATE]) for module in self._adapted]

    def _has_other_hooks(self) -> bool:
        """Return whether hooks have changed; searches the modules only if they have hooks or one was registered."""
        if not self.has_hooks and RemovableHandle.next_id == self._num_hooks:
            return False
        self._num_hooks = RemovableHandle.next_id
        return self._find_hooks() != self.has_hooks

    def _find_hooks(self) -> bool:
        return any(getattr(module, table) for module in self._model.modules() for table in HOOKS)


MOST_TOKENS: Final = 512
"""Above this a step keeps the GPU busy for longer than the host needs to launch it."""
SIZES: Final = tuple(chain((1, 2, 4), range(8, 64, 8), range(64, 128, 16), range(128, 256, 32), range(256, 513, 64)))
LEAST_KEYS: Final = 256
"""Keys of a row in the smallest graph of a model whose indexer scores them; others have a power of two."""
MOST_KEYS: Final = 2**20
"""Of all rows: the same as :data:`MOST_TOKENS`, and graphs keep the memory of their scores."""
Pass = Callable[[StepMetadata, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs the model: the rows, token ids and positions (int64 ``[1, tokens]``), wanted tokens (int64 ``[wanted]``) ->
logits ``[wanted, vocabulary]``."""


class _Kind(NamedTuple):
    """What steps a graph serves: their padded number of tokens, and whether rows may compute chunks.

    Where an indexer scores all that a row sees, also the padded number of keys of the longest row; else 0.
    """

    size: int
    has_chunks: bool
    num_keys: int = 0


class CaptureState(NamedTuple):
    """The state of an engine's graphs.

    Args:
        num_graphs: proven graphs, each of another number of tokens or keys, or with chunks.
        refusal: why steps run call by call; None: nothing prevents graphs.
    """

    num_graphs: int
    refusal: str | None


class Recording(Protocol):
    """Recorded calls."""

    def replay(self) -> None:
        """Repeat the calls."""


Recorder = Callable[[Callable[[], None]], Recording]
MetadataOf = Callable[[int], StepMetadata]
KeepStates = Callable[[int], Callable[[], None]]
"""Copies the states that a pass of so many tokens changes; returns what puts them back."""


@dataclass(slots=True, eq=False)
class _Graph:
    """A graph, and whether it is proven."""

    recording: Recording
    is_proven: bool = False


@final
class CapturedPasses:
    """The graphs of one model over metadata at addresses that stay.

    Args:
        model: a model of attention alone, which is watched for changes.
        metadata_of: gives the metadata of a padded number of tokens, in tensors whose addresses stay: see
            :func:`of_tables`.
        device: where the model computes.
        max_tokens: tokens of the largest graph, :data:`MOST_TOKENS` at most.
        num_vocabulary: logits of a token.
        min_tokens: tokens of the smallest graph.
        agree: whether all ranks of the model found what this one did, so that all replay or none does; None: there is
            one rank.
        keep: for passes that change states that they read, so that a step is not computed twice; None: there are none.
        record: records calls; None: as CUDA graphs.
    """

    def __init__(
        self,
        model: compat.Model,
        metadata_of: MetadataOf,
        device: torch.device,
        *,
        max_tokens: int,
        num_vocabulary: int,
        min_tokens: int = 1,
        agree: Callable[[bool], bool] | None = None,
        keep: KeepStates | None = None,
        record: Recorder | None = None,
    ) -> None:
        self._model = model
        self._keep = keep
        self._metadata_of = metadata_of
        self._device = device
        self._sizes = _sizes(min_tokens, max_tokens)
        self._is_on_ranks = agree is not None
        self._agree: Callable[[bool], bool] = bool if agree is None else agree
        self._given_recorder = record
        most = self._sizes[-1]
        self._host = torch.zeros(3, most, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: npt.NDArray[np.int64] = self._host.numpy()
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._given = torch.zeros(3, most, dtype=torch.int64, device=device)
        self._logits = torch.zeros(most, num_vocabulary, dtype=torch.float32, device=device)
        self._steps: dict[int, StepMetadata] = {}
        self._graphs: dict[_Kind, _Graph] = {}
        self._record: Recorder | None = None
        self._watch: ModelWatch | None = None
        self._refusal: str | None = None

    @property
    def state(self) -> CaptureState:
        """The number of proven graphs, and why there are none."""
        return CaptureState(sum(graph.is_proven for graph in self._graphs.values()), self._refusal)

    def capture_largest(self, run: Pass) -> None:
        """Capture a graph of the largest size, whose memory all others reuse.

        Called before the first step: there are no slots yet, so the captured pass writes nothing. Graphs of other
        sizes, and of steps with chunks, are captured when there is such a step.
        """
        if self._begin():
            kind = _Kind(self._sizes[-1], has_chunks=False)
            self._run(run, kind)
            self._capture(run, kind)

    def compute(
        self,
        run: Pass,
        token_ids: Int32Array,
        positions: Int64Array,
        wanted: Int64Array,
        fill_in: Callable[[torch.Tensor], None] | None = None,
        num_keys: int = 0,
    ) -> torch.Tensor | None:
        """Compute the step whose metadata is in place by a graph.

        Args:
            run: runs the model; token_ids, positions: of the step, in the flat order.
            wanted: places of the tokens whose logits are wanted.
            fill_in: sets those token ids on the device, int64 ``[tokens]``, that are not on the host; None: all are.
            num_keys: :func:`padded_keys` of the step, where an indexer scores them.

        Returns:
            float32 ``[wanted, vocabulary]``, which the next call overwrites; None: run this step call by call.
        """
        if len(token_ids) > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, len(token_ids))]
        kind = _Kind(size, not np.array_equal(wanted, np.arange(len(token_ids))), num_keys)
        if not self._is_proven(kind) and not self._begin():
            return None
        self._fill(size, token_ids, positions, wanted)
        if fill_in is not None:
            fill_in(self._given[0, : len(token_ids)])
        if kind not in self._graphs:
            self._run(run, kind)
            self._capture(run, kind)
            return self._logits[: len(wanted)]
        if not self._is_proven(kind):
            return self._prove(run, kind, len(wanted))
        is_changed = self._keep is not None and self._has_changed()
        if not is_changed:
            self._graphs[kind].recording.replay()
            is_changed = self._keep is None and self._has_changed()  # while the GPU computes: the step is run again
        return None if is_changed else self._logits[: len(wanted)]

    def drop(self) -> None:
        """Drop all graphs; later steps capture new ones. May be called in another thread, once a rank is lost."""
        self._graphs.clear()
        self._record = None

    def _is_proven(self, kind: _Kind) -> bool:
        return kind in self._graphs and self._graphs[kind].is_proven

    def _begin(self) -> bool:
        """Watch the model from its present state, if that changed; return whether graphs may be used."""
        if self._watch is None or self._has_changed():
            self._watch = ModelWatch(self._model)
            if not self._agree(not self._watch.has_hooks):
                where = "" if self._watch.has_hooks else " on another rank"
                self._refusal = f"a module of the model has a hook{where}, which a graph would leave out"
        return self._refusal is None

    def _has_changed(self) -> bool:
        """Return whether the model has changed. If so, its graphs and the reason against graphs are dropped.

        Raises EngineError: it is one of several ranks, of which the others may go on with their graphs.
        """
        assert self._watch is not None, "nothing is captured before the model is watched"
        if not self._watch.has_changed():
            return False
        if self._is_on_ranks:
            raise EngineError(
                "the model of this rank has changed (a weight or module was replaced, or a hook registered), and the "
                "other ranks may not follow: change it on all ranks before the engine is built"
            )
        self.drop()
        self._watch, self._refusal = None, None
        return True

    def _fill(self, size: int, token_ids: Int32Array, positions: Int64Array, wanted: Int64Array) -> None:
        """Copy a step's numbers into the buffers, padded with zeros to the graph's size."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy must have read the host buffer before it is overwritten
        given: tuple[npt.NDArray[np.integer], ...] = (token_ids, positions, wanted)
        for line, values in zip(self._numbers, given, strict=True):
            line[: len(values)] = values
            line[len(values) : size] = 0
        self._given.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _run(self, run: Pass, kind: _Kind) -> None:
        """Run the model on the buffers, call by call, and write its logits into their buffer."""
        size = kind.size
        token_ids, positions, wanted = self._given[:, :size]
        if size not in self._steps:
            self._steps[size] = self._metadata_of(size)
        step = replace(self._steps[size], has_chunks=kind.has_chunks, num_keys=kind.num_keys)
        self._logits[:size].copy_(run(step, token_ids[None], positions[None], wanted))

    def _capture(self, run: Pass, kind: _Kind) -> None:
        reason = "on another rank"
        try:
            if self._record is None:  # a pool of memory whose graphs were dropped cannot be used again
                self._record = self._given_recorder or _GraphRecorder(self._device)
            self._graphs[kind] = _Graph(self._record(lambda: self._run(run, kind)))
        except Exception as problem:  # noqa: BLE001 - a model may do anything that cannot be captured
            reason = str(problem)
        if not self._agree(kind in self._graphs):
            self._refuse(f"a step of {kind.size} tokens cannot be captured: {reason}".splitlines()[0])

    def _prove(self, run: Pass, kind: _Kind, num_wanted: int) -> torch.Tensor:
        """Compute a step call by call, as if it had chunks, and by the graph.

        The graph is proven if the logits are equal bit for bit.

        Nothing here refers to the graph while the ranks agree: see :meth:`drop`.
        """
        size = kind.size
        put_back = None if self._keep is None else self._keep(size)
        self._run(run, kind._replace(has_chunks=True))
        answer = self._logits[:num_wanted].clone()
        if not num_wanted:
            return answer  # without logits there is nothing to compare
        if put_back is not None:
            put_back()
        self._logits.fill_(torch.nan)
        self._graphs[kind].recording.replay()
        is_equal = torch.equal(self._logits[:num_wanted], answer)
        if self._agree(is_equal):
            self._graphs[kind].is_proven = True
        elif is_equal:
            self._refuse(f"the graph of {size} tokens answers otherwise than its calls on another rank")
        else:
            difference = (self._logits[:num_wanted] - answer).abs().max().item()
            self._refuse(f"the graph of {size} tokens answers otherwise than its calls, by {difference:.2g}")
        return answer

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self.drop()


def of_tables(tables: BlockTables, max_places: int | None) -> MetadataOf:
    """Give the metadata of whichever step the tables execute last, padded to some tokens.

    ``max_places``: most rows of a step; None: each row has one token.
    """

    def metadata(num_tokens: int) -> StepMetadata:
        return StepMetadata.of(tables.inputs_of_all(max_places or num_tokens, num_tokens), is_padded=True)

    return metadata


def what_prevents_graphs(groups: EngineGroups, device: torch.device, *, are_wanted: bool) -> str | None:
    """Return why the passes of a model are not captured; None if nothing prevents it.

    ``are_wanted``: ``EngineConfig.capture_steps``.
    """
    if not are_wanted:
        return "capture_steps is off"
    if device.type != "cuda":
        return f"there are no CUDA graphs on {device.type}"
    return groups.varying_shapes if groups.unfolds or groups.compressed else None


def padded_keys(positions: Int64Array) -> int | None:
    """Return the keys of a row in the graph that serves a step of these positions, one a row; None: no graph does."""
    num_keys = max(LEAST_KEYS, 1 << int(positions.max()).bit_length())
    return num_keys if num_keys * len(positions) <= MOST_KEYS else None


def most_captured(max_tokens: int) -> int:
    """Return the tokens of the largest graph where steps have up to ``max_tokens``."""
    return min(max_tokens, MOST_TOKENS)


def _sizes(min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Return the padded numbers of tokens. The last is ``max_tokens``, or the largest that is captured."""
    last = most_captured(max_tokens)
    return (*(size for size in SIZES if min_tokens <= size < last), last)


@final
class _GraphRecorder:
    """Captures calls as CUDA graphs that share one pool of memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # in torch, graphs share the memory of a pool only within one stream

    def __call__(self, calls: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                calls()
            except BaseException:
                with suppress(Exception):  # the capture has failed already, and this raises again
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
