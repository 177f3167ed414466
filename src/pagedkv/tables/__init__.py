"""Rows and block tables: the operations on sequences in one group, as compiled loops over whole batches.

Reading order: ``rows`` (the record of a sequence) and ``rules`` (what a query reads), then one operation a module, with
the same name as in :mod:`pagedkv.space`: ``matching``, ``first_allocation``, ``growing``, ``truncating``,
``forking``, ``sliding``, ``swapping``, ``releasing``; ``digesting``, ``publishing`` and ``merging`` (naming of
content); ``pending`` (which row computes a block that others wait for), ``declaring``, ``planning``, ``aborting``,
``kernel_inputs``.

The names imported here are for rooms of other wings: what a rule still reads. The room ``space`` builds on this one and
imports its modules directly.
"""

from pagedkv.tables.rows import rule_of
from pagedkv.tables.rules import first_needed_token

__all__ = ["first_needed_token", "rule_of"]
