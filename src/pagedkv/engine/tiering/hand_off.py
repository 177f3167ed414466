"""HandOff: where a prompt's blocks lie in shared tiers, for another engine, which goes on from there.

::

    engine A, which computes prompts           engine B, which decodes
    hand_over(prompt): flush, list    ----->   take_over(hand_off, prompt): compare the fingerprint, list
                                               generate(prompt): its blocks are loaded

The bytes go through a medium that both engines have: a folder, Redis, an object store. A hand-off has positions, the
fingerprint of the content and a digest of the prompt, and no tokens and no salt: the second engine computes the names
of the blocks from its own.
With a link on both sides (:mod:`~pagedkv.engine.tiering.nixl_link`) the bytes go from memory to memory instead,
and are in the second engine's cache when :func:`take_over_direct` returns.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.engine.tiering.content import StoredContent
from pagedkv.engine.tiering.nixl_link import NixlLink
from pagedkv.engine.tiering.open_tier import OpenTier
from pagedkv.engine.tiering.prefix_file import bring_frames, cached_frames
from pagedkv.errors import ConfigurationError
from pagedkv.space import BlockSpace
from pagedkv.tiers import RunChain
from pagedkv.tiers.entry_blocks import EntryLayout

__all__ = ["HandOff", "announce", "entries_of", "hand_over_direct", "take_over_direct"]

DOMAIN: Final = b"pagedkv prompt of a hand-off 1"
PRIVATE: Final = "host"
"""The medium that only its own process can read."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """The entries of one prompt in shared tiers. Its fields are plain values, which JSON has too.

    Args:
        fingerprint: of layout, weights and versions, as hexadecimal digits: equal where keys and values are.
        num_tokens: leading tokens of the prompt that can be loaded.
        run_tokens: tokens of a run.
        runs: by name of the tier: numbers of the stored runs, and their bytes.
        ends: by name of the tier: positions, in tokens, of the stored ends, and their bytes.
        media: by name of the tier: its medium.
        direct: where the frames of the prompt are in the memory of its engine, for a
            :class:`~pagedkv.engine.NixlLink`; None: they are in tiers.
        prompt: digest of these tokens with their salt, as hexadecimal digits; empty: unknown.
    """

    fingerprint: str
    num_tokens: int
    run_tokens: int
    runs: Mapping[str, Sequence[tuple[int, int]]]
    ends: Mapping[str, Sequence[tuple[int, int]]]
    media: Mapping[str, str]
    direct: Mapping[str, Any] | None = None
    prompt: str = ""


def hand_over_direct(
    link: NixlLink, content: StoredContent, space: BlockSpace, token_ids: Int32Array, keys: RequestKeys
) -> HandOff:
    """Offer the frames of what is cached of a prompt by a link; return where they are."""
    layout = EntryLayout(space.config.groups, content.nbytes)
    num_tokens, frames = cached_frames(content, space, token_ids, keys)
    direct = link.offer(list(frames)) if num_tokens else None
    fingerprint = content.identity(layout.blocks_per_run).fingerprint.hex()
    return HandOff(fingerprint, num_tokens, layout.run_tokens, {}, {}, {}, direct)


def take_over_direct(
    hand_off: HandOff,
    link: NixlLink,
    timeout_s: float,
    content: StoredContent,
    space: BlockSpace,
    token_ids: Int32Array,
    keys: RequestKeys,
) -> int:
    """Bring a hand-off from the memory of its engine into the cache; return how many leading tokens it has.

    Raises:
        ConfigurationError: the content or the prompt is another one, or the frames cannot be read; nothing is changed.
    """
    layout = EntryLayout(space.config.groups, content.nbytes)
    _require_same(hand_off, content.identity(layout.blocks_per_run).fingerprint)
    if hand_off.direct is None:
        return 0  # nothing was cached
    return bring_frames("the hand-off", link.fetch(hand_off.direct, timeout_s), content, space, keys, prompt=token_ids)


def entries_of(
    tiers: Sequence[OpenTier], layout: EntryLayout, chain: RunChain, fingerprint: bytes, num_tokens: int
) -> HandOff:
    """List the entries of a chain in all tiers but those in host memory.

    Args:
        tiers: the engine's tiers; layout: of entries.
        chain: the runs and ends of the prompt.
        fingerprint: of the engine's content.
        num_tokens: leading tokens that can be loaded.
    """
    shared = [tier for tier in tiers if tier.medium != PRIVATE]
    numbers = range(num_tokens // layout.run_tokens) if layout.has_runs else range(0)
    places = range(1, num_tokens // layout.block_size + 1) if layout.has_ends else range(0)
    return HandOff(
        fingerprint.hex(),
        num_tokens,
        layout.run_tokens,
        {tier.name: _there(tier, numbers, [chain.runs[number].key for number in numbers]) for tier in shared},
        {
            tier.name: _there(tier, [place * layout.block_size for place in places], list(map(chain.end_key, places)))
            for tier in shared
        },
        {tier.name: tier.medium for tier in shared},
        prompt=_digest_of(chain, num_tokens // layout.block_size),
    )


def announce(
    hand_off: HandOff, tiers: Sequence[OpenTier], layout: EntryLayout, chain: RunChain, fingerprint: bytes
) -> None:
    """List the entries of a hand-off in the tiers of the same name, or else in the only one of the same medium.

    Nothing is listed for another prompt, or under another salt: those entries are not there.

    Args:
        hand_off: of the other engine.
        tiers, layout, chain, fingerprint: of this one, as in :func:`entries_of`.

    Raises:
        ConfigurationError: the content is another one, the prompt is shorter, or there is no such tier.
    """
    _require_same(hand_off, fingerprint)
    if hand_off.num_tokens > chain.num_blocks * layout.block_size:
        raise ConfigurationError(
            f"the hand-off has {hand_off.num_tokens} tokens of its prompt, and this prompt has "
            f"{chain.num_blocks * layout.block_size} in whole blocks: pass the prompt that was handed over"
        )
    if hand_off.prompt and hand_off.prompt != _digest_of(chain, hand_off.num_tokens // layout.block_size):
        return
    for name, medium in hand_off.media.items():
        tier = _same_tier(name, medium, tiers)
        keys = [chain.runs[number].key for number, _ in hand_off.runs[name]]
        keys += [chain.end_key(place // layout.block_size) for place, _ in hand_off.ends[name]]
        tier.store.announce(keys, [nbytes for _, nbytes in (*hand_off.runs[name], *hand_off.ends[name])])


def _digest_of(chain: RunChain, num_blocks: int) -> str:
    """Digest a prompt up to a block, so that its blocks' names cannot be told from it."""
    return hashlib.sha256(DOMAIN + chain.end_key(num_blocks)).hexdigest()


def _require_same(hand_off: HandOff, fingerprint: bytes) -> None:
    if hand_off.fingerprint != fingerprint.hex():
        raise ConfigurationError(
            f"the hand-off has content of fingerprint {hand_off.fingerprint:.12}..., this engine "
            f"{fingerprint.hex():.12}...: both need the same weights, dtype, block size and versions"
        )


def _there(tier: OpenTier, places: Sequence[int], keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the places whose keys a tier has, and the bytes of their entries."""
    return [(place, nbytes) for place, nbytes in zip(places, tier.store.sizes_of(keys), strict=True) if nbytes]


def _same_tier(name: str, medium: str, tiers: Sequence[OpenTier]) -> OpenTier:
    same = [tier for tier in tiers if tier.name == name] or [tier for tier in tiers if tier.medium == medium]
    if len(same) != 1:
        raise ConfigurationError(
            f"the hand-off is in the tier {name!r}, and this engine has {[tier.name for tier in tiers]}: configure "
            "that tier, or one of its medium"
        )
    return same[0]
