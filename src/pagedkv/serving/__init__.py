"""Serving: runs models on the memory system, and answers requests.

::

    model_folder   checks the folder of a model before the packages that run it are imported
    engine         any decoder of transformers on memory made of blocks
    server         OpenAI's and Anthropic's protocols over one engine
    cluster        several engines as replicas, behind one HTTP front

It does not depend on traces and simulations: serving and planning share only the scheduler and the space.
"""
