"""Loops of stores, compiled in the process that imports this: processes that it forks have them at once."""

from pagedkv.tiers.core import rehearse

rehearse("lru")
