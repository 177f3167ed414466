"""OpenAI's protocols: chat completions, text completions, models; tokenising in vLLM's form."""
