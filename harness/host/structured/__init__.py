"""Answers of a form: what may come next as masks of tokens, from schemas and grammars."""
