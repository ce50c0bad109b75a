"""OpenAI's Responses API: parse, render, stream, errors and stored answers."""
