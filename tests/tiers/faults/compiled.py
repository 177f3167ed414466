"""Loops of stores, compiled in the process that imports this: processes that it forks have them at once."""

from pagedkv.warming import of_stores

of_stores("lru").compile()
