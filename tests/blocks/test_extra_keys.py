"""ExtraKeyTable: ids of encodings, given back and given again."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.blocks.digests import NO_EXTRA, ExtraKeyTable

encodings = st.binary(max_size=3)
operations = st.lists(encodings | st.sets(st.integers(0, 6)), max_size=30)


def bytes_of(table: ExtraKeyTable, key_id: int) -> bytes:
    """What compiled loops read for an id."""
    begin, end = table.arrays.bounds[key_id].tolist()
    return table.arrays.data[begin:end].tobytes()


@settings(deadline=None)
@given(operations)
def test_equal_ids_mean_equal_bytes_whatever_was_forgotten(steps: list[bytes | set[int]]) -> None:
    """Against a dictionary: interning (bytes) and retaining only some ids (sets), in any order."""
    table = ExtraKeyTable(4)
    model: dict[bytes, int] = {b"": NO_EXTRA}
    for step in steps:
        if isinstance(step, set):
            table.retain(step)
            model = {key: key_id for key, key_id in model.items() if key_id in {NO_EXTRA, *step}}
        else:
            key_id = table.intern_all([step])[0]
            assert model.setdefault(step, key_id) == key_id
        assert {key: table.id_of(key) for key in model} == model
        assert len(set(model.values())) == len(table) == len(model)
        assert all(bytes_of(table, key_id) == key for key, key_id in model.items())


def test_the_empty_encoding_is_no_key() -> None:
    table = ExtraKeyTable(4)
    assert table.intern_all([b""])[0] == table.id_of(b"") == NO_EXTRA


def test_asking_gives_no_id() -> None:
    table = ExtraKeyTable(4)
    assert table.id_of(b"salt") is None
    assert len(table) == 1


def test_forgotten_ids_are_given_again_and_survivors_keep_theirs() -> None:
    table = ExtraKeyTable(4)
    ids = table.intern_all([b"salt %d" % number for number in range(100)])
    table.retain([ids[7], ids[50]])
    assert len(table) == 3
    again = set(table.intern_all([b"other %d" % number for number in range(98)]))
    assert again == set(ids) - {ids[7], ids[50]}
    assert [bytes_of(table, ids[7]), bytes_of(table, ids[50])] == [b"salt 7", b"salt 50"]
    assert table.id_of(b"salt 8") is None


@pytest.mark.parametrize("length", [1, 255, 256, 257, 10_000])
def test_encodings_of_any_length_are_kept(length: int) -> None:
    table = ExtraKeyTable(4)
    encoding = np.random.default_rng(length).bytes(length)
    assert bytes_of(table, table.intern_all([encoding])[0]) == encoding
