"""The fields of requests that no endpoint serves, and those that change no answer here: one table for all endpoints.

A field that an endpoint serves is declared by its body (:mod:`.openai.requests`, :mod:`.anthropic.bodies`). Any other
field stands here, if OpenAI's or Anthropic's clients or vLLM know it: a request that gives it another value than one
that changes nothing is refused with the reason. All others are unknown: they are named in a header of the
answer and in the log, since new versions of clients send further ones, or refused (``ServerConfig.strict_fields``).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that is refused.

    Args:
        reason: why, and what to do; follows "FIELD is not served: ".
        harmless: values with which the answer is what it would be without the field.
    """

    reason: str
    harmless: tuple[object, ...] = ()


_STRUCTURED: Final = Unserved("give structured_outputs in its place")
_TEXT_ALONE: Final = "this server answers with text alone"
_TOKENS: Final = "ids of tokens are those of /v1/completions and /v1/chat/completions: offsets are not told"
_TRANSFER: Final = Unserved("caches are handed on by tiers here, not by requests")
_HINTS: Final = Unserved("hints about the cache are those of OpenAI's paths: cache_control keeps prompts here")
_BEAMS: Final = "beams are served in Python alone (LLM.beam_search)"
_MEDIA: Final = Unserved("this server takes text alone", ({},))

UNSERVED: Final[Mapping[str, Unserved]] = MappingProxyType(
    {
        # Formats
        "guided_json": _STRUCTURED,
        "guided_regex": _STRUCTURED,
        "guided_choice": _STRUCTURED,
        "guided_grammar": _STRUCTURED,
        "guided_json_object": _STRUCTURED,
        "guided_decoding_backend": _STRUCTURED,
        "guided_whitespace_pattern": _STRUCTURED,
        "response_format": Unserved("constrain answers at /v1/completions or /v1/chat/completions"),
        "output_format": Unserved("give output_config.format in its place"),
        "functions": Unserved("give tools in its place", ([],)),
        "function_call": Unserved("give tool_choice in its place", ("none", "auto")),
        "audio": Unserved(_TEXT_ALONE),
        "image": Unserved(_TEXT_ALONE),
        "modalities": Unserved(_TEXT_ALONE, (["text"], [])),
        "verbosity": Unserved("say in the conversation how long answers are to be", ("medium",)),
        # Sampling
        "allowed_token_ids": Unserved("limit the tokens of answers at /v1/completions or /v1/chat/completions"),
        "bad_words": Unserved("exclude texts at /v1/completions or /v1/chat/completions", ([],)),
        "use_beam_search": Unserved(_BEAMS, (False,)),
        "length_penalty": Unserved(_BEAMS, (1,)),
        "early_stopping": Unserved(_BEAMS, (False,)),
        "best_of": Unserved("this server does not rank answers", (1,)),
        "watermarking": Unserved("answers are not marked", (False, {})),
        "repetition_detection": Unserved("answers are not searched for repetitions: set max_tokens", ({},)),
        "thinking_token_budget": Unserved("thoughts have no bound of their own: set max_tokens"),
        "vllm_xargs": Unserved("this server has no arguments of vLLM's extensions", ({},)),
        # Prompts
        "messages": Unserved("conversations are those of /v1/chat/completions, /v1/messages and /tokenize"),
        "truncate_prompt_tokens": Unserved("this path shortens no prompts"),
        "truncation_side": Unserved("this path shortens no prompts"),
        "truncation": Unserved("prompts are never shortened", ("disabled",)),
        "context_management": Unserved("prompts are never shortened", ([], {})),
        "add_special_tokens": Unserved("the chat template writes all special tokens", (False,)),
        "chat_template": Unserved("a template is a program, and that of the model is used"),
        "chat_template_kwargs": Unserved("this path gives templates no further variables", ({},)),
        "documents": Unserved("write them into a message", ([],)),
        "prompt_embeds": Unserved("prompts are texts or token ids"),
        "mm_payload": _MEDIA,
        "media_io_kwargs": _MEDIA,
        "mm_processor_kwargs": _MEDIA,
        "previous_input_messages": Unserved("give previous_response_id in its place"),
        "kv_hints": _HINTS,
        "nvext": _HINTS,
        "kv_cache_retention_config": _HINTS,
        "cache_salt": Unserved("the salt is that of the API key's tenant"),
        # Answers
        "logprobs": Unserved("log-probabilities are those of /v1/completions and /v1/chat/completions"),
        "prompt_logprobs": Unserved(
            "log-probabilities of prompts are those of /v1/completions and /v1/chat/completions"
        ),
        "logprob_token_ids": Unserved(
            "log-probabilities of named tokens are those of /v1/completions and /v1/chat/completions"
        ),
        "echo": Unserved("prompts are returned by /v1/completions and /v1/chat/completions", (False,)),
        "skip_special_tokens": Unserved("texts of answers have no special tokens", (True,)),
        "spaces_between_special_tokens": Unserved("texts of answers have no special tokens", (True,)),
        "include_stop_str_in_output": Unserved("answers end before the stop text", (False,)),
        "include_reasoning": Unserved("thoughts are always returned, apart from the answer", (True,)),
        "return_token_ids": Unserved(_TOKENS, (False,)),
        "return_tokens_as_token_ids": Unserved(_TOKENS, (False,)),
        "return_token_offsets": Unserved(_TOKENS, (False,)),
        "return_prompt_text": Unserved("prompts are returned by /v1/completions with echo", (False,)),
        "return_mm_kwargs": Unserved("this server takes text alone", (False,)),
        "return_weight_versions": Unserved("answers do not name the version of the weights", (False,)),
        "routed_experts_prompt_start": Unserved("answers do not name experts", (0,)),
        "enable_response_messages": Unserved("answers have items alone", (False,)),
        "priority": Unserved("priorities are those of requests for answers", (0,)),
        "embed_dtype": Unserved("embeddings are float32", ("float32",)),
        "endianness": Unserved("embeddings as base64 are little-endian", ("little",)),
        "use_activation": Unserved("embeddings have length one", (True,)),
        "padding": Unserved("texts are not padded", ("do_not_pad",)),
        # What other servers do themselves
        "web_search_options": Unserved("this server does not search the web"),
        "moderation": Unserved("this server does not judge content"),
        "container": Unserved("this server runs no tools"),
        "mcp_servers": Unserved("this server runs no tools", ([],)),
        "access_programs": Unserved("this server runs no programs", ([],)),
        "background_options": Unserved("answers are not made in the background"),
        "inference_geo": Unserved("this server is in one place"),
        "speed": Unserved("all requests are served at one speed", ("standard",)),
        "kv_transfer_params": _TRANSFER,
        "ec_transfer_params": _TRANSFER,
    }
)

