"""Tokens per second of the engine on a CPU, beside transformers' own ways, checked for equal answers first."""
