"""Anthropic's Messages API: its requests become chat completions, whose answers it renders."""
