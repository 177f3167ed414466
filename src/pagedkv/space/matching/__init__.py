"""How far a prompt is cached."""

from pagedkv.space.matching.match import match_again, match_prompt

__all__ = ["match_again", "match_prompt"]
