"""The engine: decoders of transformers on memory made of blocks. A door: the room is :mod:`pagedkv.serving.engine`."""

from pagedkv.serving.engine import (
    LLM,
    AnswerStream,
    AsyncLLM,
    Chat,
    Completion,
    EngineConfig,
    EngineCore,
    EngineRequest,
    PromptLookup,
    RequestOutput,
    Sample,
    SamplingParams,
    StepRecord,
    TokenLogprobs,
    TokensPrompt,
    TokenUpdate,
)

__all__ = [
    "LLM",
    "AnswerStream",
    "AsyncLLM",
    "Chat",
    "Completion",
    "EngineConfig",
    "EngineCore",
    "EngineRequest",
    "PromptLookup",
    "RequestOutput",
    "Sample",
    "SamplingParams",
    "StepRecord",
    "TokenLogprobs",
    "TokenUpdate",
    "TokensPrompt",
]
