"""Tiers as users write them: a medium, how much of it, and when it is read and written. An engine opens them.

>>> FolderTier("/var/cache/pagedkv", "200GiB").cap_nbytes == 200 * 2**30
True
>>> parse_tier("host:16GiB").name
'host'

Several tiers are looked up in the order in which they are given, so the fastest comes first.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

from pagedkv.contract.arguments import as_choice, as_count, as_number, require_instance
from pagedkv.contract.space_config import DEFAULT_EVICTION
from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import Body, HostBody, HostMemory, without_secrets
from pagedkv.tiers.codecs import NO_CODEC, Codec, parse_codec
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import require_secret
from pagedkv.tiers.object_body import ObjectBody
from pagedkv.tiers.redis_body import RedisBody
from pagedkv.tiers.words import MOST_NBYTES, StoreConfig

Admission: TypeAlias = Literal["always", "second-offer", "before-eviction"]
LoadRule: TypeAlias = Literal["if-faster", "always"]

BEFORE_EVICTION: Final = "before-eviction"
TIER_ADMISSIONS: Final = ("always", "second-offer", BEFORE_EVICTION)
LOAD_RULES: Final = ("if-faster", "always")
UNITS: Final = {
    "": 2**30,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]i?)b?|(b?))", re.IGNORECASE)
FEWEST_ENTRIES: Final = 64
MOST_ENTRIES: Final = 2**21
SPARE_ENTRIES: Final = 4
"""The index has room for a fourth more entries than whole runs fill the cap, since ends of prompts are shorter."""
FEWEST_QUEUED_NBYTES: Final = 2**28
QUEUED_ENTRIES: Final = 64
"""What is offered waits in a queue that has room for so many entries at least."""
REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
OBJECT_SCHEMES: Final = ("s3", "gs", "az", "azure", "abfs", "file", "memory", "http", "https")


def parse_nbytes(size: str | int, what: str = "a size") -> int:
    """Read a number of bytes: a whole number, or text such as "16GiB" or "200 GB". A number alone in a text is GiB.

    Raises:
        ConfigurationError: it is neither, or below 1 byte.

    >>> parse_nbytes("1.5KiB"), parse_nbytes("2 MB"), parse_nbytes("16") == parse_nbytes("16GiB"), parse_nbytes(4096)
    (1536, 2000000, True, 4096)
    """
    if isinstance(size, str):
        found = SIZE.fullmatch(size.strip())
        if found is None:
            raise ConfigurationError(
                f"{what} must be a size such as 16GiB or 500MB, or 16, which is GiB; got {size!r:.60}"
            )
        size = int(float(found[1]) * UNITS[(found[2] or found[3]).lower()])
    return as_count(size, what, least=1, most=MOST_NBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier(ABC):
    """What all tiers have in common; checked when built.

    Args:
        admission: "always" stores what requests have computed; "second-offer" stores it when it is offered for the
            second time, which writes less; "before-eviction" stores it when it is about to be evicted from the device.
        loads: "if-faster" loads where that is predicted to be faster than computing, by what both took so far;
            "always" loads whatever is there.
        deadline_s: longest time that a request waits for a load.
        floor_nbytes: bytes of the medium that stay free.
        eviction: the eviction policy, as in ``SpaceConfig.eviction``.
        secret: 32 bytes for keyed checks, where other tenants can write to the medium; None: xxh3-128.
        codec: how frames are written, as a codec or a text (:func:`parse_codec`): "none", "zstd", "fp8-e4m3",
            "aes-gcm:file:PATH".
        settings: further settings of the store (:class:`~pagedkv.tiers.StoreConfig`), by name.
        rescan_s: seconds between two scans for entries that other processes have stored in the same place while this
            one runs; 0: never. None: never, but every 30 seconds where a server runs replicas.

    Raises:
        ConfigurationError: a value is out of range.
    """

    admission: Admission = "always"
    loads: LoadRule = "if-faster"
    deadline_s: float = 2.0
    floor_nbytes: int = 0
    eviction: str = DEFAULT_EVICTION
    secret: bytes | None = field(default=None, repr=False)
    codec: Codec | str = NO_CODEC
    settings: Mapping[str, Any] = field(default_factory=dict)
    rescan_s: float | None = None

    def __post_init__(self) -> None:
        as_choice(self.admission, TIER_ADMISSIONS, "admission")
        as_choice(self.loads, LOAD_RULES, "loads")
        require_secret(self.secret)
        if isinstance(self.codec, str):
            object.__setattr__(self, "codec", parse_codec(self.codec))
        require_instance(self.codec, Codec, "codec")
        require_instance(self.settings, Mapping, "settings")
        if as_number(self.deadline_s, "deadline_s") <= 0:
            raise ConfigurationError(f"deadline_s must be above 0, got {self.deadline_s}")
        if self.rescan_s is not None and as_number(self.rescan_s, "rescan_s") < 0:
            raise ConfigurationError(f"`rescan_s` must be at least 0, got {self.rescan_s}")
        if self.rescan_s and not self.is_shared:
            raise ConfigurationError(f"a {self.medium} tier is of one process: leave out rescan_s={self.rescan_s}")
        self.store_config(1)

    @property
    def coding(self) -> Codec:
        """The codec."""
        assert isinstance(self.codec, Codec), "a text is read when the tier is made"
        return self.codec

    @property
    @abstractmethod
    def medium(self) -> str:
        """Name of the medium, in receipts and explanations."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The medium and where it is, without secrets, for messages."""

    @property
    @abstractmethod
    def cap_nbytes(self) -> int:
        """Most bytes of all entries. Raises ConfigurationError."""

    @property
    def host_nbytes(self) -> int:
        """Most bytes of entries that are in this process's memory."""
        return 0

    @property
    def is_shared(self) -> bool:
        """Whether other processes may store in the same place."""
        return True

    @abstractmethod
    def open_body(self, fingerprint: bytes, memory: HostMemory | None = None) -> Body:
        """Open the medium for the content of one identity.

        Args:
            fingerprint: of the identity.
            memory: where what is read is put; None: plain memory of the process.

        Raises:
            ConfigurationError: the medium does not answer.
        """

    def store_config(self, entry_nbytes: int) -> StoreConfig:
        """Return the settings of a store whose entries have about so many bytes. Raises ConfigurationError."""
        num_entries = self.cap_nbytes // entry_nbytes
        num_entries += num_entries // SPARE_ENTRIES
        settings = {
            "max_entries": max(FEWEST_ENTRIES, min(MOST_ENTRIES, num_entries)),
            "max_queued_nbytes": max(FEWEST_QUEUED_NBYTES, min(MOST_NBYTES, QUEUED_ENTRIES * entry_nbytes)),
            **self.settings,
        }
        try:
            return StoreConfig(
                cap_nbytes=self.cap_nbytes,
                floor_nbytes=self.floor_nbytes,
                eviction=self.eviction,
                admission="always" if self.admission == BEFORE_EVICTION else self.admission,
                **settings,
            )
        except TypeError as problem:
            raise ConfigurationError(f"settings of a tier must be those of a StoreConfig: {problem}") from problem


