"""``/v1/embeddings``: pooled hidden states of texts or token ids, of length one.

They are those that the model's head would get: the mean over a text's tokens, or that of its last one, by
``ServerConfig.pooling``. Texts are computed as prompts are, in the same batches and over the same blocks; for a mean
the whole text is, cached or not, since cached blocks have keys and values and no hidden states.
"""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, with_config
from starlette.responses import Response
from starlette.types import Receive
from typing_extensions import TypedDict

from pagedkv.engine import RequestOutput, SamplingParams
from pagedkv.server.config import Caller
from pagedkv.server.generation import AnswerEvent, Generation, GenerationRequest, PreparedPrompt
from pagedkv.server.http import ApiError, json_response
from pagedkv.server.openai.answers import CLOSED
from pagedkv.server.openai.requests import LARGEST_COUNT, PromptFields, PromptInput
from pagedkv.server.openai.text_completions import prompts_of
from pagedkv.server.parsing import PlainParser
from pagedkv.server.service import Exchange, Service, new_id

MOST_INPUTS = 2048
"""As OpenAI's."""


class EmbeddingsRequest(PromptFields):
    """The body of ``/v1/embeddings``."""

    model: str | None = None
    input: PromptInput
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] | None = None  # not OpenAI's


@with_config(CLOSED)
class Embedding(TypedDict):
    """The embedding of one input: numbers, or little-endian float32 as base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@with_config(CLOSED)
class EmbeddingUsage(TypedDict):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


@with_config(CLOSED)
class EmbeddingsAnswer(TypedDict):
    """The answer of ``/v1/embeddings``."""

    id: str
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embed(service: Service, body: EmbeddingsRequest, caller: Caller, receive: Receive) -> Response:
    """Embed texts or token ids.

    Raises:
        ApiError: this server serves no embeddings, or these inputs cannot be served.
        ClientGoneError: the client has disconnected.
    """
    if service.config.pooling is None:
        raise ApiError(
            400,
            "this server serves no embeddings: start it with pooling mean or last",
            code="no_embeddings",
        )
    service.require_model(body.model)
    prompts = await service.run_text_work(body.nbytes, partial(_prompts, service, body))
    most = service.config.max_prompts
    request_id = new_id("embd-")
    outputs: list[RequestOutput] = []
    for start in range(0, len(prompts), most):  # so that one request does not take all places of the queue
        request = GenerationRequest(
            "/v1/embeddings",
            request_id,
            caller,
            prompts[start : start + most],
            SamplingParams(max_tokens=1, ignore_eos=True, pooling=service.config.pooling),
            service.decode,
            PlainParser,
            body.deadline_s,
            adapter=service.adapter_named(body.model),
        )
        outputs += await Exchange(service, request, receive).whole(_outputs)
    answer = {
        "id": request_id,
        "object": "list",
        "data": [_told(index, output, body) for index, output in enumerate(outputs)],
        "model": body.model or service.config.model_name,
        "usage": _usage(outputs),
    }
    return json_response(answer, headers=body.headers)


def _prompts(service: Service, body: EmbeddingsRequest) -> list[PreparedPrompt]:
    prompts = prompts_of(service, body.input, body, most=MOST_INPUTS, param="input")
    for place, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise ApiError(400, f"input {place} has no tokens: an empty text has no embedding", param="input")
    return prompts


def _outputs(generation: Generation, answers: Sequence[AnswerEvent]) -> Sequence[RequestOutput]:  # noqa: ARG001 - as called
    return generation.outputs


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _told(index: int, output: RequestOutput, body: EmbeddingsRequest) -> dict[str, Any]:
    """Write one embedding. Raises ApiError for other dimensions than the model has."""
    assert output.pooled is not None, "a request that pools has ended without"
    if body.dimensions not in {None, len(output.pooled)}:
        raise ApiError(
            400,
            f"dimensions is {body.dimensions}, and the model's embeddings have {len(output.pooled)}: parts of them "
            "are no embeddings of their own",
            param="dimensions",
        )
    pooled = np.array(output.pooled)
    vector = (pooled / max(float(np.linalg.norm(pooled)), np.finfo(np.float32).tiny)).astype("<f4")
    is_text = body.encoding_format == "base64"
    return {
        "object": "embedding",
        "index": index,
        "embedding": base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist(),
    }
