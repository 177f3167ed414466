"""Formats of answers as token matchers: JSON of a schema, a regular expression, forced tool calls.

::

    compiling        Grammars: one tokenizer's grammars, compiled once and cached
    forced_calls     calls in the formats of the parsers
    matcher          GrammarMatcher: one sequence's state in a grammar

Needs the extra ``grammar`` (llguidance).
"""

from pagedkv.server.grammars.compiling import Grammars
from pagedkv.server.grammars.matcher import GrammarMatcher

__all__ = ["GrammarMatcher", "Grammars"]
