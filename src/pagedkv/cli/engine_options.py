"""The options of the commands that run an engine, and the prompts of ``pagedkv generate``.

A line of a file of prompts is a text, or an object with one of ``prompt`` (a text), ``token_ids`` and ``messages``, and
fields of SamplingParams that override the options::

    {"prompt": "The red kite is in", "max_tokens": 8}
    {"messages": [{"role": "user", "content": "Where is the red kite?"}], "n": 2}
    {"token_ids": [5, 17, 256]}
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from pagedkv.cli import options as opt
from pagedkv.cli.options import flag, option, parse_blocks, parse_gib, parse_share
from pagedkv.contract.arguments import as_choice
from pagedkv.contract.extras import needing
from pagedkv.contract.space_config import DEFAULT_EVICTION, EVICTION_POLICIES
from pagedkv.errors import ConfigurationError, RequestError, TraceError
from pagedkv.models.memory import GIB
from pagedkv.tiers import Admission, ObjectBody, RedisBody, Tier, parse_codec, parse_tier

if TYPE_CHECKING:
    from pagedkv.engine import EngineConfig
DEFAULT_MEMORY: Final = "512MiB"
OWN_PACKAGES: Final = MappingProxyType({RedisBody.medium: "redis", ObjectBody.medium: "obstore"})
"""Packages that tiers of a medium need beside that of checks."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options, as typed."""

    memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Memory for keys and values: 8, 8GiB, or 90%, of what is free once the model is loaded. Default: 512MiB; "
            "where a model is served, 90% on a GPU, 25% on a CPU.",
            panel=opt.MEMORY,
        ),
    ] = None
    num_blocks: Annotated[
        str | None,
        option(
            "N",
            "Blocks of each pool, or pool by pool: full=1000,window_1024=200. Default: what --memory holds.",
            panel=opt.MEMORY,
        ),
    ] = None
    block_size: opt.BlockSize = 16
    max_length: Annotated[
        int | None, option("N", "Tokens of the longest sequence. Default: the model's.", panel=opt.MEMORY)
    ] = None
    max_sequences: opt.MaxSequences = 64
    max_batched_tokens: opt.MaxBatchedTokens = 2048
    eviction: opt.EvictionName = DEFAULT_EVICTION
    tail_tokens: opt.TailTokens = 2048
    lookup: Annotated[
        int,
        option(
            "N", "Guess up to N tokens a step from repetitions in the prompt and the answer; answers stay the same."
        ),
    ] = 0
    draft_model: Annotated[
        str | None,
        option("PATH|ID", "A smaller model of the same vocabulary that guesses tokens; answers stay the same."),
    ] = None
    draft_tokens: Annotated[int, option("N", "Tokens that --draft-model guesses a step. Default: 4.")] = 0
    overlap: Annotated[
        bool | None,
        flag("Schedule each step while the one before it runs. Default: on a GPU.", "--overlap/--no-overlap"),
    ] = None
    compile_model: Annotated[
        bool | None,
        flag("Compile the model's layers. Default: on a GPU, where they can be.", "--compile/--no-compile"),
    ] = None
    accept_differences: Annotated[
        bool, flag("Go on where the self-test finds other answers than the model's own: they may be wrong.")
    ] = False
    tier: Annotated[
        list[str] | None,
        option(
            "TIER",
            "Keep cached blocks beside the device: host:16GiB, folder:PATH:200GiB, redis://HOST:PORT/DB, "
            "s3://BUCKET/PATH; may be given again, the fastest first.",
            panel=opt.MEMORY,
        ),
    ] = None

    tier_admission: Annotated[
        str | None,
        option(
            "RULE",
            "What each --tier stores. always: all that is computed (default); second-offer: what is computed twice; "
            "before-eviction: what the device is about to evict.",
            panel=opt.MEMORY,
        ),
    ] = None
    tier_codec: Annotated[
        str | None,
        option(
            "CODEC",
            "How each --tier writes: none (default), zstd, zstd:LEVEL, aes-gcm:file:PATH or aes-gcm:command:LINE with "
            "a key; fp8-e4m3, which changes answers.",
            panel=opt.MEMORY,
        ),
    ] = None
    tier_rescan: Annotated[
        float | None,
        option(
            "S",
            "Seconds between scans of --tier for entries of other processes; 0: never. "
            "Default: 30 with --replicas, else never.",
            panel=opt.MEMORY,
        ),
    ] = None

    def require_valid(self) -> None:
        """Refuse what can be known to be wrong before torch is imported. Raises as :meth:`config`."""
        if self.draft_tokens and self.draft_model is None:
            raise ConfigurationError("--draft-tokens needs --draft-model: the model that guesses them")
        if self.memory is not None:
            _parse_memory(self.memory)
        if self.num_blocks is not None:
            parse_blocks(self.num_blocks)
        as_choice(self.eviction, EVICTION_POLICIES, "--eviction")
        self._tiers()

    def config(self, default_memory: str = DEFAULT_MEMORY) -> "EngineConfig":
        """Configure an engine.

        Args:
            default_memory: where --memory is not given.

        Raises:
            ConfigurationError: an option is out of range.
            MissingExtraError: torch, transformers, or a package of the tiers is not installed.
        """
        from pagedkv.engine import EngineConfig, PromptLookup  # noqa: PLC0415 - other commands need no torch
        from pagedkv.engine.drafter import DEFAULT_DRAFT_TOKENS  # noqa: PLC0415 - as above

        return EngineConfig(
            block_size=self.block_size,
            **_parse_memory(default_memory if self.memory is None else self.memory),
            num_blocks=None if self.num_blocks is None else parse_blocks(self.num_blocks),
            max_sequences=self.max_sequences,
            max_batched_tokens=self.max_batched_tokens,
            max_tokens=self.max_length,
            eviction=self.eviction,
            tail_tokens=self.tail_tokens,
            speculation=PromptLookup(self.lookup) if self.lookup else None,
            num_draft_tokens=0 if self.draft_model is None else self.draft_tokens or DEFAULT_DRAFT_TOKENS,
            overlap=self.overlap,
            compile_model=self.compile_model,
            accept_differences=self.accept_differences,
            tiers=self._tiers(),
        )

    def _tiers(self) -> tuple[Tier, ...]:
        """Return the tiers. Raises ConfigurationError, MissingExtraError."""
        tiers = tuple(map(parse_tier, self.tier or ()))
        _require_packages(tiers)
        if self.tier_admission is not None:
            if not tiers:
                raise ConfigurationError("--tier-admission needs a --tier")
            tiers = tuple(replace(each, admission=cast("Admission", self.tier_admission)) for each in tiers)
        if self.tier_codec is not None:
            if not tiers:
                raise ConfigurationError("--tier-codec needs a --tier")
            codec = parse_codec(self.tier_codec)
            codec.require_packages()
            tiers = tuple(replace(each, codec=codec) for each in tiers)
        if self.tier_rescan is None:
            return tiers
        if not any(each.is_shared for each in tiers):
            raise ConfigurationError("--tier-rescan needs a --tier that other processes may share, such as folder:...")
        return tuple(replace(each, rescan_s=self.tier_rescan) if each.is_shared else each for each in tiers)


