"""Anthropic's Messages API: what is said there, as a chat completion, and its answer told back."""
