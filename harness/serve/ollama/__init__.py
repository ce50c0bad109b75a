"""Ollama's API: what is said there, as a chat completion or a text, and its answer told back."""
