"""The fingerprint of a configuration: by it a device knows the plans that are meant for its memory and its tables.

A plan is numbers of blocks, rows and entries. Where two spaces differ in block sizes, rows, groups or pools, the same
numbers name something else, and writes succeed all the same. So plans bear the fingerprint of their space
(:mod:`pagedkv.memory.contract.plan_buffer`), and storage, tables and executor compare it with that of the configuration
they were built from. It is the same in every process, and no part of it is drawn at random: ranks build theirs by
themselves.

Of a configuration counts what a device relies on. Which cached blocks go first, what is recorded, how much admissions
leave free, may differ: the plans are carried out in the same way.
"""

import hashlib
import json
from dataclasses import asdict
from typing import Final

from pagedkv.memory.contract.space_config import SpaceConfig

__all__ = ["FINGERPRINT_NBYTES", "difference", "fingerprint"]

FINGERPRINT_NBYTES: Final = 16


def fingerprint(config: SpaceConfig) -> bytes:
    """Digest what a device relies on: the leading 16 bytes of a SHA-256. O(groups), some 50 us."""
    written = json.dumps(_relied_on(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).digest()[:FINGERPRINT_NBYTES]


def difference(one: SpaceConfig, other: SpaceConfig) -> str:
    """Tell in what two configurations differ that a device relies on; nothing where they do not."""
    theirs = _relied_on(other)
    return "; ".join(
        f"{name} {mine!r} and {theirs[name]!r}" for name, mine in _relied_on(one).items() if mine != theirs[name]
    )


def _relied_on(config: SpaceConfig) -> dict[str, object]:
    """List by name what gives the numbers of a plan their meaning, and what order its steps keep."""
    return {
        "groups": [asdict(group) for group in config.groups],
        "num_blocks": config.blocks_by_pool(),
        "num_host_blocks": config.host_blocks_by_pool(),
        "max_sequences": config.max_sequences,
        "max_tokens": config.max_tokens,
        "prefix_caching": config.prefix_caching,
        "in_order": config.in_order,
    }
