"""The types of prompts: a text, token ids, token ids with an adapter, embeddings or media, or a conversation.

Adapters, embeddings and media have fields here, and in the keys of blocks
(:class:`~pagedkv.contract.keys.RequestKeys`), but the engine cannot compute with them yet: it refuses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from pagedkv.engine.chat import Chat, Message
from pagedkv.errors import RequestError

__all__ = ["Prompt", "TokensPrompt"]


@dataclass(frozen=True, slots=True, eq=False)
class TokensPrompt:
    """Token ids, with an adapter, embeddings or media.

    Args:
        token_ids: of the prompt.
        lora_name: adapter of the weights; not served yet.
        inputs_embeds: float ``[tokens, width]`` in place of embeddings of the ids; not served yet.
        media_positions: ``(first, stop)`` of the placeholder tokens of images or sound; not served yet.
    """

    token_ids: Sequence[int]
    lora_name: str | None = None
    inputs_embeds: torch.Tensor | None = None
    media_positions: Sequence[tuple[int, int]] = ()

    def require_supported(self) -> None:
        """Raise RequestError for fields that the engine does not serve yet."""
        requested = {
            "lora_name": self.lora_name is not None,
            "inputs_embeds": self.inputs_embeds is not None,
            "media_positions": len(self.media_positions) > 0,
        }
        for name, is_requested in requested.items():
            if is_requested:
                raise RequestError(f"{name} is not served by this engine yet: leave it out")


Prompt: TypeAlias = str | Sequence[int] | TokensPrompt | Chat | Sequence[Message]
