"""OpenAI's Responses API: its requests become chat completions, whose answers it renders and
stores."""
