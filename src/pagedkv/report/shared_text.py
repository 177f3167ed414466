"""Texts on shared pages, without folders of the machine that made them."""

import re
from typing import Final

__all__ = ["without_folders"]

QUOTED: Final = re.compile(r"'(?:~|[A-Za-z]:)?/(?:[^'/]+/)*([^'/]+)'")
BARE: Final = re.compile(r"(?<![\w.~/\\<-])(?:~|[A-Za-z]:)?/(?:[^\s/'\",;:<>]+/)*([^\s/'\",;:<>]+)")


def without_folders(text: str) -> str:
    """Remove folders from absolute paths and from those in a home; relative paths stay, since they name no home.

    >>> without_folders("pagedkv plan /home/me/trace.jsonl --cost-model=~/cost.json -o 'C:/my files/p.html'")
    "pagedkv plan trace.jsonl --cost-model=cost.json -o 'p.html'"
    >>> without_folders("runs/trace.jsonl by llama-3.1-8b/h100, 1/2 of it")
    'runs/trace.jsonl by llama-3.1-8b/h100, 1/2 of it'
    """
    return BARE.sub(r"\1", QUOTED.sub(r"'\1'", text))
