"""Ends a command after an error: with one line on stderr, and an exit code by the kind of error.

====================================================  =========
cause                                                 exit code
====================================================  =========
an answer of an engine is wrong                       1
a bad trace, size, option, engine or output file      2
a model or a prompt that is refused                   2
an extra of pagedkv is not installed                  2
the engine of a server has ended by itself            3
Ctrl-C                                                130
SIGTERM                                               143
====================================================  =========

Anything else is a fault of this library and keeps its traceback.

The line has options in place of the library's names. The library does not use option names; its messages have
parameters in backquotes: ``give `num_host_blocks```, ```window=1h```, ```with_block_ids(trace.jsonl)```. A message that
refuses an argument begins with its parameter, without backquotes: ``block_size must be at least 1, got 0``. A command
passes all messages of the library, errors and notes, through :func:`as_typed`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import typer

from pagedkv.cli.interrupting import EXIT_USER_ERROR, INTERRUPTED_EARLY, exit_code_of
from pagedkv.errors import (
    ConfigurationError,
    DeviceUnavailableError,
    InterruptedRunError,
    MissingExtraError,
    OutputError,
    RecordingError,
    RequestError,
    TraceError,
    UnsupportedModelError,
)

NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})
USER_ERRORS: Final = (
    TraceError,
    ConfigurationError,
    OutputError,
    RecordingError,
    RequestError,
    UnsupportedModelError,
    DeviceUnavailableError,
    MissingExtraError,
)


@contextmanager
def reported(options: Mapping[str, str] = NO_OPTIONS) -> Iterator[None]:
    """Turn the errors above into a line on stderr and an exit code.

    Args:
        options: the options of the command as typed, by the names of their parameters.
    """
    try:
        yield
    except USER_ERRORS as error:
        message = as_typed(_in_one_line(error))  # without backquotes, a trace's words may be fields of the file
        text = _by_option(message, options) if isinstance(error, ConfigurationError) else message
        typer.echo(f"pagedkv: {text}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except MemoryError as error:
        typer.echo("pagedkv: not enough memory: use fewer or smaller blocks, or fewer sequences", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error
    except InterruptedRunError as error:
        typer.echo(f"pagedkv: {error}", err=True)
        raise typer.Exit(exit_code_of(error.__cause__)) from error
    except KeyboardInterrupt as error:
        typer.echo(f"pagedkv: {INTERRUPTED_EARLY}", err=True)
        raise typer.Exit(exit_code_of(error)) from error


def _by_option(message: str, options: Mapping[str, str]) -> str:
    """Replace Python's names, which the library's messages use, by options as typed."""
    for name, typed in options.items():
        if typed not in message:
            # A name of one word may be an ordinary word, except as the first word of a message.
            pattern = rf"(?<![\w'-]){name}(?![\w'])" if "_" in name else rf"^{name}(?= must )"
            message = re.sub(pattern, typed, message)
    return message


def _in_one_line(error: Exception) -> str:
    """Return a message without line ends and other control characters, which names of files may have."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in str(error))


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
        "open_loop": "--open",
        "patience_s": "--patience",
        "policies": "--eviction",
        "replay": "--replay",
        "replicas": "--replicas",
        "resamples": "--resamples",
        "rescan_s": "--tier-rescan",
        "salt": "--salt",
        "session_interval_s": "--session-interval",
        "skip_bad": "--skip-bad",
        "sorted_by_arrival": "--sort",
        "span_s": "--spread",
        "speculation": "--lookup",
        "starts_together": "--start-together",
        "tail_tokens": "--tail-tokens",
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
    return NAMED.sub(_in_options, message)


def _in_options(named: re.Match[str]) -> str:
    name, value, argument = named.groups()
    if argument is not None:
        return CALLS[name].format(argument) if name in CALLS else named[0]
    if name not in OPTIONS:
        return named[0]
    return OPTIONS[name] if value is None else f"{OPTIONS[name]} {value}"
