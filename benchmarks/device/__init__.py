"""Benchmarks of the body on a GPU: correctness first, then the figures that the design promises."""
