"""Ollama's API: its requests become chat completions or texts, whose answers it renders."""
