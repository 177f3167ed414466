"""Hit ratios of a model with sliding windows, beside those of vLLM's rule: ``python -m benchmarks.windows``.

One full group and five windows of 128 tokens, block size 16; prompts are prefilled in chunks of 512 tokens, one request
after another. Hit ratios are exact counts, not times: a run gives the same figures on every machine.
"""
