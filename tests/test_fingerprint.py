"""Fingerprints of configurations: the same everywhere, different where a device would do something else."""

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np

from pagedkv import (
    BlockSpace,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    RecurrentState,
    Replay,
    SlidingWindow,
    SpaceConfig,
    TenantLimits,
)
from pagedkv.contract.spec import GroupSpec
from pagedkv.fingerprint import difference, fingerprint
from pagedkv.plan_buffer import FINGERPRINT, NUM_GROUPS, read_fingerprint

CONFIG = SpaceConfig((FullAttention(4),), num_blocks=20, num_host_blocks=5, max_sequences=4, max_tokens=40)
MANY_GROUPS = SpaceConfig(
    (
        FullAttention(16),
        SlidingWindow(128, 16, num_sink_tokens=4, pool="window", replay=Replay(256, 2)),
        ChunkedLocal(64, 32, pool="chunk", prefix_caching=False),
        RecurrentState(256, prefix_caching=False, num_draft_states=3),
    ),
    num_blocks={"device": 100, "window": 50, "chunk": 30, "state": 20},
    max_sequences=8,
    max_tokens=2048,
)

# What a device does not see: these may differ between a space and the memory that carries out its plans.
UNSEEN = {
    "watermark": 0.5,
    "shed_windows": False,
    "retention_interval": 8,
    "min_partial_hit": 2,
    "events": True,
    "max_events": 7,
    "receipts": True,
    "explain": True,
    "ghosts_per_block": 1,
    "leases": True,
    "tenants": {"a": TenantLimits()},
    "eviction": "fifo",
    "tail_tokens": 7,
    "weights_epoch": 3,
    "max_epoch_lag": 0,
}
SEEN = {
    "groups": (FullAttention(2),),
    "num_blocks": 21,
    "num_host_blocks": 0,
    "max_sequences": 5,
    "max_tokens": 41,
    "prefix_caching": False,
    "in_order": True,
}


def test_fingerprints_are_golden() -> None:
    """Ranks compute theirs by themselves: on other machines, with other versions of Python."""
    assert fingerprint(CONFIG).hex() == "1c7df451820657bb81e8416734f1546b"
    assert fingerprint(MANY_GROUPS).hex() == "ba6722bba1142f368951042dd92874d7"


def test_every_setting_is_seen_by_a_device_or_is_not() -> None:
    assert {item.name for item in fields(SpaceConfig)} == UNSEEN.keys() | SEEN.keys()
    for name, value in SEEN.items():
        other = replace(CONFIG, **{name: value})  # type: ignore[arg-type]
        assert fingerprint(other) != fingerprint(CONFIG), name
        assert difference(CONFIG, other).startswith(f"{name} "), name
    for name, value in UNSEEN.items():
        other = replace(CONFIG, **{name: value})  # type: ignore[arg-type]
        assert (fingerprint(other), difference(CONFIG, other)) == (fingerprint(CONFIG), ""), name


RULES: list[GroupSpec] = [
    FullAttention(16),
    FullAttention(8),
    FullAttention(16, prefix_caching=False),
    FullAttention(16, pool="other"),
    FullAttention(16, num_ahead=1),
    SlidingWindow(64),
    SlidingWindow(65),
    SlidingWindow(64, num_sink_tokens=1),
    SlidingWindow(64, num_ahead=1),
    SlidingWindow(64, replay=Replay(64, 1)),
    SlidingWindow(64, replay=Replay(64, 2)),
    ChunkedLocal(64),
    ChunkedLocal(32),
    RecurrentState(16, pool="device"),
    RecurrentState(16, pool="device", max_checkpoints=1),
    RecurrentState(16, pool="device", num_draft_states=1),
]


ENCODERS: list[GroupSpec] = [CrossAttention(16, 4), CrossAttention(17, 4), CrossAttention(16, 8)]


def test_every_setting_of_a_group_is_seen() -> None:
    beside = FullAttention(4)
    configs = [
        SpaceConfig((rule, beside), num_blocks=dict.fromkeys(dict.fromkeys((rule.pool, "device")), 9)) for rule in RULES
    ]
    configs += [SpaceConfig((beside, rule), num_blocks=9) for rule in ENCODERS]
    assert len({fingerprint(config) for config in configs}) == len(RULES) + len(ENCODERS)


def test_one_number_and_a_mapping_say_the_same() -> None:
    int16: Any = np.int16(40)
    same = replace(CONFIG, num_blocks={"device": 20}, num_host_blocks={"device": 5}, max_tokens=int16)
    assert fingerprint(same) == fingerprint(CONFIG)


def test_a_plan_bears_the_fingerprint_of_its_space() -> None:
    for config in (CONFIG, MANY_GROUPS):
        plan = BlockSpace(config).plan_step()
        assert read_fingerprint(plan.buffer) == fingerprint(config)
        assert plan.buffer[FINGERPRINT:NUM_GROUPS].tobytes() == fingerprint(config)


def test_another_process_has_the_same_fingerprint() -> None:
    program = (
        "from pagedkv import FullAttention, SpaceConfig; from pagedkv.fingerprint import fingerprint;"
        "print(fingerprint(SpaceConfig((FullAttention(4),), num_blocks=20, num_host_blocks=5, max_sequences=4,"
        " max_tokens=40)).hex())"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == fingerprint(CONFIG).hex()
