"""What serves: a model's answers out of the memory system.

::

    model_folder   the folder of a model, looked at before anything is imported that could run it
    engine         any decoder of transformers on memory made of blocks

Knows no trace and no simulation: what is planned and what is served meet in the scheduler and the space alone.
"""
