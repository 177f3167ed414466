"""The engine: any decoder of transformers on memory made of blocks, token for token as it answers by itself.

Needs transformers (``pip install 'pagedkv[hf]'``). In the order in which data flows::

    refusals      models that are refused by name
    probe         one pass of two tokens: what every layer keeps and reads
    mask_rules    which rule a mask follows
    layer_specs   ModelLayers: what the probe saw
    grouping      EngineGroups: groups for the block space, places of layers
    self_test     the model over blocks against itself, dense
    config        EngineConfig: memory, limits, policies
    params, engine_request     what is asked for, and what came of it
    llm           LLM: prompts in, answers out
    core          EngineCore: the loop
    flat_batch    a batch of the scheduler as one row of tokens
    runner        ModelRunner: passes of a step through the model
    forward_pass  what the model's calls are answered with
    paged_cache   what the model takes for its cache
    sampler       logits in, tokens out
    records       StepRecord: what a step did
    ambient       which pass is under way
    compat        transformers

No code of any model is here.
"""

from pagedkv.engine.config import EngineConfig
from pagedkv.engine.core import EngineCore
from pagedkv.engine.engine_request import Completion, EngineRequest, RequestOutput, Sample
from pagedkv.engine.llm import LLM, TokenUpdate
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.records import StepRecord
from pagedkv.engine.sampler import GreedySampler, Sampler, SampleRow

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "EngineCore",
    "EngineRequest",
    "GreedySampler",
    "RequestOutput",
    "Sample",
    "SampleRow",
    "Sampler",
    "SamplingParams",
    "StepRecord",
    "TokenUpdate",
]
