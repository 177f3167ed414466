"""What a model's layers keep, asked of its own code: for the engine, and for whoever plans memory.

::

    probing    one pass of two tokens: what every layer keeps and reads; what is refused, and why
    layers     ModelLayers, its result; EngineGroups, groups of a block space made of it
    compat     transformers; access to a model that others share, and the pass under way in a thread
"""

from pagedkv.contract.extras import needing

with needing("hf", "pagedkv.probe"):
    import tokenizers  # noqa: F401 - the error of transformers would not name it
    import torch  # noqa: F401 - so that the absence of either raises MissingExtraError
