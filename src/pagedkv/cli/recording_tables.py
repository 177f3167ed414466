"""The results of a recording, for humans and for programs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from pagedkv.cli.tables import print_numbers, print_table, print_warnings
from pagedkv.planner.recording.joining import JoinCounts
from pagedkv.planner.recording.metrics import EngineMetrics
from pagedkv.planner.recording.recorder import Ending, Recorder
from pagedkv.planner.recording.residency import LIFETIME_EDGES_S, MediumRecord

__all__ = ["print_recording", "recording_document", "recording_warnings"]

EVENTS_ALONE: Final = (
    "events show stored and removed blocks, never requests, hits or arrivals: without a request log (--log) there is "
    "no trace"
)
SHOWN_GAPS: Final = 5
MEDIAN: Final = 0.5
TAIL: Final = 0.9
UNKNOWN: Final = "unknown"


def recording_warnings(
    recorder: Recorder, ending: Ending | None, counts: JoinCounts | None, metrics: EngineMetrics | None
) -> list[str]:
    """List warnings about the figures; ``ending`` is None after a failure."""
    return [*_of_events(recorder, ending), *_of_log(counts), *_of_metrics(metrics)]


def recording_document(
    recorder: Recorder, ending: Ending | None, counts: JoinCounts | None, metrics: EngineMetrics | None
) -> dict[str, object]:
    """Return all figures as a JSON document; unknown ones are null."""
    residency, contents = recorder.residency, recorder.contents
    return {
        "began_s": recorder.began_s,
        "ended_s": recorder.ended_s,
        "rank": recorder.rank,
        "ended_by": "failure" if ending is None else ending.name.lower(),
        "messages": {
            "num_messages": recorder.num_messages,
            "num_asked_again": recorder.num_requested_again,
            "num_restarts": recorder.num_restarts,
            "num_snapshots": recorder.num_snapshots,
            "num_gaps": recorder.num_gaps,
            "gaps": [asdict(gap) for gap in recorder.gaps],
            "unknown_kinds": dict(recorder.unknown_kinds),
        },
        "blocks": {name: _medium_document(medium) for name, medium in sorted(residency.media.items())},
        "num_clears": residency.num_clears,
        "num_censored": residency.num_censored + residency.num_open,
        "content": {
            "num_by_block_size": {str(size): num for size, num in sorted(contents.num_by_block_size.items())},
            "num_unknown": contents.num_unknown,
            "num_with_keys": contents.num_with_keys,
            "num_with_lookahead": contents.num_with_lookahead,
        },
        "metrics": None if metrics is None else {**asdict(metrics), "token_hit_ratio": metrics.hit_ratio},
        "log": None if counts is None else asdict(counts),
        "warnings": recording_warnings(recorder, ending, counts, metrics),
    }


def print_recording(
    title: str, recorder: Recorder, ending: Ending | None, counts: JoinCounts | None, metrics: EngineMetrics | None
) -> None:
    """Print the results of a recording."""
    print_warnings(recording_warnings(recorder, ending, counts, metrics))
    print_table(title, _figures(recorder, counts))
    if recorder.residency.media:
        headings = ("medium", "stored", "removed", "at the end", "mean", "peak", "half removed in", "90% removed in")
        media = sorted(recorder.residency.media.items())
        print_numbers("Blocks", headings, [(name, *_cells(medium)) for name, medium in media])
    if metrics is not None:
        print_table("Metrics of the engine", _metric_rows(metrics))


def _of_events(recorder: Recorder, ending: Ending | None) -> Iterator[str]:
    if ending is Ending.GONE:
        yield f"the publisher disconnected after message {recorder.num_messages:,}; the results end there"
    if recorder.num_messages == 0:
        yield (
            "no message was received, so the cache is unknown: check that the engine serves requests, and that its "
            "topic begins with that of --topic; --replay requests earlier messages"
        )
    for gap in recorder.gaps[:SHOWN_GAPS]:
        which = f"message {gap.first:,} on" if gap.last is None else f"messages {gap.first:,} to {gap.last:,}"
        yield f"{which}: {gap.reason}; the content of the cache from there on is unknown until it is cleared"
    if recorder.num_gaps > SHOWN_GAPS:
        yield f"{recorder.num_gaps - SHOWN_GAPS:,} more gaps"
    if recorder.num_restarts:
        yield f"the engine was started again {recorder.num_restarts:,} times; each time its cache began empty"
    if recorder.unknown_kinds:
        kinds = ", ".join(f"{num:,} {kind[:40]}" for kind, num in sorted(recorder.unknown_kinds.items())[:SHOWN_GAPS])
        yield f"events of unknown kinds were skipped: {kinds}"
    if recorder.num_messages and not recorder.residency.was_exact:
        yield "the recording began in the middle, and the cache was not cleared: its occupancy is unknown"
    if recorder.contents.num_with_keys:
        yield (
            f"{recorder.contents.num_with_keys:,} blocks belong to adapters, salts or images, which a trace does not "
            "distinguish: equal tokens count as equal"
        )
    if recorder.contents.num_with_lookahead:
        yield (
            f"{recorder.contents.num_with_lookahead:,} blocks depend on the tokens after them, too: a prompt "
            "may hit one block less than its tokens suggest"
        )


def _of_log(counts: JoinCounts | None) -> Iterator[str]:
    if counts is None:
        yield EVENTS_ALONE
        return
    if counts.has_own_clock:
        yield "the log's times do not count from 1970: all of its requests are taken, whatever their times"
    if counts.num_outside:
        yield f"{counts.num_outside:,} of {counts.num_read:,} requests of the log arrived before or after the recording"
    if counts.num_without_content:
        yield f"the tokens of {counts.num_without_content:,} of {counts.num_taken:,} requests are unknown"
    if counts.num_blocks and not counts.num_stored:
        yield (
            "no event stored a block of the log's prompts: were they cached before, or are the log's tokens not the "
            "engine's (--tokenizer; marks of chat templates)?"
        )


def _of_metrics(metrics: EngineMetrics | None) -> Iterator[str]:
    if metrics is not None and metrics.num_failures:
        yield f"the metrics page could not be read {metrics.num_failures:,} times, last: {metrics.last_failure}"


def _figures(recorder: Recorder, counts: JoinCounts | None) -> Iterator[tuple[str, str]]:
    yield "began", _date(recorder.began_s)
    yield "ended", _date(recorder.ended_s)
    if recorder.rank is not None:
        yield "data-parallel rank", f"{recorder.rank}"
    again = f", {recorder.num_requested_again:,} of them requested again" if recorder.num_requested_again else ""
    yield "messages", f"{recorder.num_messages:,}{again}"
    yield "gaps", f"{recorder.num_gaps:,}"
    sizes = sorted(recorder.contents.num_by_block_size)
    yield "tokens a block", ", ".join(f"{size:,}" for size in sizes) or UNKNOWN
    yield "stored blocks of unknown content", f"{recorder.contents.num_unknown:,}"
    yield "blocks whose removal was not seen", f"{recorder.residency.num_censored + recorder.residency.num_open:,}"
    if counts is not None:
        yield "requests taken from the log", f"{counts.num_taken:,} of {counts.num_read:,}"
        if counts.num_blocks:
            ratio = counts.num_stored / counts.num_blocks
            yield (
                "blocks of their prompts that events stored",
                f"{ratio:.1%} ({counts.num_stored:,} of {counts.num_blocks:,})",
            )


def _date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _cells(medium: MediumRecord) -> tuple[str, ...]:
    return (
        f"{medium.num_stored:,}",
        f"{medium.num_removed + medium.num_removed_unseen:,}",
        f"{medium.num_blocks:,}",
        UNKNOWN if medium.mean is None else f"{medium.mean:,.1f}",
        UNKNOWN if medium.mean is None else f"{medium.peak:,}",
        _removed_within(medium, MEDIAN),
        _removed_within(medium, TAIL),
    )


def _removed_within(medium: MediumRecord, share: float) -> str:
    """Return the edge within which a share of the removed blocks were removed."""
    if not medium.num_removed:
        return UNKNOWN
    below = 0
    for edge_s, count in zip(LIFETIME_EDGES_S, medium.lifetimes, strict=False):
        below += count
        if below >= share * medium.num_removed:
            return f"<={edge_s:,g}s"
    return f">{LIFETIME_EDGES_S[-1]:,g}s"


def _medium_document(medium: MediumRecord) -> Mapping[str, object]:
    return {
        "num_stored": medium.num_stored,
        "num_copies": medium.num_copies,
        "num_removed": medium.num_removed,
        "num_removed_unseen": medium.num_removed_unseen,
        "num_blocks": medium.num_blocks,
        "mean": medium.mean,
        "peak": None if medium.mean is None else medium.peak,
        "exact_s": medium.seconds,
        "lifetimes": {"upper_edges_s": [*LIFETIME_EDGES_S, None], "num_blocks": medium.lifetimes},
        "timeline": {
            "time_s": [time_s for time_s, _ in medium.timeline],
            "num_blocks": [num_blocks for _, num_blocks in medium.timeline],
        },
    }


def _metric_rows(metrics: EngineMetrics) -> Iterator[tuple[str, str]]:
    yield "pages read", f"{metrics.num_pages:,}"
    ratio = metrics.hit_ratio
    hits, queries = metrics.gained.get("hits", 0.0), metrics.gained.get("queries", 0.0)
    hit_ratio = UNKNOWN if ratio is None else f"{ratio:.2%} ({hits:,.0f} of {queries:,.0f})"
    yield "hit ratio by token, of the engine", hit_ratio
    for name, heading in (("usage", "share of the cache in use"), ("running", "running"), ("waiting", "waiting")):
        if name in metrics.means:
            form = ".1%" if name == "usage" else ",.1f"
            yield f"{heading}, mean", format(metrics.means[name], form)
            yield f"{heading}, peak", format(metrics.peaks[name], form)
    if "preemptions" in metrics.gained:
        yield "preemptions", f"{metrics.gained['preemptions']:,.0f}"
    if metrics.num_blocks is not None:
        yield "blocks of the cache", f"{metrics.num_blocks:,}"
