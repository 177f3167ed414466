"""StopCut: returns an answer's text up to the first stop text, while it arrives in pieces.

Text that may begin a stop text is held back until it is certain, so that sent text is never taken back.
"""

from collections.abc import Sequence
from typing import final

__all__ = ["StopCut"]


@final
class StopCut:
    """The text of one answer before its first stop text.

    Args:
        stops: texts that end the answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._is_over = False

    def feed(self, text: str) -> str:
        """Take more text; return the text that certainly belongs to the answer. O(text x stops)."""
        if not self._stops or self._is_over:
            return "" if self._is_over else text
        self._held += text
        found = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self._is_over = True
            return self._release(min(found))
        return self._release(len(self._held) - self._num_possible())

    def finish(self) -> str:
        """Return the text that is held back, now that no text follows."""
        return "" if self._is_over else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _num_possible(self) -> int:
        """Count the last characters that may begin a stop text."""
        longest = max(map(len, self._stops)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-count:]
            if any(stop.startswith(end) for stop in self._stops):
                return count
        return 0
