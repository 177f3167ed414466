"""Tiers as users write them."""

from typing import Any

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.tiers import (
    BodyTier,
    FolderTier,
    HostBody,
    HostTier,
    ObjectTier,
    RedisTier,
    Tier,
    parse_nbytes,
    parse_tier,
    tier_of_options,
)


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("host:16GiB", HostTier("16GiB")),
        ("folder:/a/b:200GB", FolderTier("/a/b", "200GB")),
        ("folder:C:/a:1TiB", FolderTier("C:/a", "1TiB")),
        ("redis://user:secret@host:6379/0", RedisTier("redis://user:secret@host:6379/0")),
        ("unix:///run/redis.sock", RedisTier("unix:///run/redis.sock")),
        ("s3://bucket/path", ObjectTier("s3://bucket/path")),
    ],
)
def test_a_tier_is_read_from_one_line(text: str, tier: Tier) -> None:
    assert parse_tier(text) == tier
    assert parse_tier(text).medium == text.partition(":")[0].replace("unix", "redis").replace("s3", "object")


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "folder:/a", "folder::1GiB", "disk:/a:1GiB", "redis:host", "ftp://a/b"]
)
def test_what_is_no_tier_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="a tier is host:SIZE, folder:PATH:SIZE, or a URL"):
        parse_tier(text)


def test_sizes_are_read_with_their_units() -> None:
    read = {
        "7B": 7,
        "0.5": 2**29,
        "16": 2**34,
        "1k": 1000,
        "1KB": 1000,
        "1 KiB": 1024,
        "2.5MiB": 2621440,
        "3 gb": 3 * 10**9,
        "1Ti": 2**40,
    }
    assert {text: parse_nbytes(text) for text in read} == read
    for wrong in ("", "GiB", "-1", "1e3", "1 XB", "0", 0, True, 1.5):
        with pytest.raises(ConfigurationError):
            parse_nbytes(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "tier"),
    [
        (
            {"root": "/a", "cap": "1GiB", "admission": "second-offer"},
            FolderTier("/a", "1GiB", admission="second-offer"),
        ),
        ({"redis": "redis://host"}, RedisTier("redis://host")),
        ({"redis": "redis://host", "cap": 2**30}, RedisTier("redis://host", 2**30)),
        ({"object": "s3://bucket", "cap": "2TiB", "timeout_s": 1.0}, ObjectTier("s3://bucket", "2TiB", timeout_s=1.0)),
    ],
)
def test_a_tier_is_built_from_options(options: dict[str, Any], tier: Tier) -> None:
    assert tier_of_options(**options) == tier


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"root": "/a", "cap": 1, "redis": "redis://host"}, "one of root, redis, object, got root, redis"),
        ({"cap": 1}, "one of root, redis, object, got none"),
        ({"root": "/a"}, "needs a cap, such as 200GiB"),
        ({"root": "/a", "cap": 1, "n_threads": 3}, "an option that a tier does not have: .*n_threads"),
        ({"root": "/a", "cap": "much"}, "must be a size"),
    ],
)
def test_options_of_no_tier_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        tier_of_options(**options)


def test_names_have_no_secrets() -> None:
    tier = RedisTier("redis://user:secret@host:6379/0?password=secret", secret=bytes(32))
    assert tier.name == "redis redis://host:6379/0"
    assert "secret=" not in repr(tier)
    assert "key" not in repr(ObjectTier("s3://bucket", options={"key": "x"}))


def test_settings_are_checked_when_a_tier_is_built() -> None:
    wrong: list[dict[str, object]] = [
        {"admission": "never"},
        {"loads": "sometimes"},
        {"deadline_s": 0},
        {"floor_nbytes": -1},
        {"eviction": "none"},
        {"secret": b"short"},
        {"settings": {"unknown": 1}},
        {"settings": {"max_reads": 0}},
        {"settings": None},
        {"rescan_s": -1},
        {"rescan_s": "often"},
        {"rescan_s": float("nan")},
    ]
    for more in wrong:
        with pytest.raises(ConfigurationError):
            HostTier("1MiB", **more)  # type: ignore[arg-type]


def test_the_index_has_room_for_the_entries_of_the_cap() -> None:
    assert HostTier("1GiB").store_config(2**20).max_entries == 1280
    assert HostTier("1GiB").store_config(2**40).max_entries == 64
    assert HostTier("1GiB", settings={"max_entries": 7}).store_config(1).max_entries == 7


def test_a_body_that_cannot_be_made_is_refused() -> None:
    def fail(_: bytes) -> HostBody:
        raise OSError("no such device")

    with pytest.raises(ConfigurationError, match="tape tier cannot be opened: no such device"):
        BodyTier(fail, "1GiB", "tape").open_body(bytes(32))


def test_only_tiers_that_other_processes_may_share_are_scanned_again() -> None:
    with pytest.raises(ConfigurationError, match="a host tier is of one process: leave out rescan_s=5"):
        HostTier("1MiB", rescan_s=5)
    assert HostTier("1MiB", rescan_s=0).rescan_s == 0
    shared = (FolderTier("/a", "1GiB"), RedisTier("redis://host"), ObjectTier("s3://bucket"))
    assert all(tier.is_shared and tier.rescan_s is None for tier in shared)
    assert not HostTier("1MiB").is_shared
