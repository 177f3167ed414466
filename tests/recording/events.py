"""KV events as engines encode them, for tests: the arrays of SGLang, the maps of vLLM."""

from collections.abc import Sequence

import msgspec

__all__ = ["as_arrays", "as_maps", "cleared", "removed", "stored"]

Event = dict[str, object]


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    *,
    parent: int | bytes | None = None,
    size: int = 2,
    medium: str | None = "GPU",
) -> Event:
    """Blocks were stored."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": medium,
    }


def removed(hashes: Sequence[int | bytes], medium: str | None = "GPU") -> Event:
    """Blocks were removed."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def cleared() -> Event:
    """Everything was removed."""
    return {"type": "AllBlocksCleared"}


def as_maps(sent_s: float, *events: Event, rank: int = 0) -> bytes:
    """Encode a batch as vLLM does."""
    return msgspec.msgpack.encode({"ts": sent_s, "events": list(events), "data_parallel_rank": rank})


def as_arrays(sent_s: float, *events: Event) -> bytes:
    """Encode a batch as SGLang does."""
    return msgspec.msgpack.encode([sent_s, [list(event.values()) for event in events]])