@final
@dataclass(frozen=True, slots=True)
class HostTier(Tier):
    """Host memory of the process. It ends with the process.

    Args:
        nbytes: most bytes, a number or text such as "16GiB".
    """

    nbytes: str | int

    @property
    def medium(self) -> str:
        """Name of the medium."""
        return HostBody.medium

    @property
    def name(self) -> str:
        """The medium."""
        return HostBody.medium

    @property
    def cap_nbytes(self) -> int:
        """Most bytes of all entries."""
        return parse_nbytes(self.nbytes, "the size of a host tier")

    @property
    def host_nbytes(self) -> int:
        """All of it."""
        return self.cap_nbytes

    @property
    def is_shared(self) -> bool:
        """It is not: the memory is of this process."""
        return False

    def open_body(self, fingerprint: bytes, memory: HostMemory | None = None) -> Body:
        """Make an empty body."""
        del fingerprint
        return HostBody(memory)


@final
@dataclass(frozen=True, slots=True)
class FolderTier(Tier):
    """A folder, on a local disk. What is stored is served after a restart, also to other processes of the same user.

    Args:
        path: the folder; made if it is not there.
        nbytes: most bytes, a number or text such as "200GiB", of all models that use the folder.
    """

    path: str | Path
    nbytes: str | int

    @property
    def medium(self) -> str:
        """Name of the medium."""
        return FolderBody.medium

    @property
    def name(self) -> str:
        """The medium and the folder."""
        return f"{FolderBody.medium} {self.path}"

    @property
    def cap_nbytes(self) -> int:
        """Most bytes of all entries."""
        return parse_nbytes(self.nbytes, "the size of a folder tier")

    def open_body(self, fingerprint: bytes, memory: HostMemory | None = None) -> Body:
        """Open the folder. Raises ConfigurationError if it is refused, or cannot be made or opened."""
        try:
            return FolderBody(self.path, fingerprint, self.cap_nbytes, memory=memory)
        except OSError as problem:
            raise ConfigurationError(f"the folder of a tier cannot be opened: {self.path}: {problem}") from problem


