"""Access: API keys by their digests, tenants and salts by their keys."""

import hashlib
from pathlib import Path

import pytest

from pagedkv.api_keys import new_key
from pagedkv.errors import ConfigurationError
from pagedkv.server.config import ApiKeys, OpenAccess
from pagedkv.server.http import ApiError


def written(folder: Path, text: str) -> Path:
    """Write a file of keys."""
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def entry(key: str, tenant: str, more: str = "") -> str:
    """Write an entry of a file of keys."""
    return f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{more}\n'


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    access = ApiKeys.read(
        written(tmp_path, entry("one", "a") + entry("two", "b", "admin = true") + entry("three", "a"))
    )
    first = access.identify({"authorization": "Bearer one"})
    second = access.identify({"x-api-key": "two"})
    third = access.identify({"authorization": "bearer three"})
    assert (first.tenant, first.is_admin) == ("a", False)
    assert (second.tenant, second.is_admin) == ("b", True)
    assert first.salt == third.salt
    assert first.salt not in {second.salt, b""}
    assert access.tenants == {"a", "b"}


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer"}, {"authorization": "Basic one"}, {"authorization": "Bearer four"}]
)
def test_an_unknown_caller_is_refused(headers: dict[str, str], tmp_path: Path) -> None:
    access = ApiKeys.read(written(tmp_path, entry("one", "a")))
    with pytest.raises(ApiError) as caught:
        access.identify(headers)
    assert caught.value.status == 401
    assert "four" not in caught.value.message


def test_a_new_key_is_known_by_its_digest(tmp_path: Path) -> None:
    key, digest = new_key()
    access = ApiKeys.read(written(tmp_path, f'[[keys]]\ntenant = "a"\nsha256 = "{digest}"\n'))
    assert access.identify({"authorization": f"Bearer {key}"}).tenant == "a"
    assert new_key()[0] != key


def test_open_access_has_one_caller_without_salt() -> None:
    caller = OpenAccess().identify({})
    assert (caller.tenant, caller.salt, caller.is_admin, caller.has_no_tenant) == (None, b"", True, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must hold"),
        ("keys = 3", "must hold"),
        ("not toml", "cannot be read"),
        ("[[keys]]\ntenant = 'a'", "sha256"),
        ("[[keys]]\nsha256 = 'ab'\ntenant = 'a'", "sha256"),
        (entry("one", ""), "tenant"),
        (entry("one", "a", "admin = 1"), "admin"),
        (entry("one", "a", "password = 'x'"), "password"),
        (entry("one", "a") + entry("one", "b"), "the same key"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ApiKeys.read(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ApiKeys.read(tmp_path / "none.toml")
