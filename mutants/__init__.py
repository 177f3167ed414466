"""Mutants: small faults put into the code one at a time, to see whether the tests notice. ``make mutants``.

The faults are listed in the folder ``list``, chosen by hand where a mistake is plausible and dear. Each is made in
a copy of the tree, whose tests run interpreted (``NUMBA_DISABLE_JIT=1``): no machine code that could be stale, nothing
to compile. Why not a ready-made tool: docs/decisions/0010-mutants.md.
"""
