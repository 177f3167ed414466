"""PlainParser: an answer of text alone."""

from typing import final

from pagedkv.server.parsing.parts import Part, TextPart

__all__ = ["PlainParser"]


@final
class PlainParser:
    """Returns all text as content, at once."""

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        """Return nothing: no text is held back."""
        return []
