"""What tests of the inspector's page look for."""

from typing import Final

__all__ = ["LEGEND", "WIDTHS"]

WIDTHS: Final = (400, 800, 1400)
LEGEND: Final = (
    "Object.fromEntries(Array.from(document.querySelectorAll('#legend li'), "
    "each => [each.dataset.state, Number(each.dataset.number)]))"
)
"""Blocks by state, as the page's legend shows them."""
