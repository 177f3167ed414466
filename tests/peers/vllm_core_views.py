"""What vLLM's scheduler, connectors and suites look at beside its `KVCacheManager`: views that ask a space each time.

Blocks, the pool, the tables and the names of one manager (:mod:`vllm_core_adapter`). None of them keeps what a space
knows; the pool keeps which rows leave when a step is over, and the tickets of readers.
"""
# ruff: noqa: ANN401, D102 - methods and values are vLLM's, without types here

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from pagedkv import (
    ROOT_DIGEST,
    BlockSpace,
    MediaSpan,
    RecurrentState,
    RequestKeys,
    hash_block_tokens,
    hash_request_tokens,
)

if TYPE_CHECKING:
    from vllm_core_adapter import KVCacheManager

NULL: Final = 0


class NotOfferedError(NotImplementedError):
    """A configuration for which a space has no rule, or that this adapter does not translate."""


def keys_of(request: Any) -> RequestKeys:
    """Return what determines a request's blocks beside its tokens."""
    if request.prompt_embeds is not None:
        raise NotOfferedError("a prompt of embeddings")
    lora = request.lora_request
    return RequestKeys(
        lora_name=None if lora is None else lora.lora_name,
        lora_version="" if lora is None else lora.lora_path,
        salt=(request.cache_salt or "").encode(),
        media=tuple(
            MediaSpan(each.mm_position.offset, each.mm_position.length, each.identifier.encode())
            for each in request.mm_features
        ),
    )


class Names:
    """vLLM's hashes of blocks and the space's digests of the same blocks, of the requests that were seen."""

    def __init__(self, space: BlockSpace, hash_block_size: int) -> None:
        self._space = space
        self._size = hash_block_size
        self._requests: dict[int, Any] = {}
        self._digests: dict[tuple[bytes, int], bytes] = {}
        self._hashes: dict[tuple[bytes, int], bytes] = {}
        self._lengths: dict[tuple[bytes, int], int] = {}

    def see(self, request: Any) -> None:
        """Remember a request, whose hashes are computed as it grows."""
        self._requests[id(request)] = request

    def digest_of(self, block_hash: bytes, group: int) -> bytes | None:
        """Return the space's digest of the block with that hash in a group; None: no such block is known."""
        self._learn()
        return self._digests.get((block_hash, group))

    def hash_of(self, digest: bytes, group: int) -> bytes:
        """Return vLLM's hash of the block with that digest; the digest if it is not known."""
        self._learn()
        return self._hashes.get((digest, group), digest)

    def length_of(self, digest: bytes, group: int) -> int | None:
        """Return how many tokens the block with that digest ends behind; None if it is not known."""
        self._learn()
        return self._lengths.get((digest, group))

    def _learn(self) -> None:
        for request in self._requests.values():
            keys, tokens = keys_of(request), np.array(request.all_token_ids, np.int32)
            for group, rule in enumerate(self._space.config.groups):
                size, ahead = rule.block_size, getattr(rule, "num_ahead", 0)
                digests = hash_request_tokens(tokens, size, keys, num_ahead=ahead)
                for place, block_hash in enumerate(request.block_hashes, 1):
                    whole, inside = divmod(place * self._size, size)
                    if not inside and whole <= len(digests):
                        self._note(bytes(block_hash), group, digests[whole - 1], place * self._size)
                    elif inside and isinstance(rule, RecurrentState) and keys == RequestKeys():
                        parent = digests[whole - 1] if whole else ROOT_DIGEST
                        tail = tokens[whole * size : place * self._size]
                        self._note(bytes(block_hash), group, hash_block_tokens(parent, tail), place * self._size)

    def _note(self, block_hash: bytes, group: int, digest: bytes, length: int) -> None:
        self._digests[block_hash, group], self._hashes[digest, group] = digest, block_hash
        self._lengths[digest, group] = length


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block as vLLM's suites see it; every property asks the space."""

    block_id: int
    manager: "KVCacheManager" = field(repr=False)

    @property
    def is_null(self) -> bool:
        return self.block_id == NULL

    @property
    def ref_cnt(self) -> int:
        return 0 if self.is_null else int(self.manager.space.ref_counts()[self.block_id])

    @property
    def block_hash(self) -> Any:
        named = self.manager.named_blocks().get(self.block_id)
        if named is None:
            return None
        digest, group = named
        return make_block_hash_with_group_id(self.manager.names.hash_of(digest, group), group)

    _block_hash = block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        named = self.manager.named_blocks().get(self.block_id)
        return None if named is None else self.manager.names.length_of(*named)


class NumNames:
    """The number of named blocks."""

    def __init__(self, manager: "KVCacheManager") -> None:
        self._manager = manager

    def __len__(self) -> int:
        return len(self._manager.named_blocks())


class FreeBlocks:
    """The number of free blocks. Their order is the space's own affair."""

    def __init__(self, space: BlockSpace) -> None:
        self._space = space

    @property
    def num_free_blocks(self) -> int:
        return self._space.num_free_blocks()