@final
@dataclass(frozen=True, slots=True)
class RedisTier(Tier):
    """A Redis server.

    Args:
        url: "redis://HOST:PORT/DB", "rediss://..." or "unix://...".
        nbytes: most bytes below the prefix, a number or text such as "64GiB".
        prefix: begins every name.
        timeout_s: of one call, connecting included.
    """

    url: str = field(repr=False)
    nbytes: str | int = "64GiB"
    prefix: str = "pagedkv"
    timeout_s: float = 2.0

    @property
    def medium(self) -> str:
        """Name of the medium."""
        return RedisBody.medium

    @property
    def name(self) -> str:
        """The medium and the server."""
        return f"{RedisBody.medium} {without_secrets(self.url)}"

    @property
    def cap_nbytes(self) -> int:
        """Most bytes of all entries."""
        return parse_nbytes(self.nbytes, "the size of a Redis tier")

    def open_body(self, fingerprint: bytes, memory: HostMemory | None = None) -> Body:
        """Connect. Raises ConfigurationError if the server does not answer."""
        del memory  # what it reads is copied
        return RedisBody(self.url, fingerprint, prefix=self.prefix, timeout_s=self.timeout_s)


@final
@dataclass(frozen=True, slots=True)
class ObjectTier(Tier):
    """An object store.

    Args:
        url: "s3://BUCKET/PATH", "gs://...", "az://..." or "file:///FOLDER".
        nbytes: most bytes below the path, a number or text such as "1TiB".
        timeout_s: of one call, connecting included.
        options: further settings of the store, as obstore takes them (endpoint, region, credentials).
    """

    url: str = field(repr=False)
    nbytes: str | int = "1TiB"
    timeout_s: float = 5.0
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def medium(self) -> str:
        """Name of the medium."""
        return ObjectBody.medium

    @property
    def name(self) -> str:
        """The medium and the store."""
        return f"{ObjectBody.medium} {without_secrets(self.url)}"

    @property
    def cap_nbytes(self) -> int:
        """Most bytes of all entries."""
        return parse_nbytes(self.nbytes, "the size of an object tier")

    def open_body(self, fingerprint: bytes, memory: HostMemory | None = None) -> Body:
        """Open the store. Raises ConfigurationError if it does not answer."""
        del memory  # what it reads is copied
        return ObjectBody(self.url, fingerprint, timeout_s=self.timeout_s, **self.options)


