"""Benchmarks of the bookkeeping: ``make bench``, or ``python -m benchmarks --help``.

The same benchmark files measure this tree and, with ``--against``, an older commit's package. So the modules named in
:mod:`benchmarks.catalogue` import at their top only what both have; a newer name is imported inside the operation that
needs it, and only that operation's rows show a dash beside the older commit.
"""
