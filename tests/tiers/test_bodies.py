"""The conformance suite: what every body promises, against the real thing."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TypeAlias

import pytest

from pagedkv.tiers.body import Body
from pagedkv.tiers.frame import Buffer
from tests.tiers.bodies import KINDS, LASTING, SERVERS, make_body

FINGERPRINT = hashlib.sha256(b"one").digest()
OTHER = hashlib.sha256(b"two").digest()
SIZES = (1, 63, 4096, 4097, 300_001, 2**20)

Make: TypeAlias = Callable[..., Body]


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make bodies of one kind over the same medium."""
    kind = request.param
    url = request.getfixturevalue(SERVERS[kind]) if kind in SERVERS else ""

    def made(fingerprint: bytes = FINGERPRINT, **given: int) -> Body:
        return make_body(kind, tmp_path, url, fingerprint, **given)

    made.is_lasting = kind in LASTING  # type: ignore[attr-defined]
    races = kind == "object in S3"  # moto answers 500 where two of its threads meet at one object
    made.may_fail = contextlib.suppress(*[ConnectionError] * races)  # type: ignore[attr-defined]
    return made


def read(body: Body, number: int, nbytes: int = 1) -> bytes | None:
    found = body.read(key(number), nbytes, 5.0)
    return None if found is None else bytes(found)


def test_what_is_written_is_read_whatever_its_size_and_pieces(make: Make) -> None:
    body = make()
    for number, size in enumerate(SIZES):
        content = os.urandom(size)
        pieces: list[Buffer] = [content[: size // 3], memoryview(content)[size // 3 :], b""]
        body.write(key(number), pieces, 5.0)
        assert read(body, number, size) == content
        assert read(body, number) == content, "the expected size is a hint"
    assert sorted(each.nbytes for each in body.scan()) == sorted(SIZES)
    assert {each.key for each in body.scan()} == {key(number) for number in range(len(SIZES))}
    assert body.usage().nbytes >= sum(SIZES)
    body.close()


def test_what_was_never_written_or_is_deleted_is_none(make: Make) -> None:
    body = make()
    assert read(body, 1) is None
    body.delete(key(1), 5.0)
    body.write(key(1), [b"content"], 5.0)
    body.delete(key(1), 5.0)
    body.delete(key(1), 5.0)
    assert read(body, 1) is None
    assert list(body.scan()) == []
    assert body.usage().nbytes == 0


def test_writing_again_leaves_one_entry(make: Make) -> None:
    body = make()
    for _ in range(3):
        body.write(key(1), [b"content"], 5.0)
    assert read(body, 1) == b"content"
    assert [each.nbytes for each in body.scan()] == [7]
    assert body.usage().nbytes == 7


def test_another_identity_sees_nothing_but_shares_the_root(make: Make) -> None:
    body, other = make(), make(OTHER)
    body.write(key(1), [b"content"], 5.0)
    assert read(other, 1) is None
    assert list(other.scan()) == []
    if make.is_lasting:  # type: ignore[attr-defined]
        assert other.usage().nbytes == 7
    other.write(key(1), [b"another"], 5.0)
    assert (read(body, 1), read(other, 1)) == (b"content", b"another")
    other.delete(key(1), 5.0)
    assert read(body, 1) == b"content"


def test_another_body_finds_it_again(make: Make) -> None:
    if not make.is_lasting:  # type: ignore[attr-defined]
        pytest.skip("its content ends with the body")
    body = make()
    for number in range(10):
        body.write(key(number), [b"x" * (number + 1)], 5.0)
    body.close()
    again = make()
    assert {each.key: each.nbytes for each in again.scan()} == {key(number): number + 1 for number in range(10)}
    assert read(again, 9) == b"x" * 10
    assert again.usage().nbytes == 55


def test_a_reader_sees_a_whole_entry_or_none_while_others_write_and_delete(make: Make) -> None:
    body = make()
    size = 2**19
    contents = [bytes([number]) * size for number in range(2)]
    wrong: list[int] = []

    def write_and_delete(content: bytes) -> None:
        for _ in range(8):
            with make.may_fail:  # type: ignore[attr-defined]
                body.write(key(1), [content], 5.0)
            with make.may_fail:  # type: ignore[attr-defined]
                body.delete(key(1), 5.0)

    writers = [Thread(target=write_and_delete, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = None
        with make.may_fail:  # type: ignore[attr-defined]
            found = read(body, 1, size)
        if found is not None and found not in contents:
            wrong.append(len(found))
    for writer in writers:
        writer.join()
    assert wrong == []
    body.delete(key(1), 5.0)
    assert body.usage().nbytes == 0
