"""Codecs: exact ones serve what was stored, lossy ones what they round to, and whatever was changed is a miss."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from pagedkv.errors import ConfigurationError
from pagedkv.tiers.body import Body, HostBody
from pagedkv.tiers.codecs import (
    NO_CODEC,
    AesGcm,
    Codec,
    Fp8,
    Zstd,
    _code_of_half,
    _value_of_code,
    identity_through,
    parse_codec,
)
from pagedkv.tiers.folder_body import FolderBody
from pagedkv.tiers.frame import Refusal, write_frame
from pagedkv.tiers.identity import GroupLayout, Identity, Run
from pagedkv.tiers.specs import FolderTier, tier_of_options
from pagedkv.tiers.store import LoadedRuns, TierStore
from pagedkv.tiers.words import LoadEnd, StoreConfig, StoreOutcome
from tests.tiers.bodies import KINDS, LASTING, SERVERS, make_body
from tests.tiers.examples import IDENTITY, MODEL, SECRET, parts_of, some_runs
from tests.tiers.test_store import SECONDS, put

KEY: Final = bytes(range(50, 82))
EXACT: Final[tuple[Codec, ...]] = (NO_CODEC, Zstd(), AesGcm(KEY), AesGcm(KEY[:16]))
LOSSY: Final = Fp8()
ALL: Final = (*EXACT, LOSSY)
MakeBody = Callable[[Codec], Body]


def named(codec: Codec) -> str:
    return codec.name or "none"


def store_on(body: Body, codec: Codec, identity: Identity = IDENTITY, **given: Any) -> TierStore:  # noqa: ANN401 - settings
    settings: dict[str, Any] = {"cap_nbytes": 10**8, "max_entries": 1000, "admission": "always"} | given
    return TierStore(body, identity, StoreConfig(**settings), codec=codec)


def expected(codec: Codec, run: Run) -> tuple[bytes, ...]:
    """What is loaded of a run: what was stored, but for the codec's rounding."""
    decoded = []
    for layout, part in zip(IDENTITY.groups, parts_of(run), strict=True):
        back = codec.decode(layout, memoryview(codec.encode(layout, part)))
        assert back is not None
        decoded.append(bytes(back))
    return tuple(decoded)


def loaded(store: TierStore, runs: list[Run], codec: Codec) -> LoadedRuns:
    """Load runs; whatever comes must be right."""
    result = store.load(runs, SECONDS).wait(SECONDS)
    for run, parts in zip(runs, result.parts, strict=False):
        assert tuple(map(bytes, parts)) == expected(codec, run), "a wrong answer"
    return result


