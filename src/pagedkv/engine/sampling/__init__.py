"""Sampling: one token for each row of logits, each by its own request's parameters.

::

    parameters   SamplingParams: the parameters of a request
    sequence     the state of one sequence: history, bad words, text, and when it ends
    sampler      a batch: adjusted scores, then drawing (tiles, thresholds, noise), foreign, logprobs
    beams        beam search, scored

Needs torch, and neither a model nor a cache. See ``docs/decisions/0028-sampling.md``.

>>> import torch
>>> params = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=3)
>>> sequence = SampledSequence(params, prompt_ids=[5, 6], vocab_size=8)
>>> answer = BatchSampler(vocab_size=8).sample(torch.arange(8.0)[None], [Place(sequence)])
>>> answer.token_ids
tensor([7], dtype=torch.int32)
>>> sequence.append(answer.token_ids.tolist())
"""

from pagedkv.engine.sampling.beams import BeamSearch, BeamStep, FinishedBeam
from pagedkv.engine.sampling.drawing import seed_of
from pagedkv.engine.sampling.foreign import NOT_READY, LogitsProcessor, TokenMatcher, XGrammarMatcher
from pagedkv.engine.sampling.logprobs import SlicedLogprobs, TokenLogprobs, prompt_logprobs
from pagedkv.engine.sampling.parameters import SamplingParams, bad_words_as_ids
from pagedkv.engine.sampling.sampler import (
    NO_TOKEN,
    BatchSampler,
    PendingTokens,
    Place,
    SampledTokens,
    WaitingRow,
    beam_logprobs,
)
from pagedkv.engine.sampling.sequence import AnswerText, Ending, FinishReason, SampledSequence, StopDetector

__all__ = [
    "NOT_READY",
    "NO_TOKEN",
    "AnswerText",
    "BatchSampler",
    "BeamSearch",
    "BeamStep",
    "Ending",
    "FinishReason",
    "FinishedBeam",
    "LogitsProcessor",
    "PendingTokens",
    "Place",
    "SampledSequence",
    "SampledTokens",
    "SamplingParams",
    "SlicedLogprobs",
    "StopDetector",
    "TokenLogprobs",
    "TokenMatcher",
    "WaitingRow",
    "XGrammarMatcher",
    "bad_words_as_ids",
    "beam_logprobs",
    "prompt_logprobs",
    "seed_of",
]
