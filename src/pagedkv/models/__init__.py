"""Sizes of a model's KV cache: the bytes of a token's keys and values in each group, without torch.

Where torch and transformers are installed, :func:`pagedkv.planner.models.read_model` asks a model's own class, and
knows far more types than the table here.

In the order in which data flows::

    config        checked access to the keys of one config.json
    layer_rules   the rule of each layer: full, window, chunk, recurrent
    families      the meaning of the keys for twenty types; elements that an attention layer keeps of a token
    memory        ModelMemory and LayerGroup: the result; bytes of an element and of a recurrent state; pools and blocks
    presets       well-known models, as their classes were recorded
    reader        read_model(): a file or a preset in, a ModelMemory out; the exact number of weights

All are pure functions of a file's content: nothing is downloaded, and of pools only the group specification is used.
"""

from pagedkv.models.memory import LayerGroup, ModelMemory
from pagedkv.models.presets import model_names
from pagedkv.models.reader import read_model

__all__ = ["LayerGroup", "ModelMemory", "model_names", "read_model"]
