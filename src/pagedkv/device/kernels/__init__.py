"""Kernels: in Triton for GPUs, and in plain torch with the same names and signatures."""