def _parse_memory(text: str) -> dict[str, Any]:
    """Return the field of an engine's configuration for a size or a share. Raises ConfigurationError."""
    if not text.strip().endswith("%"):
        return {"kv_nbytes": int(parse_gib(text) * GIB)}
    share = parse_share(text, "--memory")
    if not share:
        raise ConfigurationError("--memory must be over 0%: a share of the memory that is free, such as 90%")
    return {"kv_share": share}


def _require_packages(tiers: Iterable[Tier]) -> None:
    """Import what the tiers need, before a model is loaded. Raises MissingExtraError."""
    for tier in tiers:
        with needing("tiers", "--tier"):
            import_module("xxhash")
            if tier.medium in OWN_PACKAGES:
                import_module(OWN_PACKAGES[tier.medium])


if TYPE_CHECKING:
    from pagedkv.engine import SamplingParams
KINDS: Final = ("prompt", "token_ids", "messages")
REMEDY: Final = (
    'Each line must be a text in quotes, or an object with one of "prompt", "token_ids" and "messages", as '
    '{"prompt": "...", "max_tokens": 8}'
)


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt, and its sampling parameters.

    Args:
        where: place of the prompt, for errors.
        prompt: a text, token ids or messages.
        params: its sampling parameters.
    """

    where: str
    prompt: Any
    params: "SamplingParams"


def typed_prompts(prompts: Sequence[str], params: "SamplingParams", *, is_chat: bool) -> Iterator[PromptRequest]:
    """Yield the prompts of the command line; with ``is_chat`` each is a user's message."""
    for number, prompt in enumerate(prompts, 1):
        yield PromptRequest(f"--prompt {number}", [{"role": "user", "content": prompt}] if is_chat else prompt, params)


class PromptFile:
    """A file of prompts, read whole; its lines are interpreted later, when the default parameters are known.

    Raises:
        TraceError: the file cannot be read, or has no prompt. The message has file, line, reason and remedy.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = f"cannot be read: {getattr(problem, 'strerror', None) or problem}"
            raise TraceError(self._path, None, reason, "Name a file of JSON lines in UTF-8") from problem
        self._lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if not self._lines:
            raise TraceError(self._path, None, "has no prompt", REMEDY)

    def requests(self, params: "SamplingParams") -> list[PromptRequest]:
        """Make a prompt from each line, with ``params`` where the line does not override them. Raises TraceError."""
        return [_prompt_request(self._path, number, line, params) for number, line in self._lines]


def _prompt_request(path: str, number: int, line: str, params: "SamplingParams") -> PromptRequest:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise TraceError(path, number, f"is no JSON ({problem})", REMEDY) from problem
    if isinstance(row, str):
        return PromptRequest(where, row, params)
    kinds = [kind for kind in KINDS if isinstance(row, dict) and kind in row]
    if len(kinds) != 1:
        found = f"has {', '.join(kinds)}" if kinds else "has no prompt"
        raise TraceError(path, number, found if isinstance(row, dict) else f"is {line[:40]!r}", REMEDY)
    prompt = row.pop(kinds[0])
    if not isinstance(prompt, str if kinds[0] == "prompt" else list):
        raise TraceError(path, number, f'"{kinds[0]}" is {json.dumps(prompt)[:40]}', REMEDY)
    known = {each.name for each in fields(params)}
    if row.keys() - known:
        strange = ", ".join(sorted(row.keys() - known))
        raise TraceError(path, number, f"has unknown fields: {strange}", f"Known fields: {', '.join(sorted(known))}")
    try:
        return PromptRequest(where, prompt, replace(params, **row))
    except (RequestError, TypeError) as problem:
        raise TraceError(path, number, str(problem), "Change it, or leave it to the options") from problem
