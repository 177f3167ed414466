"""The engine: runs any decoder of transformers on paged memory, with the tokens of its dense generation.

Needs torch and transformers (``pip install 'pagedkv[hf]'``). In the order in which data flows::

    pagedkv.probe    what every layer keeps and reads, asked of the model; transformers
    loading          loads a model and its tokenizer, from a folder or by name
    self_test        the model over blocks against the model by itself, and why they differ
    config           EngineConfig: memory, limits, policies; kv_scales: divisors of keys and values of eight bits
    prompts          prompts of every kind, conversations among them
    request          EngineRequest: one request with its hints, answers, beams and forks; outputs: what callers get
    llm              LLM: prompts in, answers out
    async_llm        AsyncLLM: the same for event loops, and the thread that drives it; answer_stream: their answers
    core             EngineCore: requests in, steps; parts: the model over its blocks, built from a configuration
    broker           MemoryBroker: engines of one process share a device's memory, by a rule
    step             StepLoop: schedule, forward, sample, finish, record; steps that fail; the requests under way
    runner           ModelRunner: a batch in one row, passes of a step through the model, log-probabilities of prompts
    forward_pass     a model's calls of attention and of its cache, over blocks; unfoldings: latents without unfolding
    captured_passes  passes as CUDA graphs; compiled_model: the model by torch.compile; memory_use: bytes on the device
    guessing         drafts from a request's own tokens or a prediction; drafter: from a draft model
    answering        logits in, tokens out, with rows that wait or fail; sampling: one token for each row of logits
    engine_tiers     EngineTiers: cached blocks in host memory, on disk and elsewhere; hand-offs to other engines
    content          the bytes of blocks outside the process; identity: what they are; prefix_file: prefixes as frames
    ranks            RankGroup: one model on several processes, each with some heads of every layer; sharding: which
    ranked_content   what tiers see of them

There is no code of any model here.
"""

from pagedkv.contract.extras import needing

with needing("hf", "pagedkv.engine"):
    import safetensors  # noqa: F401 - first, so that the absence of any of them raises MissingExtraError
    import tokenizers  # noqa: F401 - the error of transformers would not name it
    import torch  # noqa: F401 - as safetensors

    from pagedkv.probe import compat  # noqa: F401 - as above: it imports transformers

from pagedkv.engine.answer_stream import AnswerStream, TokenUpdate
from pagedkv.engine.async_llm import AsyncLLM
from pagedkv.engine.broker import MemoryBroker, share_by_demand
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.core import EngineCore, PoolSize
from pagedkv.engine.engine_tiers import HandOff
from pagedkv.engine.guessing import PromptLookup
from pagedkv.engine.kv_scales import KVScales, measure_kv_scales
from pagedkv.engine.llm import LLM
from pagedkv.engine.outputs import Completion, RequestOutput, StepRecord
from pagedkv.engine.prefix_file import NixlLink
from pagedkv.engine.prompts import Chat, TokensPrompt
from pagedkv.engine.ranks import RankGroup
from pagedkv.engine.request import EngineRequest, Intent, Sample
from pagedkv.engine.sampling import SamplingParams, TokenLogprobs
from pagedkv.scheduling import Breakpoint
from pagedkv.tiers.served import TierCause, TierNote, TierStatistics

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
    "MemoryBroker",
    "NixlLink",
    "PoolSize",
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
    "share_by_demand",
]
