"""Options in place of the library's names: the library's messages have parameters in backquotes.

The library does not use option names: ``give `num_host_blocks```, ```window=1h```, ```with_block_ids(trace.jsonl)```. A
message that refuses an argument begins with its parameter, without backquotes: ``block_size must be at least 1, got
0``. A command passes all messages of the library, errors and notes, through :func:`as_typed`.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["CALLS", "OPTIONS", "as_typed"]

OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "EngineConfig.accept_differences": "--accept-differences",
        "LLM.draft_model": "--draft-model",
        "LLM.tokenizer": "a model whose folder has tokenizer files",
        "TokensPrompt": '--input FILE with {"token_ids": [...]}',
        "TraceReader.block_size": "--trace-block-size",
        "anonymized": "convert --anonymize",
        "answer_tokens_per_s": "--answer-speed",
        "arrivals": "--arrivals",
        "base": "--base",
        "beam_width": "--beams",
        "block_size": "--block-size",
        "chars_per_token": "--chars-per-token",
        "closed_loop": "--closed-loop",
        "columns": "--columns",
        "duration_s": "--seconds",
        "fields": "--fields",
        "has_shared_ids": "--shared-ids",
        "interval_s": "--metrics-interval",
        "keep_failed": "--keep-failed",
        "kv_dtype": "--kv-dtype",
        "limit": "--limit",
        "max_batched_tokens": "--max-batched-tokens",
        "max_messages": "--limit",
        "max_sequences": "--max-sequences",
        "memory": "--memory",
        "num_blocks": "--num-blocks",
        "num_draft_tokens": "--draft-tokens",
        "num_host_blocks": "--host-blocks",
        "num_samples": "--samples",
        "patience_s": "--patience",
        "policies": "--eviction",
        "replay": "--replay",
        "replicas": "--replicas",
        "rescan_s": "--tier-rescan",
        "salt": "--salt",
        "session_interval_s": "--session-interval",
        "skip_bad": "--skip-bad",
        "sorted_by_arrival": "--sort",
        "span_s": "--spread",
        "speculation": "--lookup",
        "starts_together": "--start-together",
        "tenant_by": "--tenant-by",
        "tiers": "--tier",
        "time_unit": "--time-unit",
        "tokenizer": "--tokenizer",
        "topic": "--topic",
        "tpot_s": "--tpot",
        "ttft_s": "--ttft",
        "utc_offset_h": "--utc-offset",
        "window": "--window",
    }
)
"""The typed form of a parameter, or of a function without its arguments."""

CALLS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sorted_by_arrival": "--sort; or, once for several commands, pagedkv convert {} --sort -o sorted.jsonl.gz",
        "with_block_ids": "pagedkv convert {} --block-size 16 -o with-ids.jsonl.gz",
    }
)
"""The typed form of a function of one argument."""

NAMED: Final = re.compile(r"`([A-Za-z_][\w.]*)(?:=([^`]*)|\(([^`]*)\))?`")

REFUSED: Final = re.compile(r"\w+(?= must be )")


def as_typed(message: str) -> str:
    """Replace the library's parameters by options; other words in backquotes are unchanged.

    >>> as_typed("give `num_host_blocks`, as in `num_blocks=100`")
    'give --host-blocks, as in --num-blocks 100'
    >>> as_typed("block_size must be at least 1, got 0")
    '--block-size must be at least 1, got 0'
    """
    refused = REFUSED.match(message)
    if refused is not None and refused[0] in OPTIONS:
        message = OPTIONS[refused[0]] + message[refused.end() :]
    return NAMED.sub(_typed, message)


def _typed(named: re.Match[str]) -> str:
    name, value, argument = named.groups()
    if argument is not None:
        return CALLS[name].format(argument) if name in CALLS else named[0]
    if name not in OPTIONS:
        return named[0]
    return OPTIONS[name] if value is None else f"{OPTIONS[name]} {value}"
