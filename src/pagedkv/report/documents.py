"""The documents of replays, curves and plans, as plain dicts, as reports read them.

These types name the fields that the report reads; other fields are ignored. docs/replay.md explains each field. The
module depends neither on the code that measures nor on the code that shows them, and imports only the standard library,
so that readers of files can check a document against these types without the ``report`` extra.

Texts on shared pages are shown without the folders of the machine that made them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NotRequired, TypedDict

QUOTED: Final = re.compile(r"'(?:~|[A-Za-z]:)?/(?:[^'/]+/)*([^'/]+)'")
BARE: Final = re.compile(r"(?<![\w.~/\\<-])(?:~|[A-Za-z]:)?/(?:[^\s/'\",;:<>]+/)*([^\s/'\",;:<>]+)")


def without_folders(text: str) -> str:
    """Remove folders from absolute paths and from those in a home; relative paths stay, since they name no home.

    >>> without_folders("pagedkv plan /home/me/trace.jsonl --cost-model=~/cost.json -o 'C:/my files/p.html'")
    "pagedkv plan trace.jsonl --cost-model=cost.json -o 'p.html'"
    >>> without_folders("runs/trace.jsonl by llama-3.1-8b/h100, 1/2 of it")
    'runs/trace.jsonl by llama-3.1-8b/h100, 1/2 of it'
    """
    return BARE.sub(r"\1", QUOTED.sub(r"'\1'", text))


class Requests(TypedDict):
    """Counts of requests and their tokens; in older documents all have content."""

    num_requests: int
    num_rejected: int
    num_finished: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_with_content: NotRequired[int]


class Hits(TypedDict):
    """Savings of prefix caching at the first admissions; ratios are None where no content is known."""

    num_prompt_blocks: int
    num_hit_blocks: int
    block_hit_ratio: float | None
    num_hit_tokens: int
    token_hit_ratio: float | None


class Misses(TypedDict):
    """Prompt tokens that did not hit at the first admissions, in all and by cause."""

    num_tokens: int
    by_cause: dict[str, int]


class Steps(TypedDict):
    """Steps, and the seconds of the virtual clock."""

    num_steps: int
    num_decode_steps: int
    virtual_s: float
    busy_s: float
    mean_sequences: float | None
    peak_sequences: int
    num_computed_tokens: int


class Contiguous(TypedDict):
    """Waste of contiguous memory for each sequence: of its final length, a power of two, the maximum length."""

    exact: float | None
    power_of_two: float | None
    maximum: float | None


class Waste(TypedDict):
    """Share of slots without a token. ``by_block_size``: by tokens, as text, as if no blocks were shared."""

    mean: float | None
    by_block_size: dict[str, float | None]
    contiguous: Contiguous
    max_length: int | None


class Preemptions(TypedDict):
    """Preempted requests, and the cost of preemption."""

    num_recompute: int
    num_swap: int
    num_recomputed_tokens: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int


class Sharing(TypedDict):
    """Share of the blocks that sequences of one request saved; None when none had more than one."""

    mean_saving: float | None
    num_decode_steps: int


class Percentiles(TypedDict):
    """Seconds; None if no request reached that point."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Latency(TypedDict):
    """From arrival to first admission, to the first token, to the end."""

    queueing_s: Percentiles
    first_token_s: Percentiles
    request_s: Percentiles


class Level(TypedDict):
    """Number of blocks over time: the mean weighted by seconds, and the peak."""

    mean: float | None
    peak: float | None


class AgeHistogram(TypedDict):
    """Blocks by age: the i-th number counts ages in (edge i-1, edge i] seconds; None: no upper edge."""

    upper_edges_s: list[float | None]
    num_blocks: list[int]


class Pool(TypedDict):
    """One pool of blocks: its size, its occupancy and its evictions."""

    num_blocks: int
    block_nbytes: int | None
    num_live: Level
    num_cached: Level
    num_free: Level
    num_evictions: int
    num_never_reused: int
    hits_by_age: AgeHistogram
    evictions_by_age: AgeHistogram


class PoolTimeline(TypedDict):
    """Mean number of blocks in each interval."""

    num_live: list[float]
    num_cached: list[float]
    num_free: list[float]


class Timeline(TypedDict):
    """Counts in each interval; all lists have one length, and may be empty."""

    time_s: list[float]
    duration_s: list[float]
    num_running: list[float]
    num_waiting: list[float]
    num_swapped: list[float]
    token_hit_ratio: list[float | None]
    pools: dict[str, PoolTimeline]


class Seconds(TypedDict):
    """The source of the seconds: the cost model, its origin, and the relative errors of a calibrated one."""

    cost_model_name: str
    in_short: str
    is_assumed: bool
    kind: str
    num_steps: int | None
    median: float | None
    p90: float | None


class MediumHits(TypedDict):
    """Hit tokens of first admissions that one medium brought, and their share of the prompt tokens."""

    num_tokens: int
    share: float


class TierCounts(TypedDict):
    """One tier: its loads, the loads left out since computing was predicted to be faster, and its bytes."""

    num_loads: int
    num_loaded_tokens: int
    mean_load_s: float | None
    num_computed_instead: int
    read_nbytes: int
    written_nbytes: int
    nbytes: int


