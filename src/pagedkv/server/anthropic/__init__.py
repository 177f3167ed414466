"""Anthropic's protocol: messages, whole and streamed, and the count of their tokens."""
