"""The digest of a checkpoint: for engines that tell the path of a model's files, and not what is in them.

Reading tens of gigabytes at each start would take long, so the digest of each file is kept by its path, size and time
of change. That of a file which was changed within the last seconds is not kept: it may change again within the same
tick of the file system's clock.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError

DIGEST: Final = re.compile("[0-9a-fA-F]{32,}")
WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
SETTLED_NS: Final = 10**10


def digest_of_weights(model: str, dtype: str, weights: str | None = None) -> bytes:
    """Digest what names the weights of a model that another engine serves: 32 bytes.

    Args:
        model: the folder of its files, or its name in the cache of Hugging Face, of which there is one revision.
        dtype: of the keys and values. Scales of fp8 may be computed while an engine runs, so files do not name them.
        weights: at least 32 hexadecimal digits that name them, or the path of the checkpoint; None: those of the model.

    Raises:
        ConfigurationError: which files they are is not certain, there is no file of weights, or ``dtype`` is an fp8.
        OSError: a file cannot be read.
        MissingExtraError: the package blake3 is not installed.

    Cost: digests of files are kept in ``~/.cache/pagedkv``, so that each file is read once.
    """
    if weights is not None and DIGEST.fullmatch(weights):
        return hashlib.sha256(weights.lower().encode()).digest()
    if weights is None and ("fp8" in dtype or "float8" in dtype):
        raise ConfigurationError("the scales of an fp8 cache are not known")
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv" / "checkpoints.json"
    return checkpoint_digest(weights or _files_of(model), kept)


def _files_of(model: str) -> Path:
    """Return where the files of a model are. Raises ConfigurationError where that is not certain."""
    if Path(model).exists():
        return Path(model)
    with needing("hf", "a model that is named by its place on the hub"):
        config = import_module("huggingface_hub").try_to_load_from_cache(model, "config.json")
    revisions = list(Path(config).parents[1].iterdir()) if isinstance(config, str) else []
    if len(revisions) != 1:
        raise ConfigurationError(f"the cache of Hugging Face has {len(revisions)} revisions of {model}")
    return revisions[0]


def checkpoint_digest(path: str | Path, kept: str | Path | None = None) -> bytes:
    """Digest a checkpoint, by the names and bytes of all files of its folder, without subfolders: 32 bytes.

    Args:
        path: the folder, or a single file of weights.
        kept: a JSON file that keeps digests of files by path, size and time of change; None: every file is read.

    Raises:
        ConfigurationError: there is no file of weights.
        OSError: a file cannot be read. What cannot be kept is no error.
        MissingExtraError: the package blake3 is not installed.

    Cost: each file that is not kept is read once, on all cores.
    """
    folder = Path(path)
    files = sorted(each for each in folder.iterdir() if each.is_file()) if folder.is_dir() else [folder]
    if not any(each.suffix in WEIGHTS and each.is_file() for each in files):
        raise ConfigurationError(f"there are no weights in {folder}: no file ends with {', '.join(sorted(WEIGHTS))}")
    known = {} if kept is None else _read_kept(Path(kept))
    before, digest = dict(known), hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{_digest_of(file, known)}\0".encode())
    if kept is not None and known != before:
        _keep(Path(kept), known)
    return digest.digest()


def _digest_of(file: Path, known: dict[str, list[object]]) -> str:
    """Return the digest of a file in hexadecimal digits; what is new is added to ``known``."""
    real = file.resolve()
    status = real.stat()
    size_and_time: list[object] = [status.st_size, status.st_mtime_ns]
    entry = known.get(str(real))
    if entry is not None and entry[:2] == size_and_time:
        return str(entry[2])
    with needing("tiers", "the digest of a checkpoint"):
        blake3: Any = import_module("blake3").blake3
    hasher = blake3(max_threads=blake3.AUTO)
    if status.st_size:
        hasher.update_mmap(real)
    found = str(hasher.hexdigest())
    if time.time_ns() - status.st_mtime_ns > SETTLED_NS:
        known[str(real)] = [*size_and_time, found]
    return found


def _read_kept(kept: Path) -> dict[str, list[object]]:
    """Read what is kept; nothing where it cannot be read."""
    try:
        read = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = read if isinstance(read, dict) else {}
    return {path: entry for path, entry in entries.items() if isinstance(entry, list) and len(entry) == 3}  # noqa: PLR2004 - size, time, digest


def _keep(kept: Path, known: dict[str, list[object]]) -> None:
    """Replace the file as a whole."""
    temporary = kept.with_name(f"{kept.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known), encoding="utf-8")
        temporary.replace(kept)
