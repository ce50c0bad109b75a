"""Synthetic models: GGUF files of named sizes with random weights, the same bytes on every
machine."""
