"""The floor of rows and tables: what happens to the sequences of one group, as compiled loops over whole batches.

Reading order: ``rows`` (what is known of a sequence) and ``rules`` (what a query reads), then an operation a module,
under the name that it has in :mod:`pagedkv.memory.space`: ``matching``, ``first_allocation``, ``growing``,
``truncating``, ``forking``, ``sliding``, ``swapping``, ``releasing``; ``digesting``, ``publishing`` and ``merging``
(how content becomes findable); ``pending`` (who computes what others wait for), ``declaring``, ``planning``,
``aborting``, ``kernel_inputs``.

What is named here is for rooms of other wings: what a rule still reads. ``space`` stands on this floor, and uses its
modules as they are.
"""

from pagedkv.memory.tables.rows import rule_of
from pagedkv.memory.tables.rules import first_needed_token

__all__ = ["first_needed_token", "rule_of"]
