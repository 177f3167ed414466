"""The demonstration: a small model that can answer correctly only by what it reads in the KV cache.

``trained`` loads the model, which is part of the package (``model``); ``tools/train_demo_model.py`` trained it.
``serving`` has the rest. ``pagedkv demo`` runs it. It needs no other weights, no tokenizer and no network.
"""
