"""The engine: runs any decoder of transformers on paged memory, with the tokens of its dense generation.

Needs torch and transformers (``pip install 'pagedkv[hf]'``). In the order in which data flows::

    refusals      models that are refused by name
    probe         finds out what every layer keeps and reads, by one pass of two tokens
    mask_rules    the group rule of a mask
    layer_specs   ModelLayers: the result of the probe
    grouping      EngineGroups: groups for the block space, places of layers
    loading       loads a model and its tokenizer, from a folder or by name
    self_test     compares the model over blocks with the dense model; diagnosing: why they differ
    config        EngineConfig: memory, limits, policies
    kv_scales     KVScales: divisors of keys and values of eight bits, measured over prompts
    chat          Chat: a conversation as a prompt
    intent        Intent: hints about caching and scheduling; intent_rules: what they need of the engine
    request_rules RequestRules: limits of requests, and defaults of their parameters
    prompts, engine_request, sample, outputs   prompts, requests, their answers and outputs
    llm           LLM: prompts in, answers out
    async_llm     AsyncLLM: the same for event loops; engine_thread: its thread; answer_stream: a request's answers
    core          EngineCore: requests in, steps; engine_parts: the model over its blocks, built from a configuration
    step_loop     StepLoop: schedule, forward, sample, finish; live_requests: the requests under way
    flat_batch    a batch of the scheduler as one row of tokens
    driving       Driver: the lock of an engine
    runner        ModelRunner: passes of a step through the model
    last_tokens   LastTokens: the last sampled token of each row, on the device, for the next step of an overlap
    captured_passes            passes as CUDA graphs; model_watch: whether the model changed since their capture
    compiled_model             the model by torch.compile, attention an operator
    borrowing     access to a model that engines share: one pass at a time
    forward_pass  computes the model's calls of attention and of its cache
    paged_cache   the model's cache object
    dense         dense generation by the model itself, and how certain its choices are
    heads, prompt_scores       a model's head alone; log-probabilities of prompts
    forking, beams             forks of requests, and beam searches
    prompt_lookup PromptLookup: drafts by lookup in a request's own tokens
    prediction    PredictedText: drafts from a request's prediction of its answer
    answering     logits in, tokens out, with rows that wait or fail; sampled_rows: the sequence and drafts of each row
    sampling      one token for each row of logits
    records       StepRecord: counts and times of a step
    tiering       EngineTiers: cached blocks in host memory, on disk and elsewhere
    ranks         RankGroup: one model on several processes, each with some heads of every layer
    current_pass  the pass under way in a thread
    compat        transformers

There is no code of any model here.
"""

from pagedkv.contract.extras import needing

with needing("hf", "pagedkv.engine"):
    import safetensors  # noqa: F401 - first, so that the absence of any of them raises MissingExtraError
    import tokenizers  # noqa: F401 - the error of transformers would not name it
    import torch  # noqa: F401 - as safetensors

from pagedkv.engine.answer_stream import AnswerStream
from pagedkv.engine.async_llm import AsyncLLM
from pagedkv.engine.chat import Chat
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.core import EngineCore
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.intent import Intent
from pagedkv.engine.kv_scales import KVScales, measure_kv_scales
from pagedkv.engine.llm import LLM
from pagedkv.engine.outputs import Completion, RequestOutput
from pagedkv.engine.prompt_lookup import PromptLookup
from pagedkv.engine.prompts import TokensPrompt
from pagedkv.engine.ranks import RankGroup
from pagedkv.engine.records import StepRecord
from pagedkv.engine.sample import Sample
from pagedkv.engine.sampling import SamplingParams, TokenLogprobs
from pagedkv.engine.tiering import HandOff, NixlLink, TierCause, TierNote, TierStatistics
from pagedkv.engine.updates import TokenUpdate
from pagedkv.scheduling import Breakpoint

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
    "HandOff",
    "Intent",
    "KVScales",
    "NixlLink",
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
