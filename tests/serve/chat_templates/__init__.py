"""Chat templates of our own with the constructs of families' real ones, and calls as their models
write them. ``chat_templates.LLAMA`` is the text of ``llama.jinja``."""

from pathlib import Path


def __getattr__(name: str) -> str:
    path = Path(__file__).with_name(f"{name.lower()}.jinja")
    if not path.is_file():
        raise AttributeError(name)
    return path.read_text().removesuffix("\n")
