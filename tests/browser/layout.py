"""The search for faults of a page's layout, by JavaScript that returns a list of them."""

from pathlib import Path
from typing import Final

__all__ = ["FAULTS"]

FAULTS: Final = Path(__file__).with_suffix(".js").read_text()
