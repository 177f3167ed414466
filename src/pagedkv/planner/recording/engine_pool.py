"""The cache of a running engine, as it tells it itself: for a plan that begins with what is there.

vLLM tells it in ``vllm:cache_config_info`` of ``/metrics`` and in ``/v1/models``, SGLang in ``/get_server_info``. An
engine of several data-parallel ranks has a cache in each; the smallest counts.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pagedkv.errors import RecordingError
from pagedkv.planner.recording.metrics import CACHE_CONFIG, fetch_page, parse_exposition, plain_name

KV_DTYPES: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "": None,
        "auto": None,
        "bfloat16": "bf16",
        "bf16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "fp16": "fp16",
        "float32": "fp32",
        "float": "fp32",
        "fp32": "fp32",
    }
)
NEEDED: Final = "Name the address of an engine of vLLM or SGLang, as in http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class EnginePool:
    """The cache of one engine.

    Args:
        model: the model's folder or name.
        num_blocks: blocks of one rank.
        block_size: tokens of a block.
        kv_dtype: type of keys and values, as of :func:`pagedkv.models.read_model`; None: the model's own.
    """

    model: str
    num_blocks: int
    block_size: int
    kv_dtype: str | None

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return self.num_blocks * self.block_size


def read_engine(url: str, fetch: Callable[[str], str] = fetch_page) -> EnginePool:
    """Ask an engine for its cache, by at most three requests.

    Args:
        url: its address, without a path.
        fetch: returns the text of a page.

    Raises:
        ConfigurationError: the address is invalid.
        RecordingError: it does not answer, or tells no cache; the message has what was seen.
    """
    url = url.rstrip("/")
    try:
        return _vllm_pool(url, fetch)
    except RecordingError as seen:
        try:
            return _sglang_pool(url, fetch)
        except RecordingError as other:
            raise RecordingError(url, f"{seen.reason}; /get_server_info: {other.reason}", NEEDED) from seen


def _vllm_pool(url: str, fetch: Callable[[str], str]) -> EnginePool:
    page = f"{url}/metrics"
    pools = [sample.labels for sample in parse_exposition(fetch(page), page) if plain_name(sample.name) == CACHE_CONFIG]
    if not pools:
        raise RecordingError(page, f"has no {CACHE_CONFIG}", NEEDED)
    models = _object(f"{url}/v1/models", fetch).get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    model = str(first.get("root") or first.get("id") or "")
    found = [
        EnginePool(
            model,
            _count(page, labels, "num_gpu_blocks"),
            _count(page, labels, "block_size"),
            _kv_dtype(page, labels.get("cache_dtype", "")),
        )
        for labels in pools
    ]
    return min(found, key=lambda pool: pool.num_tokens)


def _sglang_pool(url: str, fetch: Callable[[str], str]) -> EnginePool:
    page = f"{url}/get_server_info"
    info = _object(page, fetch)
    size = _count(page, info, "page_size")
    tokens = min((_count(page, each, "max_total_num_tokens") for each in _with_tokens(info)), default=0)
    if not tokens:
        raise RecordingError(page, "has no max_total_num_tokens", NEEDED)
    kv_dtype = _kv_dtype(page, str(info.get("kv_cache_dtype", "")))
    return EnginePool(str(info.get("model_path", "")), tokens // size, size, kv_dtype)


def _kv_dtype(page: str, told: str) -> str | None:
    """Return the type that an engine's word stands for."""
    if told.startswith("fp8"):
        return "fp8"
    if told not in KV_DTYPES:
        raise RecordingError(page, f"keys and values are {told!r:.40}, a type that is not known here", NEEDED)
    return KV_DTYPES[told]


def _with_tokens(info: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what tells a number of tokens: the server, or each of its schedulers."""
    states = info.get("internal_states")
    for each in (info, *(states if isinstance(states, list) else ())):
        if isinstance(each, dict) and "max_total_num_tokens" in each:
            yield each


def _object(page: str, fetch: Callable[[str], str]) -> dict[str, Any]:
    text = fetch(page)
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise RecordingError(page, f"{text!r:.60} is no JSON", NEEDED) from problem
    if not isinstance(found, dict):
        raise RecordingError(page, f"{text!r:.60} is no JSON object", NEEDED)
    return found


def _count(page: str, told: Any, name: str) -> int:  # noqa: ANN401 - labels are texts, JSON has numbers
    """Return a number above 0 that an engine tells."""
    value = str(told.get(name, ""))
    if not value.isdecimal() or not int(value):
        raise RecordingError(page, f"{name} is {value!r:.40}, no number above 0", NEEDED)
    return int(value)
