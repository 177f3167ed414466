"""The demonstration: a small model whose right answers can come only out of the KV cache.

In the order in which data flows::

    words        the language: one token a word
    facts        documents of facts, drawn by seed, and questions about them
    trained      the model, which travels with the package in ``model``; ``tools/train_demo_model.py`` trained it
    questions    what is asked, in the order in which it comes
    serving      ... and served from too little memory
    meter        ... and what that was like, measured after every step
    judging      ... and judged, beside the documents and dense generation

``pagedkv demo`` drives it. No weights but these are needed, no tokenizer, no network.
"""
