"""Benchmarks of the bookkeeping: ``make bench``, or ``python -m benchmarks --json FILE``."""