@final
@dataclass(frozen=True, slots=True)
class BodyTier(Tier):
    """A medium of your own.

    Args:
        make_body: makes the body for the content of one identity, from its fingerprint.
        nbytes: most bytes, a number or text such as "16GiB".
        kind: name of the medium, in receipts and explanations.
    """

    make_body: Callable[[bytes], Body]
    nbytes: str | int
    kind: str = "other"

    @property
    def medium(self) -> str:
        """Name of the medium."""
        return self.kind

    @property
    def name(self) -> str:
        """Name of the medium."""
        return self.kind

    @property
    def cap_nbytes(self) -> int:
        """Most bytes of all entries."""
        return parse_nbytes(self.nbytes, "the size of a tier")

    def open_body(self, fingerprint: bytes, memory: HostMemory | None = None) -> Body:
        """Make the body. Raises ConfigurationError if it does not answer."""
        del memory
        try:
            return self.make_body(fingerprint)
        except OSError as problem:
            raise ConfigurationError(f"the {self.kind} tier cannot be opened: {problem}") from problem


def parse_tier(text: str) -> Tier:
    """Read a tier from one line: ``host:SIZE``, ``folder:PATH:SIZE``, or a URL of Redis or an object store.

    Raises:
        ConfigurationError: it is none of these.

    >>> parse_tier("folder:/var/cache/pagedkv:200GiB").name, parse_tier("redis://localhost:6379/0").medium
    ('folder /var/cache/pagedkv', 'redis')
    """
    kind, _, rest = text.partition(":")
    if kind == "host" and rest:
        return HostTier(rest)
    path, colon, size = rest.rpartition(":")
    if kind == "folder" and colon and path and size:
        return FolderTier(path, size)
    if rest.startswith("//") and kind in REDIS_SCHEMES:
        return RedisTier(text)
    if rest.startswith("//") and kind in OBJECT_SCHEMES:
        return ObjectTier(text)
    raise ConfigurationError(
        "a tier is host:SIZE, folder:PATH:SIZE, or a URL such as redis://HOST:PORT/DB or s3://BUCKET/PATH; "
        f"got {without_secrets(text)!r}"
    )


def tier_of_options(
    *,
    root: str | Path | None = None,
    redis: str | None = None,
    object: str | None = None,  # noqa: A002 - a key of JSON
    cap: str | int | None = None,
    **options: Any,  # noqa: ANN401 - the tier's own
) -> Tier:
    """Build the tier that options describe, as they stand in the JSON with which engines configure a plug-in.

    Args:
        root, redis, object: exactly one of them: a folder, or the URL of a Redis server or of an object store.
        cap: most bytes, a number or text such as "200GiB"; a folder needs one.
        options: of the tier, such as ``admission``, ``eviction``, ``settings``.

    Raises:
        ConfigurationError: not one medium, no cap, an option that the tier does not have, or that needs our own engine.

    >>> tier_of_options(root="/var/cache/kv", cap="200GiB").name
    'folder /var/cache/kv'
    """
    if options.get("admission") == BEFORE_EVICTION:
        raise ConfigurationError(f"this engine does not tell what it is about to evict: no {BEFORE_EVICTION!r}")
    media = {"root": root, "redis": redis, "object": object}
    given = {name: where for name, where in media.items() if where is not None}
    if len(given) != 1:
        raise ConfigurationError(f"a tier needs one of {', '.join(media)}, got {', '.join(given) or 'none'}")
    size: dict[str, Any] = {} if cap is None else {"nbytes": cap}
    try:
        if root is not None:
            if cap is None:
                raise ConfigurationError("a tier with a root needs a cap, such as 200GiB")
            tier: Tier = FolderTier(root, cap, **options)
        elif redis is not None:
            tier = RedisTier(redis, **size, **options)
        else:
            tier = ObjectTier(str(object), **size, **options)
    except TypeError as problem:
        raise ConfigurationError(f"an option that a tier does not have: {problem}") from problem
    if tier.coding.is_lossy:
        raise ConfigurationError(f"codec {tier.coding.name} changes what is loaded, which this engine would not tell")
    return tier
