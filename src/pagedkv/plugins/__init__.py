"""Plug-ins: parts of pagedkv inside the engines and trainers of others, one file each.

Each file uses only names that users import, and nothing of pagedkv imports it, so it reads as an example. It imports
the engine that it is for, and is imported by its path: this room has no names of its own.
"""
