"""Whatever a configuration is given: it is built, or an error of ours. Every field of every one that is public."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from pagedkv import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    MediaSpan,
    RecurrentState,
    Replay,
    RequestKeys,
    SlidingWindow,
    SpaceConfig,
    TenantLimits,
    hash_block_tokens,
    hash_request_tokens,
)
from pagedkv.blocks.eviction.registry import POLICIES
from pagedkv.contract.space_config import EVICTION_POLICIES
from pagedkv.engine import EngineConfig, Intent, PromptLookup, SamplingParams
from pagedkv.errors import ConfigurationError
from pagedkv.scheduling import Breakpoint, CacheIntent, SchedulingConfig
from pagedkv.simulation import ServingConfig, SimulatedTier
from tests.odd_arguments import calls_of, outcome, parameters_of

SPACE: Final[dict[str, object]] = {
    "groups": (FullAttention(4),),
    "num_blocks": 20,
    "num_host_blocks": 5,
    "max_sequences": 4,
    "max_tokens": 40,
    "watermark": 0.01,
    "prefix_caching": True,
    "shed_windows": True,
    "retention_interval": 0,
    "min_partial_hit": 0,
    "in_order": False,
    "events": False,
    "max_events": 9,
    "receipts": False,
    "explain": False,
    "ghosts_per_block": 4,
    "leases": False,
    "tenants": None,
    "eviction": "lru",
    "tail_tokens": 64,
    "weights_epoch": "",
    "max_epoch_lag": 0,
}
COMMON: Final[dict[str, object]] = {"block_size": 4, "pool": "device", "prefix_caching": True}
STATE: Final[dict[str, object]] = {"checkpoint_interval": 4, "max_checkpoints": None, "num_draft_states": 0}
LISTED: Final[dict[str, object]] = {
    "token_ids": [1, 2, 3],
    "block_size": 1,
    "keys": RequestKeys(),
    "weights_epoch": "",
    "num_ahead": 0,
}
ENGINE: Final[dict[str, object]] = {
    "block_size": 4,
    "checkpoint_interval": 8,
    "kv_nbytes": 2**20,
    "kv_share": None,
    "kv_at_first": None,
    "kv_dtype": "auto",
    "kv_scales": None,
    "mean_tokens": 100,
    "num_blocks": None,
    "num_host_blocks": 0,
    "max_sequences": 4,
    "max_batched_tokens": 8,
    "max_tokens": None,
    "preemption": "recompute",
    "prefix_caching": True,
    "min_partial_hit": 0,
    "watermark": 0.01,
    "eviction": "lru",
    "weights_epoch": "",
    "max_epoch_lag": 0,
    "beyond_context": "refuse",
    "self_test": True,
    "accept_differences": False,
    "warm_up": True,
    "capture_steps": True,
    "compile_model": False,
    "absorb_latents": None,
    "overlap": False,
    "speculation": None,
    "predicted_tokens": 0,
    "num_draft_tokens": 4,
    "leases": False,
    "events": False,
    "tenants": None,
    "seed": 0,
    "tail_tokens": 0,
    "adapters": {},
    "tiers": (),
}
SCHEDULING: Final[dict[str, object]] = {
    "max_sequences": 4,
    "max_batched_tokens": 8,
    "preemption": "recompute",
    "first_promise": 4,
    "most_drafts": 0,
    "publishes_answers": True,
    "overlap": False,
}
SERVING: Final[dict[str, object]] = {
    "num_blocks": 20,
    "block_size": 4,
    "groups": None,
    "block_nbytes": {},
    "model": None,
    "cost_model_name": None,
    "num_host_blocks": 0,
    "max_sequences": 4,
    "max_batched_tokens": 8,
    "watermark": 0.01,
    "eviction": "lru",
    "preemption": "recompute",
    "num_samples": None,
    "beam_width": None,
    "load": 1.0,
    "seed": 0,
    "max_length": None,
    "tenants": None,
    "overlap": False,
    "tail_tokens": 0,
    "tiers": (),
}
TIER: Final[dict[str, object]] = {
    "medium": "disk",
    "nbytes": 2**30,
    "bandwidth": 3e9,
    "latency_s": 0.1,
    "admission": "always",
    "loads": "if-faster",
    "deadline_s": 2.0,
}
INTENT: Final[dict[str, object]] = {
    "tenant": None,
    "keep_for_s": None,
    "breakpoints": (),
    "retention": 0,
    "publish": "all",
}
SAMPLING: Final[dict[str, object]] = {
    name: parameter.default if isinstance(parameter.default, int | float | bool | tuple | None) else {}
    for name, parameter in parameters_of(SamplingParams).items()
}

GOOD: Final[Mapping[str, tuple[Callable[..., Any], dict[str, object]]]] = {
    "SpaceConfig": (SpaceConfig, SPACE),
    "FullAttention": (FullAttention, {**COMMON, "num_ahead": 1}),
    "SlidingWindow": (SlidingWindow, {**COMMON, "window": 8, "num_sink_tokens": 0, "replay": None, "num_ahead": 1}),
    "ChunkedLocal": (ChunkedLocal, {**COMMON, "chunk_size": 8}),
    "CrossAttention": (CrossAttention, {"max_encoder_tokens": 20, "block_size": 4, "pool": "device"}),
    "RecurrentState": (RecurrentState, {**STATE, "pool": "state", "prefix_caching": True}),
    "Replay": (Replay, {"num_tokens": 8, "num_layers": 1}),
    "TenantLimits": (TenantLimits, {"cap": None, "floor": 0}),
    "RequestKeys": (RequestKeys, {"lora_name": "a", "lora_version": "1", "salt": b"", "media": ()}),
    "MediaSpan": (MediaSpan, {"start": 0, "num_tokens": 1, "digest": b"1"}),
    "hash_request_tokens": (hash_request_tokens, LISTED),
    "hash_block_tokens": (
        hash_block_tokens,
        {"parent_digest": bytes(32), "token_ids": [1, 2], "extra_keys": b""},
    ),
    "EngineConfig": (EngineConfig, ENGINE),
    "Breakpoint": (Breakpoint, {"num_tokens": 8, "keep_for_s": 1.5}),
    "CacheIntent": (CacheIntent, INTENT),
    "Intent": (
        Intent,
        {
            **INTENT,
            "salt": b"a",
            "priority": 0,
            "replaces": None,
            "prediction": (),
            "answered": (),
            "adapter": None,
        },
    ),
    "PromptLookup": (PromptLookup, {"num_tokens": 4, "max_ngram": 3, "min_ngram": 1}),
    "SamplingParams": (SamplingParams, SAMPLING),
    "SchedulingConfig": (SchedulingConfig, SCHEDULING),
    "ServingConfig": (ServingConfig, SERVING),
    "SimulatedTier": (SimulatedTier, TIER),
}

LARGE: Final = frozenset({"wrapped", "wrapped int64", "int64 + 1"})
FREE: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "EngineConfig": {"kv_nbytes": LARGE, "seed": LARGE},
    "SamplingParams": {"seed": LARGE},
    "ServingConfig": {"seed": LARGE},
    "SimulatedTier": {"nbytes": LARGE},
}
"""Numbers that are not kept as int32."""


@pytest.mark.parametrize("name", GOOD)
def test_odd_values_get_an_error_of_ours(name: str) -> None:
    build, good = GOOD[name]
    build(**good)
    assert good.keys() == parameters_of(build).keys()
    complaints = []
    for call in calls_of(build, FREE.get(name, {})):
        _, told = outcome(call, build, good)
        complaints += [told] if told else []
    assert not complaints, "\n".join(complaints)


def test_the_names_of_eviction_policies_are_those_of_the_registry() -> None:
    """A configuration knows the names without what they stand for, which lies floors above it."""
    assert tuple(POLICIES) == EVICTION_POLICIES


@pytest.mark.parametrize("eviction", ["nonsense", "", "LRU", None, 3, ["lru"]])
def test_an_eviction_policy_that_is_not_there_is_refused_by_the_configuration(eviction: Any) -> None:  # noqa: ANN401
    for build, name in ((SpaceConfig, "SpaceConfig"), (EngineConfig, "EngineConfig")):
        with pytest.raises(
            ConfigurationError, match=r"eviction policy must be one of \('lru', 'adaptive', 'fifo', 'hazard'"
        ):
            build(**{**GOOD[name][1], "eviction": eviction})
