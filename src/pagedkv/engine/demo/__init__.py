"""The demonstration: a small model that can answer correctly only by what it reads in the KV cache.

Modules, in the order in which data flows::

    words        the language: one token a word
    facts        documents of facts, drawn by seed, and questions about them
    trained      the model, which is part of the package (``model``); ``tools/train_demo_model.py`` trained it
    questions    requests about the documents, in order of arrival
    serving      serves the requests from too little memory
    meter        measures preemptions, evictions and waste of memory after every step
    answer_check compares the answers with the documents and with dense generation

``pagedkv demo`` runs it. It needs no other weights, no tokenizer and no network.
"""
