"""Presets are what the classes of their configs keep: held against transformers, without a download."""

import json

import pytest

from pagedkv.models import model_names
from pagedkv.models.presets import FILE
from tests.choosing import long_but
from tests.models.preset_configs import PRESET_CONFIGS, recorded

EACH_TIME = ("deepseek-v4-flash", "glm-5", "kimi-linear-48b-a3b", "llama-3.1-8b")


def test_every_preset_has_its_config() -> None:
    assert model_names() == tuple(sorted(PRESET_CONFIGS))


@pytest.mark.parametrize("name", long_but(EACH_TIME, sorted(PRESET_CONFIGS)))
def test_a_preset_is_what_its_class_keeps(name: str) -> None:
    assert json.loads(FILE.read_text())[name] == json.loads(json.dumps(recorded(name)))
