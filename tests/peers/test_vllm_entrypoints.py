"""vLLM's own tests of its HTTP server against ``pagedkv serve`` with a random Llama: which cases fail, and why.

They run as they are in a process of their own, with a plugin in which `RemoteOpenAIServer` starts ours. A case that
fails and is not listed fails here, as does one that is listed and passes.
``python -m tests.peers.test_vllm_entrypoints`` prints the number by file and each case that failed, with what it said.
"""

from typing import Final

FILES: Final = (
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_parsable_context.py",
    "openai/responses/test_simple.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/lora/test_lora_adapters.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
)
"""Of ``tests/entrypoints``: completions, chat, responses, models, tokenize, metrics, access, validation of prompts."""
