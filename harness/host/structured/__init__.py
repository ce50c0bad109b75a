"""Structured outputs: token masks from JSON schemas and grammars."""
