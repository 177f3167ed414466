"""A model's config.json, read and checked: a small JSON file that is read whole or refused.

All faults of a *file* that a user names (missing, a folder, huge, not text, not JSON, not an object) are reported here,
as a :class:`~pagedkv.errors.ConfigurationError` with the file and a remedy.

The messages for all faults of a *key* are made here, too: each names the file, the key, its value and the expected
value. A key whose value is null counts as absent, as it does in the library that writes these files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short_repr
from typing import Final, Self

from pagedkv.contract.arguments import LARGEST_SIZE
from pagedkv.errors import ConfigurationError

MAX_NBYTES: Final = 8 * 2**20
"""Largest file read. Configs have a few kilobytes; those with long tables of labels have about one megabyte."""


def read_json_object(path: Path) -> dict[str, object]:
    """Read a file with one JSON object.

    Raises:
        ConfigurationError: the file does not hold such an object.
    """
    try:
        # A pipe or a device has no size: the bytes read are counted.
        with path.open("rb") as file:
            content = file.read(MAX_NBYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}. Name a readable file") from error
    if len(content) > MAX_NBYTES:
        raise ConfigurationError(
            f"{path}: has more than {MAX_NBYTES:,} bytes, which no configuration needs. Name a JSON file of settings"
        )
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or a number of 5,000 digits
        raise ConfigurationError(f"{path}: not a JSON file: {error}. Fetch or write it again") from error
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{path}: holds a JSON {type(value).__name__}, where an object with named settings was expected. "
            "Fetch or write it again"
        )
    return value


COMPARE: Final = "Compare it with the config.json on the model's own page"
ADD_THE_KEY: Final = "Add the key; the model's own page or source has its value"
LANGUAGE_MODEL: Final = "text_config"
SHARED_WITH_PARTS: Final = ("dtype", "torch_dtype", "quantization_config")
"""Keys that a multimodal config has once, for all of its parts."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One config, or the language model's part of it.

    Args:
        source: the file, as the user named it, or the preset.
        values: keys and values of the JSON object.
        prefix: path of the keys in the file, for messages.
    """

    source: str
    values: Mapping[str, object]
    prefix: str = ""

    def language_model(self) -> Self:
        """Return the part that describes the language model: ``text_config`` if there is one.

        Raises:
            ConfigurationError: that part is not an object.
        """
        part = self.values.get(LANGUAGE_MODEL)
        if part is None:
            return self
        if not isinstance(part, dict):
            raise self._wrong(LANGUAGE_MODEL, "an object with the language model's keys")
        shared = {key: self.values[key] for key in SHARED_WITH_PARTS if key in self.values}
        own = {key: value for key, value in part.items() if value is not None}
        return type(self)(self.source, shared | own, f"{LANGUAGE_MODEL}.")

    def with_defaults(self, defaults: Mapping[str, object]) -> Self:
        """Fill in keys that are absent."""
        own = {key: value for key, value in self.values.items() if value is not None}
        return type(self)(self.source, {**defaults, **own}, self.prefix)

    def fault(self, key: str, reason: str, remedy: str) -> ConfigurationError:
        """Build an error about a key, for the caller to raise."""
        return ConfigurationError(f"{self.source}: {self.prefix}{key} {reason}. {remedy}")

    def has(self, key: str) -> bool:
        """Return whether a key exists and is not null."""
        return self.values.get(key) is not None

    def present(self, *keys: str) -> str | None:
        """Return the first of several alternative keys that exists, or None."""
        return next((key for key in keys if self.has(key)), None)

    def count(self, *keys: str, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """Return a whole number, under the first of its names that exists.

        Raises:
            ConfigurationError: missing, not a whole number, or outside ``[least, most]``.
        """
        key = self._found(*keys)
        return self._checked(key, least, most)

    def count_or(self, default: int, *keys: str, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """Return a whole number as :meth:`count`, or ``default`` where there is none."""
        key = self.present(*keys)
        return default if key is None else self._checked(key, least, most)

    def optional_count(self, *keys: str) -> int | None:
        """Return a whole number as :meth:`count`, or None where there is none."""
        key = self.present(*keys)
        return None if key is None else self._checked(key, 1, LARGEST_SIZE)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a truth value. Raises ConfigurationError when it is something else."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, *keys: str) -> str:
        """Return a text, under the first of its names that exists. Raises ConfigurationError when there is none."""
        key = self._found(*keys)
        value = self.values[key]
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts. Raises ConfigurationError when it is something else."""
        value = self.values[self._found(key)]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts")
        return tuple(value)

    def counts(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers, 0 and up. Raises ConfigurationError when it is something else."""
        value = self.values[self._found(key)]
        if not isinstance(value, list) or not all(_is_count(item, 0, LARGEST_SIZE) for item in value):
            raise self._wrong(key, "a list of whole numbers that are not negative")
        return tuple(value)

    def _found(self, *keys: str) -> str:
        key = self.present(*keys)
        if key is None:
            others = f" (nor {', '.join(keys[1:])})" if len(keys) > 1 else ""
            raise self.fault(keys[0], f"is missing{others}", ADD_THE_KEY)
        return key

    def _checked(self, key: str, least: int, most: int) -> int:
        value = self.values[key]
        if not _is_count(value, least, most):
            raise self._wrong(key, f"a whole number from {least} to {most}")
        assert isinstance(value, int)
        return value

    def _wrong(self, key: str, expected: str) -> ConfigurationError:
        return self.fault(key, f"is {short_repr(self.values[key])}, but must be {expected}", COMPARE)


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
