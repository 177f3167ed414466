"""The engine: any decoder of transformers on memory made of blocks, token for token as it answers by itself.

Needs torch and transformers (``pip install 'pagedkv[hf]'``). In the order in which data flows::

    refusals      models that are refused by name
    probe         one pass of two tokens: what every layer keeps and reads
    mask_rules    which rule a mask follows
    layer_specs   ModelLayers: what the probe saw
    grouping      EngineGroups: groups for the block space, places of layers
    loading       a model and its tokenizer, from a folder or by name
    self_test     the model over blocks against itself, dense; diagnosing: why it answers otherwise
    config        EngineConfig: memory, limits, policies
    kv_scales     KVScales: by what keys and values of eight bits are divided, measured over prompts
    chat          Chat: a conversation as a prompt
    intent        Intent: what is said about a request beside its answer; intent_rules: what it needs of the engine
    request_rules RequestRules: what a request may ask, and what its parameters leave open
    prompts, engine_request, sample, outputs   what is asked for, its answers under way, and what came of it
    llm           LLM: prompts in, answers out
    async_llm     AsyncLLM: the same for event loops; engine_thread drives it, answer_stream is what a caller holds
    core          EngineCore: the loop
    flat_batch    a batch of the scheduler as one row of tokens
    driving       which thread drives an engine
    runner        ModelRunner: passes of a step through the model
    last_tokens   LastTokens: what each row sampled last, on the device, for a step launched before the host has it
    captured_passes            its passes as CUDA graphs; model_watch: whether the model is still what was captured
    compiled_model             the model by torch.compile, attention an operator
    borrowing     a model among engines: one pass at a time
    forward_pass  what the model's calls are answered with
    paged_cache   what the model takes for its cache
    dense         what the model answers by itself, and how far that is certain
    heads, prompt_scores       a model's head by itself: log-probabilities of prompts
    forking, beams             requests that go on from others, and searches among answers
    prompt_lookup PromptLookup: guesses of the tokens that follow
    prediction    PredictedText: guesses from what a request predicts of its answer
    answering     logits in, tokens out: who waits, who fails; sampled_rows says whose they are, with which drafts
    sampling      one token for each row of logits
    records       StepRecord: what a step did
    tiering       EngineTiers: its blocks in host memory, on disk and elsewhere, and back; request_tiers calls them
    ranks         RankGroup: one model on several processes, each with some heads of every layer
    current_pass  which pass is under way
    compat        transformers

No code of any model is here.
"""

from pagedkv.memory.contract.extras import needing

with needing("hf", "pagedkv.engine"):
    import safetensors  # noqa: F401 - first of all, so that the absence of any is told in our words
    import tokenizers  # noqa: F401 - transformers does not say what it lacks
    import torch  # noqa: F401 - as safetensors

from pagedkv.memory.scheduling import Breakpoint
from pagedkv.serving.engine.answer_stream import AnswerStream
from pagedkv.serving.engine.async_llm import AsyncLLM
from pagedkv.serving.engine.chat import Chat
from pagedkv.serving.engine.config import EngineConfig
from pagedkv.serving.engine.core import EngineCore
from pagedkv.serving.engine.engine_request import EngineRequest
from pagedkv.serving.engine.intent import Intent
from pagedkv.serving.engine.kv_scales import KVScales, measure_kv_scales
from pagedkv.serving.engine.llm import LLM
from pagedkv.serving.engine.outputs import Completion, RequestOutput
from pagedkv.serving.engine.prompt_lookup import PromptLookup
from pagedkv.serving.engine.prompts import TokensPrompt
from pagedkv.serving.engine.ranks import RankGroup
from pagedkv.serving.engine.records import StepRecord
from pagedkv.serving.engine.sample import Sample
from pagedkv.serving.engine.sampling import SamplingParams, TokenLogprobs
from pagedkv.serving.engine.tiering import TierCause, TierNote, TierStatistics
from pagedkv.serving.engine.updates import TokenUpdate

__all__ = [
    "LLM",
    "AnswerStream",
    "AsyncLLM",
    "Breakpoint",
    "Chat",
    "Completion",
    "EngineConfig",
    "EngineCore",
    "EngineRequest",
    "Intent",
    "KVScales",
    "PromptLookup",
    "RankGroup",
    "RequestOutput",
    "Sample",
    "SamplingParams",
    "StepRecord",
    "TierCause",
    "TierNote",
    "TierStatistics",
    "TokenLogprobs",
    "TokenUpdate",
    "TokensPrompt",
    "measure_kv_scales",
]
