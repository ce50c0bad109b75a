"""Ollama's API: its requests become chat completions or completions, whose answers it renders."""