class BlockPool:
    """The pool as the scheduler, connectors and suites use it."""

    def __init__(self, manager: "KVCacheManager", num_blocks: int) -> None:
        self._manager = manager
        self._held: dict[int, list[Any]] = {}
        self._leaving: list[tuple[list[int], int]] = []
        self.num_gpu_blocks, self.hash_block_size = num_blocks, manager.hash_block_size
        self.blocks = tuple(Block(number, manager) for number in range(num_blocks))
        self.null_block = self.blocks[NULL]
        self.free_block_queue = FreeBlocks(manager.space)
        self.cached_block_hash_to_block = NumNames(manager)

    def get_num_free_blocks(self) -> int:
        return self._manager.space.num_free_blocks()

    def get_usage(self) -> float:
        usable = self.num_gpu_blocks - 1
        return 1 - self.get_num_free_blocks() / usable if usable else 0

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: Sequence[int]) -> list[Block] | None:
        """Return the block with that hash in each group, or None if any group has none."""
        self._manager.go_on()
        found = []
        for group in kv_cache_group_ids:
            digest = self._manager.names.digest_of(bytes(block_hash), group)
            stored = None if digest is None else self._manager.space.stored_block(digest, group)
            if stored is None:
                return None
            found.append(self.blocks[stored.block_id])
        return found

    def leave_later(self, block_ids: Sequence[int], row: int) -> list[Block]:
        """Keep a row whose blocks the scheduler frees when a step is over."""
        ids = [number for number in block_ids if number != NULL]
        if not ids:
            self._manager.space.free([row])
            return []
        self._leaving.append((sorted(ids), row))
        return [self.blocks[number] for number in ids]

    def touch(self, blocks: Iterable[Block]) -> None:
        """Keep blocks for a reader."""
        self._manager.remove_skipped_blocks()  # what was allocated for this step is planned
        for block in blocks:
            self._held.setdefault(block.block_id, []).append(self._manager.space.hold([block.block_id]))

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Free the blocks of a row that was to leave, or release what a reader kept."""
        ids = sorted(block.block_id for block in ordered_blocks)
        for place, (of_row, row) in enumerate(self._leaving):
            if of_row == ids:
                del self._leaving[place]
                self._manager.space.free([row])
                return
        for number in ids:
            self._manager.space.release(self._held[number].pop())

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Withdraw content that is bad."""
        self._manager.space.withdraw(sorted(block_ids))

    def take_events(self) -> list[Any]:
        return self._manager.take_events()

    def reset_prefix_cache(self) -> bool:
        return self._manager.reset_prefix_cache()


class Tables(Mapping[str, list[Block]]):
    """The block tables of one group, by request."""

    def __init__(self, manager: "KVCacheManager", group: int) -> None:
        self._manager, self._group = manager, group

    def __getitem__(self, request_id: str) -> list[Block]:
        return self._manager.table(self._manager.rows[request_id].row, self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manager.rows)

    def __len__(self) -> int:
        return len(self._manager.rows)


class NumCached(Mapping[str, int]):
    """How many leading blocks of each request are named in one group."""

    def __init__(self, manager: "KVCacheManager", group: int) -> None:
        self._manager, self._group = manager, group

    def __getitem__(self, request_id: str) -> int:
        named = self._manager.named_blocks()
        table = self._manager.space.block_ids(self._manager.rows[request_id].row, self._group)
        return max((place for place, number in enumerate(table, 1) if number in named), default=0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manager.rows)

    def __len__(self) -> int:
        return len(self._manager.rows)


class GroupView:
    """One group as the scheduler and its suites look at it."""

    def __init__(self, manager: "KVCacheManager", group: int, spec: Any) -> None:
        self.kv_cache_spec, self.kv_cache_group_id = spec, group
        self.block_size = manager.space.config.groups[group].block_size
        self.block_pool = manager.block_pool
        self.dcp_world_size = self.block_size // spec.block_size
        self.req_to_blocks = Tables(manager, group)
        self.num_cached_block = NumCached(manager, group)
        self._null_block = manager.block_pool.null_block


class Groups:
    """What vLLM's scheduler asks of the groups together."""

    def __init__(self, manager: "KVCacheManager") -> None:
        self._manager = manager
        specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
        self.single_type_managers = tuple(GroupView(manager, index, spec) for index, spec in enumerate(specs))
        self.group_block_sizes = tuple(view.block_size for view in self.single_type_managers)
        self.block_pool = manager.block_pool
        self.enable_partial_hash_hits = manager.hits_inside
        self.retention_interval = manager.kv_cache_config.prefix_cache_retention_interval

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, **_others: object) -> int:
        """Count the blocks that a request lacks for so many tokens."""
        known = self._manager.rows.get(request_id)
        return self._manager.num_lacking(None if known is None else known.row, num_tokens)