@pytest.fixture(params=[kind for kind in KINDS if kind != "object in S3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> MakeBody:
    url = request.getfixturevalue(SERVERS[kind]) if kind in SERVERS else ""
    return lambda codec: make_body(kind, tmp_path, url, codec.identity_of(IDENTITY).fingerprint)


@pytest.mark.parametrize("codec", ALL, ids=named)
def test_what_is_offered_is_served_and_after_a_restart_too(codec: Codec, kind: str, make: MakeBody) -> None:
    runs = some_runs(12)
    assert (expected(codec, runs[0]) == parts_of(runs[0])) is not codec.is_lossy
    with store_on(make(codec), codec) as store:
        assert put(store, runs) == {StoreOutcome.STORED: 12}
        assert loaded(store, runs, codec).num_runs == 12
        assert store.statistics().nbytes == store.body.usage().nbytes, "entries have the bytes that were written"
        store._core.check()
    with store_on(make(codec), codec) as store:
        assert loaded(store, runs, codec).num_runs == (12 if kind in LASTING else 0)
    for other in ALL:
        with store_on(make(other), other) as store:
            assert store.look_up(runs) == (12 if other == codec and kind in LASTING else 0)


def changed(content: bytes, another: bytes, rng: random.Random) -> dict[str, bytes]:
    """What may be found in the place of an entry."""
    places = [*range(100), *rng.sample(range(len(content)), 100), len(content) - 1]
    flips = {f"bit of byte {place}": _flipped(content, place, rng.randrange(8)) for place in places}
    cuts = {f"cut at {place}": content[:place] for place in (0, 1, 63, 64, 65, 100, len(content) - 1)}
    return flips | cuts | {"longer": content + b"\0", "another entry": another, "zeros": bytes(len(content))}


def _flipped(content: bytes, place: int, bit: int) -> bytes:
    flipped = bytearray(content)
    flipped[place] ^= 1 << bit
    return bytes(flipped)


@pytest.mark.parametrize("codec", ALL, ids=named)
def test_what_was_changed_is_a_miss_and_never_other_bytes(codec: Codec, tmp_path: Path) -> None:
    runs = some_runs(2)
    body = FolderBody(tmp_path / "root", codec.identity_of(IDENTITY).fingerprint, 10**8)
    with store_on(body, codec) as store:
        put(store, runs)
        stored = [bytes(body.read(run.key, 1, 1.0) or b"") for run in runs]
        for what, content in changed(stored[0], stored[1], random.Random(0)).items():
            opened = store._opened(content, runs[0].key)
            assert isinstance(opened, Refusal) or opened.compare(store.identity, runs[0]) is not None, what
        body.write(runs[0].key, [stored[1]], 1.0)
        assert loaded(store, runs[:1], codec).cause is LoadEnd.CORRUPT
        assert store.wait_until_quiet(SECONDS)
        assert put(store, runs)[StoreOutcome.STORED] == 1
        assert loaded(store, runs, codec).num_runs == 2


@pytest.mark.parametrize("reader", [NO_CODEC, Zstd(), AesGcm(bytes(32)), LOSSY], ids=named)
def test_another_key_or_codec_serves_nothing_even_in_the_same_place(reader: Codec, tmp_path: Path) -> None:
    runs = some_runs(3)
    for writer in (AesGcm(KEY), Zstd(9), NO_CODEC):
        if writer.name == reader.name:
            continue
        with store_on(FolderBody(tmp_path / named(writer), bytes(32), 10**8), writer) as store:
            put(store, runs)
        with store_on(FolderBody(tmp_path / named(writer), bytes(32), 10**8), reader) as store:
            assert store.look_up(runs) == 3, "it is in the same place"
            assert loaded(store, runs, reader).cause is LoadEnd.CORRUPT


def test_a_key_of_another_name_does_not_open_what_names_it() -> None:
    """Names have 64 bits of the key's digest; the tag decides."""
    frame = write_frame(IDENTITY, some_runs(1)[0], parts_of(some_runs(1)[0]))
    sealed = b"".join(AesGcm(KEY).seal([frame], bytes(32)))
    other = AesGcm(bytes(32))
    forged = sealed[:24] + other.name.encode().ljust(40, b"\0") + sealed[64:]
    refusal = other.unseal(forged, bytes(32))
    assert isinstance(refusal, Refusal)
    assert "not authentic" in refusal.detail
    assert AesGcm(KEY).unseal(sealed, bytes(32)) == frame
    assert isinstance(AesGcm(KEY).unseal(sealed, bytes([1]) * 32), Refusal), "it is of another entry"


def test_nothing_of_a_prompt_or_its_blocks_is_readable() -> None:
    run = some_runs(1)[0]
    frame = write_frame(IDENTITY, run, parts_of(run))
    sealed = b"".join(AesGcm(KEY).seal([frame], run.key))
    for secret in (run.token_bytes, run.extra_keys, *parts_of(run)):
        assert secret[:8] in frame
        assert secret[:8] not in sealed
    assert AesGcm(KEY).seal([frame], run.key) != AesGcm(KEY).seal([frame], run.key), "each has a nonce of its own"
    assert KEY.hex() not in repr(FolderTier("/a", "1GiB", codec=AesGcm(KEY)))
    assert repr(KEY) not in repr(AesGcm(KEY))


def test_what_is_compressed_takes_less_of_the_cap() -> None:
    """All of it was counted as if it had not been compressed."""
    runs, codec = some_runs(20), Zstd()
    parts = [(bytes(64 * 1024), bytes(20 * 512)) for _ in runs]
    settings: dict[str, Any] = {"cap_nbytes": 400_000, "salt_share": 0.9}
    with store_on(HostBody(), codec, **settings) as store:
        for run, own in zip(runs, parts, strict=True):
            store.offer([run], [own])
            assert store.wait_until_quiet(SECONDS)
        assert store.statistics().num_entries == 20
        store._core.check()
    with store_on(HostBody(), NO_CODEC, **settings) as store:
        for run, own in zip(runs, parts, strict=True):
            store.offer([run], [own])
            assert store.wait_until_quiet(SECONDS)
        assert store.statistics().num_entries < 6


# Eight bits


def test_codes_are_those_of_torch() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = torch.from_numpy(halves[np.abs(halves.astype(np.float32)) <= 448].astype(np.float32))
    coded = numbers.to(torch.float8_e4m3fn)
    codes = _code_of_half()[numbers.numpy().astype(np.float16).view(np.uint16)]
    assert (codes == coded.view(torch.uint8).numpy()).all()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(_value_of_code(), every)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_head_of_a_block_has_a_scale(dtype: str) -> None:
    shape = (3, 2, 4, 2, 8)
    layout = GroupLayout("full", 4, dtype, "LKNHC", shape, (128, 64, 16, 8, 1))
    torch.manual_seed(0)
    size = 10.0 ** torch.arange(-2, 2).repeat(3).reshape(3, 2, 1, 2, 1)
    numbers = (torch.randn(5, *shape) * size).to(getattr(torch, dtype))
    part = numbers.view(torch.uint8).numpy().tobytes()
    coded = LOSSY.encode(layout, part)
    assert len(memoryview(coded)) == LOSSY.part_nbytes(layout, len(part)) == 5 * (3 * 2 * 2 * 4 + 3 * 2 * 4 * 2 * 8)
    back = LOSSY.decode(layout, memoryview(coded))
    assert back is not None
    assert len(back) == len(part)
    restored = torch.frombuffer(bytearray(back), dtype=getattr(torch, dtype)).reshape(numbers.shape).float()
    error = (restored - numbers.float()).abs()
    largest = numbers.float().abs().amax((3, 5), keepdim=True)
    assert (error <= torch.maximum(numbers.float().abs() / 15, largest / 2**15)).all()
    assert error.max() > 0


def test_numbers_that_are_none_and_blocks_of_zeros_come_back() -> None:
    layout = GroupLayout("full", 1, "float32", "NHC", (1, 2, 4), (8, 4, 1))
    numbers = np.array([np.nan, np.inf, -np.inf, 2.0, 0, 0, 0, 0], np.float32)
    back = LOSSY.decode(layout, memoryview(LOSSY.encode(layout, numbers.tobytes())))
    assert back is not None
    np.testing.assert_array_equal(np.frombuffer(back, np.float32), [np.nan, 2, -2, 2, 0, 0, 0, 0])


def test_groups_of_other_types_are_stored_as_they_are() -> None:
    state = GroupLayout("state", 8, "uint8", "C", (100,), (1,))
    strided = GroupLayout("full", 4, "float16", "NHC", (4, 2, 4), (4, 16, 1))
    for layout, part in ((state, bytes(range(100))), (strided, bytes(range(64))), (IDENTITY.groups[1], bytes(20))):
        assert LOSSY.encode(layout, part) == part
        assert bytes(LOSSY.decode(layout, memoryview(part)) or b"") == part
        assert LOSSY.part_nbytes(layout, len(part)) == len(part)
    assert LOSSY.decode(IDENTITY.groups[0], memoryview(bytes(7))) is None


# Names


def test_the_codec_is_in_the_identity_but_for_none() -> None:
    fingerprints = {codec.identity_of(IDENTITY).fingerprint for codec in ALL}
    assert len(fingerprints) == len(ALL)
    assert NO_CODEC.identity_of(IDENTITY) == IDENTITY
    assert Zstd(1).identity_of(IDENTITY) == Zstd(9).identity_of(IDENTITY), "either reads what the other wrote"
    assert b'["codec","zstd"]' in Zstd().identity_of(IDENTITY).model_text
    assert KEY.hex().encode() not in AesGcm(KEY).identity_of(IDENTITY).model_text
    assert identity_through(IDENTITY, EXACT) == IDENTITY
    through = identity_through(IDENTITY, [NO_CODEC, LOSSY, LOSSY])
    assert through.model == replace(MODEL, versions=(*MODEL.versions, ("loaded through", "fp8-e4m3")))


def test_codecs_are_read_from_texts(tmp_path: Path) -> None:
    raw, digits = tmp_path / "raw", tmp_path / "digits"
    raw.write_bytes(KEY)
    digits.write_text(KEY.hex() + "\n")
    assert parse_codec("none") == NO_CODEC
    assert parse_codec("zstd") == Zstd(1)
    assert parse_codec("zstd:9") == Zstd(9)
    assert parse_codec("fp8-e4m3") == LOSSY
    for text in (f"file:{raw}", f"file:{digits}", f"command:cat {digits}"):
        assert parse_codec(f"aes-gcm:{text}") == AesGcm(KEY)
    assert FolderTier("/a", "1GiB", codec="zstd").codec == Zstd()
    assert replace(FolderTier("/a", "1GiB", codec="zstd"), codec="none").coding == NO_CODEC
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    refused = {
        "gzip": "a codec is none, zstd",
        "zstd:fast": "a codec is",
        "zstd:23": "must be at most 22",
        "aes-gcm": "a codec is",
        f"aes-gcm:file:{tmp_path}/none": "cannot be read",
        f"aes-gcm:file:{empty}": "16, 24 or 32 bytes, got 0 bytes",
        "aes-gcm:command:exit 3": "exit status 3",
    }
    for text, message in refused.items():
        with pytest.raises(ConfigurationError, match=message):
            FolderTier("/a", "1GiB", codec=text)
    with pytest.raises(ConfigurationError, match="codec"):
        FolderTier("/a", "1GiB", codec=3)  # type: ignore[arg-type]


def test_engines_of_others_take_exact_codecs_and_no_victims() -> None:
    assert tier_of_options(root="/a", cap="1GiB", codec="zstd").coding == Zstd()
    with pytest.raises(ConfigurationError, match="fp8-e4m3 changes what is loaded"):
        tier_of_options(root="/a", cap="1GiB", codec="fp8-e4m3")
    with pytest.raises(ConfigurationError, match="does not tell what it is about to evict"):
        tier_of_options(root="/a", cap="1GiB", admission="before-eviction")


@pytest.mark.parametrize(("codec", "package", "extra"), [
    (Zstd(), "zstandard", "zstd"),
    (AesGcm(KEY), "cryptography.hazmat.primitives.ciphers.aead", "encryption"),
])  # fmt: skip
def test_a_package_that_is_missing_is_told(
    codec: Codec, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedkv.tiers import codecs  # noqa: PLC0415 - for its caches alone

    for loader in (codecs._zstandard, codecs._aesgcm):
        loader.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=extra):
        codec.require_packages()


def test_a_secret_and_a_codec_go_together(tmp_path: Path) -> None:
    runs, codec = some_runs(3), AesGcm(KEY)
    body = FolderBody(tmp_path / "root", codec.identity_of(IDENTITY).fingerprint, 10**8)
    config = StoreConfig(cap_nbytes=10**8, max_entries=100, admission="always")
    with TierStore(body, IDENTITY, config, secret=SECRET, codec=codec) as store:
        put(store, runs)
        assert loaded(store, runs, codec).num_runs == 3