WITHOUT_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "user": "callers are told apart by their keys",
        "safety_identifier": "callers are told apart by their keys",
        "user_profile_id": "callers are told apart by their keys",
        "workspace_id": "callers are told apart by their keys",
        "metadata": "labels of the client's own",
        "request_id": "answers have identities of this server",
        "session_id": "conversations are found by their content",
        "store": "answers of chat and text completions are not kept, and cannot be read again",
        "service_tier": "all requests are of one tier",
        "prompt_cache_key": "cached prompts are found by their content, on every replica",
        "prompt_cache_retention": "prompt_cache_options and breakpoints keep prompts",
        "max_tool_calls": "it bounds tools that a server runs, and this one runs none",
        "stream_interval": "how many tokens a chunk has changes no text",
        "include_obfuscation": "chunks are not padded",
        "stream_options": "chunks of responses and of messages are always the same",
    }
)
"""Fields that change no answer, with the reason."""


UNKNOWN_FIELDS: Final = "x-pagedkv-unknown-fields"
"""Header of answers to requests with unknown fields."""
MOST_TOLD: Final = 8
TELLABLE: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)


def unknown(given: Collection[str]) -> tuple[str, ...]:
    """Return the fields that no list has: at most :data:`MOST_TOLD`, those that can stand in a header.

    Args:
        given: fields of a body that its endpoint does not declare.
    """
    found = (name for name in given if name not in UNSERVED and name not in WITHOUT_EFFECT)
    return tuple(name if TELLABLE.fullmatch(name) else "?" for name in found)[:MOST_TOLD]


def unserved(given: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the first field that cannot be served, and the reason; None: there is none.

    Args:
        given: fields of a body that its endpoint does not declare, with their values.
    """
    for name, value in given.items():
        known = UNSERVED.get(name)
        if known is not None and value is not None and value not in known.harmless:
            return name, known.reason
    return None
