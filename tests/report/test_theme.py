"""Colours: every one that drawings use exists, light and dark, and is legible on both backgrounds."""

import re
from importlib.resources import files
from itertools import pairwise
from typing import Final

import pytest

from pagedkv.report.drawing import FILLS, LINES, VARIABLES

CSS: Final = files("pagedkv.report").joinpath("templates/style.css").read_text(encoding="utf-8")
LEAST_CONTRAST_OF_GRAPHICS: Final = 3.0
LEAST_CONTRAST_OF_TEXT: Final = 4.5


def themes() -> list[dict[str, str]]:
    """Variables of the light theme and of the dark one."""
    return [dict(re.findall(r"(--[\w-]+): (#\w{6})", block)) for block in re.findall(r":root {(.*?)}", CSS, re.DOTALL)]


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio, WCAG 2.2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_both_themes_define_every_colour_of_drawings() -> None:
    light, dark = themes()
    assert light.keys() == dark.keys()
    assert {f"var({name})" for name in light} >= set(VARIABLES.values())


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_colours_are_legible_on_their_background(theme: dict[str, str]) -> None:
    for name, colour in theme.items():
        if name.startswith("--series"):
            assert contrast(colour, theme["--surface"]) >= LEAST_CONTRAST_OF_GRAPHICS, name
    for background in ("--surface", "--raised"):
        for name in ("--ink", "--soft", "--better", "--worse"):
            assert contrast(theme[name], theme[background]) >= LEAST_CONTRAST_OF_TEXT, (name, background)


def test_series_differ_in_more_than_colour() -> None:
    assert len({(line.dashes, line.marker) for line in LINES}) == len(LINES) == 8
    assert len({line.marker for line in LINES}) == len(LINES)
    assert all(one.dashes != other.dashes for one, other in pairwise(LINES))
    assert len({(fill.hatch, fill.alpha) for fill in FILLS}) == len(FILLS)
