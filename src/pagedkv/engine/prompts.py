"""Prompts of every kind: a text, token ids, token ids with embeddings or media, or a conversation.

A conversation is written down by the template of the model's tokenizer. transformers renders it
(``apply_chat_template``); errors of a conversation are raised here.

Embeddings and media have fields here, and media in the keys of blocks (:class:`~pagedkv.contract.keys.RequestKeys`),
but the engine cannot compute with them yet: it refuses them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import torch

from pagedkv.errors import RequestError

Message: TypeAlias = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, with any other keys of the template."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, with what its template is to be told. A plain list of messages is one without.

    Args:
        messages: what was said, at least one.
        tools: functions that the model may call, as the template takes them.
        template: another one than the tokenizer's.
        is_continued: the last message is to be continued; else the template opens the model's own.
        options: further variables of the template.
        opens_answer: the template opens the model's message, unless one is continued; else what follows is anybody's.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template: str | None = None
    is_continued: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True


def is_chat(prompt: object) -> TypeGuard[Chat | Sequence[Message]]:
    """Return whether a prompt is a conversation. Raises RequestError for a message that is not in a list."""
    if isinstance(prompt, Mapping):
        raise RequestError("a message stands by itself: give each prompt as a list of messages")
    if isinstance(prompt, Chat):
        return True
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def chat_token_ids(tokenizer: object, chat: Chat | Sequence[Message]) -> list[int]:
    """Turn a conversation into token ids, special tokens included, by the tokenizer's template.

    Args:
        tokenizer: one of transformers, or whatever has its ``apply_chat_template``; None: there is none.
        chat: the conversation.

    Raises:
        RequestError: there is no template, the conversation is none, or the template refuses it.
    """
    token_ids = _applied(tokenizer, chat, return_dict=False)
    return list(token_ids)


def chat_text(tokenizer: object, chat: Chat | Sequence[Message]) -> str:
    """Write a conversation by the tokenizer's template, special tokens as text. Raises as :func:`chat_token_ids`."""
    return str(_applied(tokenizer, chat, tokenize=False))


def _applied(tokenizer: object, chat: Chat | Sequence[Message], **how: object) -> Any:  # noqa: ANN401 - the tokenizer's
    chat = chat if isinstance(chat, Chat) else Chat(chat)
    _require_messages(chat.messages)
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None or (chat.template is None and not getattr(tokenizer, "chat_template", None)):
        whose = "the engine has no tokenizer" if tokenizer is None else "its tokenizer has no chat template"
        raise RequestError(
            f"it is a list of messages, but {whose}: give it one (LLM(tokenizer=...), tokenizer.chat_template, "
            "Chat(template=...)), or a text, or token ids"
        )
    options = dict(chat.options)
    if chat.tools is not None:
        options["tools"] = list(chat.tools)
    if chat.template is not None:
        options["chat_template"] = chat.template
    try:
        return apply(
            list(chat.messages),
            add_generation_prompt=chat.opens_answer and not chat.is_continued,
            continue_final_message=chat.is_continued,
            **how,
            **options,
        )
    except Exception as problem:  # what a template raises is its author's choice
        raise RequestError(f"the chat template refuses it: {problem}") from problem


def _require_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("a conversation needs at least one message, and this one is empty")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {place} must be a mapping with a role, as user or system, got {message!r}")


@dataclass(frozen=True, slots=True, eq=False)
class TokensPrompt:
    """Token ids, with embeddings or media. An adapter is chosen by ``Intent.adapter``.

    Args:
        token_ids: of the prompt.
        inputs_embeds: float ``[tokens, width]`` in place of embeddings of the ids; not served yet.
        media_positions: ``(first, stop)`` of the placeholder tokens of images or sound; not served yet.
    """

    token_ids: Sequence[int]
    inputs_embeds: torch.Tensor | None = None
    media_positions: Sequence[tuple[int, int]] = ()

    def require_supported(self) -> None:
        """Raise RequestError for fields that the engine does not serve yet."""
        requested = {
            "inputs_embeds": self.inputs_embeds is not None,
            "media_positions": len(self.media_positions) > 0,
        }
        for name, is_requested in requested.items():
            if is_requested:
                raise RequestError(f"{name} is not served by this engine yet: leave it out")


Prompt: TypeAlias = str | Sequence[int] | TokensPrompt | Chat | Sequence[Message]
