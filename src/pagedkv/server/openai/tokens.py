"""``POST /tokenize`` and ``/detokenize``, in vLLM's form; and the list of models."""

from typing import Any

from pagedkv.server.access import Caller
from pagedkv.server.errors import ApiError
from pagedkv.server.openai.requests import ChatRequest, DetokenizeRequest, TokenizeRequest, as_chat
from pagedkv.server.service import Service

__all__ = ["detokenize", "model_card", "models", "tokenize"]


def tokenize(service: Service, body: TokenizeRequest, caller: Caller) -> dict[str, Any]:
    """Tokenise a text or a conversation exactly as a completion request would. Raises ApiError."""
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt, a text, or messages, a conversation: one of them")
    if body.messages is not None:
        chat = ChatRequest(messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs)
        token_ids = list(service.chats.prepare(as_chat(chat), caller).token_ids)
    else:
        assert body.prompt is not None
        with_special = body.add_special_tokens is None or body.add_special_tokens
        token_ids = service.encode(body.prompt) if with_special else service.encode_plain(body.prompt)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": service.longest, "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.decode([token], keeps_special=True) for token in token_ids]
    return answer


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """Turn token ids into text. Raises ApiError."""
    service.require_model(body.model)
    service.require_tokenizer()
    beyond = [token for token in body.tokens if token >= service.vocabulary_size]
    if beyond:
        raise ApiError(
            400, f"token {beyond[0]} is beyond the vocabulary of {service.vocabulary_size:,}", param="tokens"
        )
    return {"prompt": service.decode(body.tokens, keeps_special=True)}


def model_card(service: Service) -> dict[str, Any]:
    """Describe the model."""
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "pagedkv",
        "max_model_len": service.longest,
    }


def models(service: Service) -> dict[str, Any]:
    """List the models: the one that is served."""
    return {"object": "list", "data": [model_card(service)]}