class Tiers(TypedDict):
    """Tiers below the device: hits by medium, the device's included, and the counts of each tier."""

    hits: dict[str, MediumHits]
    media: dict[str, TierCounts]


class Replay(TypedDict):
    """The document of ``pagedkv replay --json``. Older documents lack the optional fields."""

    trace: str
    command: str
    config: dict[str, object]
    requests: Requests
    hits: Hits
    steps: Steps
    waste: Waste
    preemptions: Preemptions
    sharing: Sharing
    latency: Latency
    pools: dict[str, Pool]
    timeline: Timeline
    read_as: NotRequired[str]
    misses: NotRequired[Misses]
    warnings: NotRequired[list[str]]
    seconds: NotRequired[Seconds]
    by_tenant: NotRequired[list[dict[str, Any]]]
    by_window: NotRequired[list[dict[str, Any]]]
    busiest_window: NotRequired[str]
    quietest_window: NotRequired[str]
    tiers: NotRequired[Tiers]


class Gaps(TypedDict):
    """Shares of all references between a policy's hits and 1; by capacity (in blocks, as text)."""

    content_ceiling: float
    capacity_gap: dict[str, float]
    policy_gap: dict[str, dict[str, float]]


class Gain(TypedDict):
    """Gain of a multiple of a capacity (in blocks): shares of all references, by policy."""

    capacity: int
    factor: int
    by_policy: dict[str, float]


class BelowDevice(TypedDict):
    """Hits by policy, capacity and medium, with tiers below the device."""

    tiers: dict[str, dict[str, object]]
    hits: dict[str, dict[str, dict[str, int]]]


class Curve(TypedDict):
    """The document of ``pagedkv curve --json``. Older documents have no gains, no counts of answers, and no tiers."""

    block_size: int
    num_requests: int
    num_block_refs: int
    num_unique_blocks: int
    ideal_hits: int
    ideal_block_ratio: float
    ideal_token_ratio: float
    policies: dict[str, dict[str, int]]
    capacity_for: dict[str, int]
    gaps: Gaps
    gains: NotRequired[list[Gain]]
    num_answer_blocks: NotRequired[int]
    tiers: NotRequired[list[BelowDevice]]


@dataclass(frozen=True, slots=True)
class ReportRun:
    """One run as a report shows it.

    Args:
        name: shown on the page; any text.
        replay: its document.
        curve: hits by capacity of the same trace, or None.
        without_curve: the sentence shown in place of a missing curve.
    """

    name: str
    replay: Replay
    curve: Curve | None = None
    without_curve: str = "No capacity curve was measured for this run."


def has_known_content(replay: Replay) -> bool:
    """Return whether the trace has content, so that hits are known."""
    requests = replay["requests"]
    return requests.get("num_with_content", 1) > 0 or requests["num_requests"] == 0


def seconds_source(replay: Replay) -> str | None:
    """Return the cost model of the replay's seconds, and its origin; None if both are unknown."""
    seconds = replay.get("seconds")
    if seconds is not None:
        return f"{without_folders(seconds['cost_model_name'])}, {seconds['in_short']}"
    name = replay["config"].get("cost_model_name")
    return without_folders(str(name)) if name else None


class BesideDocument(TypedDict):
    """A run that a cluster is compared with: routing in turn, or one pool, whose hits alone are comparable."""

    name: str
    hit_ratio: float | None
    imbalance: float | None
    ttft_s: dict[str, float | None] | None


class PlanSettingDocument(TypedDict):
    """The load limit of a setting: the highest load that held, the lowest that did not or is undecided; its price."""

    choices: dict[str, str]
    held: float | None
    ended: float | None
    is_decided: bool
    sustained_per_s: float | None
    cost: dict[str, float | None] | None
    beside: list[BesideDocument]


class PlanPointDocument(TypedDict):
    """One setting under one load: its choices, and its figures (``PointFigures.as_dict``)."""

    choices: dict[str, str]
    load: float
    is_chosen: bool
    num_blocks: dict[str, int]
    kv_gib: float
    cost_model_name: str
    verdict: str
    binds: list[str]
    reason: str
    change: str
    figures: dict[str, Any]


class Plan(TypedDict):
    """All results: the decision, its basis, every point, and the parts of the chosen one."""

    trace: str
    command: str
    read_as: str
    model: str
    arrivals: str
    bounds: dict[str, float | None]
    seconds: Seconds
    loads: str
    prices: dict[str, float]
    warnings: list[str]
    need: dict[str, Any]
    headline: str
    reasons: list[str]
    chosen: dict[str, str]
    interval: dict[str, float | None] | None
    effects: list[dict[str, Any]]
    settings: list[PlanSettingDocument]
    points: list[PlanPointDocument]
    divided: dict[str, Any]


def traffic_of(figures: Mapping[str, Any]) -> float:
    """Return the good answers a second: by arrivals if the load holds, as in the headline; else over the whole run."""
    steady = figures["steadiness"]
    holds = steady["verdict"] == "holds"
    return float(steady["num_good"] / steady["measured_s"] if holds else figures["goodput_per_s"])
