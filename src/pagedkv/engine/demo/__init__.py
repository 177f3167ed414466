"""The demonstration: a small model that can answer correctly only by what it reads in the KV cache.

``model`` is part of the package, 332,416 parameters in float16, 0.7 MB; ``tools/train_demo_model.py`` trained it.
``serving`` has the rest. ``pagedkv demo`` runs it. It needs no other weights, no tokenizer and no network.
"""
