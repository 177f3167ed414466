"""A transformer of one's own on paged memory: prefill, decoding, and a prefix that another request has computed.

    python examples/paged_transformer.py

What an author of an engine asks first. The space says which tokens a step computes and where they lie, the executor
carries that out, and the model does two things in each layer: it writes the step's keys and values to their slots, and
reads those of a whole sequence through its block table. Weights are random; the same model without paging says what is
right. docs/device.md tells more of each part.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import layer_norm, softmax

from pagedkv import Allocation, BlockSpace, FullAttention, SpaceConfig
from pagedkv.device import BlockTables, KeyValueShape, KVStorage, PlanExecutor, StepInputs

VOCABULARY, WIDTH, LAYERS, HEADS, BLOCK = 50, 32, 2, 4, 4
DIM = WIDTH // HEADS


class Model:
    """Two layers of attention with random weights; ``attend`` is all that paged memory has to do with."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.positions = torch.randn(64, WIDTH, generator=generator)
        self.weights = 2 * torch.randn(LAYERS, 4, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.head = torch.randn(WIDTH, VOCABULARY, generator=generator)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, memory: "Memory") -> torch.Tensor:
        """Compute logits ``[tokens, vocabulary]`` of tokens in a flat row, whichever sequences they belong to."""
        hidden = self.embedding[token_ids] + self.positions[positions]
        for layer, (query, key, value, out) in enumerate(self.weights):
            inside = layer_norm(hidden, (WIDTH,))
            q, k, v = ((inside @ weight).view(-1, HEADS, DIM) for weight in (query, key, value))
            hidden = hidden + memory.attend(layer, q, k, v).flatten(1) @ out
        return layer_norm(hidden, (WIDTH,)) @ self.head


class Memory:
    """Where keys and values are kept."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep ``k`` and ``v``, ``[tokens, heads, dim]``, and answer ``q``: the same shape."""
        raise NotImplementedError


class Dense(Memory):
    """One sequence from its first token on: nothing is kept."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend causally."""
        del layer
        return attention(q, k, v, torch.arange(len(q)))


class Paged(Memory):
    """The tokens of a step, their keys and values in blocks."""

    def __init__(self, executor: PlanExecutor, inputs: StepInputs) -> None:
        self.executor, self.inputs = executor, inputs
        self.offsets = inputs.query_start_loc[0].tolist()
        self.lengths = inputs.seq_lens[0].tolist()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write to slots, then read each sequence through its block table."""
        inputs, storage = self.inputs, self.executor.storage
        self.executor.transfers.reshape_and_cache(0, layer, k, v, inputs.slot_mappings[0])
        layers = storage.keys(0, layer), storage.values(0, layer)
        out = torch.empty_like(q)
        for place, length in enumerate(self.lengths):
            blocks = inputs.block_tables[0][place, : -(-length // BLOCK)].long()
            keys, values = (kept[blocks].flatten(0, 1)[:length] for kept in layers)
            mine = slice(self.offsets[place], self.offsets[place + 1])
            out[mine] = attention(q[mine], keys, values, inputs.positions()[mine])
        return out


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Let queries at these positions see all keys up to their own: ``[queries, heads, dim]``."""
    scores = torch.einsum("qhd,khd->hqk", q, keys) / DIM**0.5
    is_hidden = torch.arange(len(keys)) > positions[:, None]
    return torch.einsum("hqk,khd->qhd", softmax(scores.masked_fill(is_hidden, -torch.inf), dim=2), values)


class Engine:
    """Serves sequences together, the most likely token each."""

    def __init__(self, model: Model, config: SpaceConfig) -> None:
        self.model, self.space = model, BlockSpace(config)
        shape = KeyValueShape(num_layers=LAYERS, num_heads=HEADS, key_dim=DIM, dtype=torch.float32)
        tables = BlockTables(config, max_batched_tokens=256, device="cpu")
        self.executor = PlanExecutor(KVStorage(config, [shape], "cpu"), tables)
        self.texts: dict[int, list[int]] = {}
        self.num_hit_tokens = 0

    def admit(self, prompt: Sequence[int]) -> int:
        """Take a prompt in, of which the next step computes what is not cached; returns its row."""
        allocation = self.space.allocate(prompt)
        assert isinstance(allocation, Allocation), "the pool is large enough for this example"
        self.num_hit_tokens += allocation.num_hit_tokens
        self.texts[allocation.row] = list(prompt)
        return allocation.row

    def step(self) -> None:
        """Compute what is not computed yet, and let every sequence grow by a token."""
        plan = self.space.plan_step()
        logits = self.executor.launch(plan, self._forward)  # copies, swaps and tables first, then the model
        for step_id in self.executor.wait():
            self.space.acknowledge(step_id)
        last = plan.compute.offsets()[1:] - 1
        for row, token in zip(plan.compute.rows.tolist(), logits[last].argmax(1).tolist(), strict=True):
            self.texts[row].append(token)
        rows = list(self.texts)
        assert self.space.append(rows, [self.texts[row][-1] for row in rows]) is None

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        rows, positions = inputs.rows.tolist(), inputs.positions()[: inputs.num_tokens]
        whose = inputs.places()[: inputs.num_tokens].tolist()
        tokens = [self.texts[rows[place]][at] for place, at in zip(whose, positions.tolist(), strict=True)]
        return self.model.forward(torch.tensor(tokens), positions, Paged(self.executor, inputs))

    def leave(self, row: int) -> list[int]:
        """Give a sequence up; its whole blocks stay cached."""
        self.space.free(row)
        return self.texts.pop(row)


def without_paging(model: Model, prompt: Sequence[int], num_new: int) -> list[int]:
    """Continue a prompt, computing all of it anew for every token."""
    text = list(prompt)
    for _ in range(num_new):
        text.append(int(model.forward(torch.tensor(text), torch.arange(len(text)), Dense())[-1].argmax()))
    return text


def main() -> None:
    """Serve two prompts together, then one that begins as the first does."""
    model = Model()
    engine = Engine(model, SpaceConfig((FullAttention(BLOCK),), num_blocks=40, max_sequences=4, max_tokens=64))
    document = [7, 3, 41, 19, 28, 5, 11, 36, 2, 44]
    prompts = [[*document, 1, 2], [9, 8, 7, 6, 5], [*document, 30]]
    rows = [engine.admit(prompt) for prompt in prompts[:2]]
    for _ in range(12):
        engine.step()
    texts = [engine.leave(row) for row in rows]
    late = engine.admit(prompts[2])
    for _ in range(12):
        engine.step()
    texts.append(engine.leave(late))
    assert texts == [without_paging(model, prompt, 12) for prompt in prompts], "paging changes no token"
    print(f"3 prompts, 12 new tokens each, equal without paging; {engine.num_hit_tokens} tokens of the third were hit")


if __name__ == "__main__":
    main()
