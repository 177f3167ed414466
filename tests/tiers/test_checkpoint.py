"""The digest of a checkpoint follows every byte of it, and reads no file twice that has not changed."""

import json
import os
from pathlib import Path

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.tiers import checkpoint_digest, digest_of_weights

pytestmark = pytest.mark.plain_only

LONG_AGO_S = 10**9


def make(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        file = folder / name.replace("_", ".")
        file.write_bytes(content)
        os.utime(file, (LONG_AGO_S, LONG_AGO_S))
    return folder


def test_equal_checkpoints_have_one_digest_and_every_byte_and_name_counts(tmp_path: Path) -> None:
    one = make(tmp_path / "one", model_safetensors=b"weights", config_json=b"{}")
    digests = {
        checkpoint_digest(one),
        checkpoint_digest(make(tmp_path / "same", model_safetensors=b"weights", config_json=b"{}")),
    }
    assert len(digests) == 1
    digests |= {
        checkpoint_digest(make(tmp_path / "weights", model_safetensors=b"Weights", config_json=b"{}")),
        checkpoint_digest(make(tmp_path / "config", model_safetensors=b"weights", config_json=b"[]")),
        checkpoint_digest(make(tmp_path / "name", other_safetensors=b"weights", config_json=b"{}")),
        checkpoint_digest(one / "model.safetensors"),
    }
    assert len(digests) == 5


def test_a_file_of_the_same_size_and_time_is_not_read_again(tmp_path: Path) -> None:
    folder, kept = make(tmp_path / "model", model_safetensors=b"weights"), tmp_path / "cache" / "kept.json"
    digest = checkpoint_digest(folder, kept)
    make(folder, model_safetensors=b"another")  # the same size and time: only reading would tell
    assert checkpoint_digest(folder, kept) == digest != checkpoint_digest(folder)
    (folder / "model.safetensors").write_bytes(b"touched")
    assert checkpoint_digest(folder, kept) == checkpoint_digest(folder) != digest


def test_what_was_changed_just_now_is_not_kept(tmp_path: Path) -> None:
    folder, kept = make(tmp_path / "model"), tmp_path / "kept.json"
    (folder / "model.safetensors").write_bytes(b"weights")
    checkpoint_digest(folder, kept)
    assert not kept.exists()


@pytest.mark.parametrize("broken", ["", "[]", '{"a": 1}', '{"a": [1]}'])
def test_a_broken_file_of_kept_digests_is_written_anew(tmp_path: Path, broken: str) -> None:
    folder, kept = make(tmp_path / "model", model_safetensors=b"weights"), tmp_path / "kept.json"
    kept.write_text(broken)
    assert checkpoint_digest(folder, kept) == checkpoint_digest(folder)
    assert list(json.loads(kept.read_text())) == [str((folder / "model.safetensors").resolve())]


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    for folder in (make(tmp_path / "model", config_json=b"{}"), tmp_path / "none.gguf"):
        with pytest.raises(ConfigurationError, match="there are no weights in"):
            checkpoint_digest(folder)


def test_weights_are_named_by_digits_a_path_or_the_files_of_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    model = make(tmp_path / "model", model_safetensors=b"weights")
    other = make(tmp_path / "other", model_safetensors=b"others")
    assert digest_of_weights(str(model), "bfloat16") == checkpoint_digest(model)
    assert digest_of_weights(str(model), "bfloat16", str(other)) == checkpoint_digest(other)
    assert digest_of_weights("", "float8_e4m3fn", "AB" * 16) == digest_of_weights(str(model), "float16", "ab" * 16)
    assert (tmp_path / "kept" / "pagedkv" / "checkpoints.json").exists()


@pytest.mark.parametrize(
    ("dtype", "name", "told"),
    [
        ("fp8_e4m3", "model", "the scales of an fp8 cache are not known"),
        ("torch.float8_e4m3fn", "model", "the scales of an fp8 cache are not known"),
        ("bfloat16", "nobody/has-it", "the cache of Hugging Face has 0 revisions of nobody/has-it"),
        ("bfloat16", "empty", "there are no weights in"),
    ],
)
def test_weights_that_nothing_names_for_certain_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, name: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model", model_safetensors=b"weights")
    make(tmp_path / "empty", config_json=b"{}")
    with pytest.raises(ConfigurationError, match=told):
        digest_of_weights(name, dtype)
