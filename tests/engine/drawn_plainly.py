"""Drawing an answer as plainly as can be: dense passes over everything, processors of transformers, the same noise."""

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as theirs

from pagedkv.engine import SamplingParams
from pagedkv.engine.sampling.drawing import gumbel, keys_of, words
from tests.engine.serving import Reference

__all__ = ["draw_plainly"]

CLOSE: Final = 1e-3


def draw_plainly(
    model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams, seed: int, sample: int = 0
) -> Reference:
    """Draw tokens one by one, each from a pass over all before it.

    A draw is certain as long as the two greatest sums of score and noise are not closer than the stated tolerance.
    """
    ids, certain = list(prompt), -1
    assert params.max_tokens is not None
    for number in range(params.max_tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[:, -1].float()
        scores = _processors(params, len(prompt))(cast("Any", torch.tensor([ids])), cast("Any", logits))[0]
        if not params.is_greedy:
            key = keys_of(*(torch.tensor([each]) for each in (seed, sample, len(ids))))
            scores = scores.double() + gumbel(words(key[:, None], torch.arange(len(scores))))[0]
        top = scores.topk(2).values
        if certain < 0 and float(top[0] - top[1]) < CLOSE:
            certain = number
        ids.append(int(scores.argmax()))
    return Reference(ids[len(prompt) :], params.max_tokens if certain < 0 else certain)


def _processors(params: SamplingParams, num_prompt: int) -> LogitsProcessorList:
    """List processors in the order of ``generate``; presence and frequency penalties it does not have."""
    listed = LogitsProcessorList()
    if params.logit_bias:
        bias: Any = {(token,): each for token, each in params.logit_bias.items()}
        listed.append(theirs.SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty != 1:
        listed.append(theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    listed.append(_Counted(params, num_prompt))
    if params.bad_words:
        listed.append(theirs.NoBadWordsLogitsProcessor(cast("Any", [list(word) for word in params.bad_words])))
    if not params.is_greedy:
        listed.append(theirs.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        listed.append(theirs.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        listed.append(theirs.TopPLogitsWarper(params.top_p))
    if params.min_p:
        listed.append(theirs.MinPLogitsWarper(params.min_p))
    return listed


class _Counted:
    """Presence and frequency penalties, counted afresh each time."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self._params = params
        self._num_prompt = num_prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Subtract them."""
        counts = torch.bincount(ids[0, self._num_prompt :], minlength=scores.shape[1]).float()
        params = self._params
        return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
