"""Suggestions for unknown commands and arguments, including those of other programs."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from contract.errors import ConfigError
from harness.cli.foreign_flags import flag_hint
from harness.cli.parser import flags_of, nearest
from harness.other_programs import advice

PATH = re.compile(r"(?:\.{0,2}|~)/|\.{1,2}$")
"""How a path begins that is no name: ``/``, ``./``, ``../`` or ``~/``; or a folder, ``.``."""
MODEL_FILES = (".gguf", ".ggml", ".safetensors", ".bin", ".pt", ".pth", ".onnx")
FAMILIES = (
    "llama|codellama|tinyllama|mistral|mixtral|gemma|qwen|phi|deepseek|gpt-oss|granite|smollm"
)
TAG = r"(?:latest|e?\d+(?:\.\d+)?[bm]\b[\w.-]*)"
LIBRARY_NAME = re.compile(
    rf"(?:[\w.-]+/)?(?:[\w.-]+:{TAG}|(?:{FAMILIES})[\d.]*(?:-[\w.-]+)*(?::[\w.-]+)?)"
)
"""A name as ollama's library has them: a tag with a size, or a family and its version."""
NEAR_COMMAND = 0.75
"""Likeness of a word and a command from which on the command is suggested."""
SAME_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "pull": ("model", "pull"),
    "list": ("model", "list"),
    "ls": ("model", "list"),
    "rm": ("model", "rm"),
    "show": ("inspect",),
    "version": ("--version",),
    "batch": ("run-batch",),
    "model ls": ("model", "list"),
    "model remove": ("model", "rm"),
    "model delete": ("model", "rm"),
    "model show": ("inspect",),
}
"""Commands of other programs that mean the same as ours, and ours."""


def translated(words: list[str]) -> list[str]:
    """The command line with our command where it begins with one of another program."""
    for count in (2, 1):
        same = SAME_COMMANDS.get(" ".join(words[:count]))
        if same is not None:
            return [*same, *words[count:]]
    return words


def names_model(word: str) -> bool:
    """Whether the word looks like a name of the catalog, the hub or ollama's library, or like that
    of a model file or of a folder of them."""
    from harness.catalog.entries import ENTRIES
    from harness.catalog.names import ADDRESS, is_hub_name

    return len(word.split()) == 1 and (
        word in ENTRIES
        or is_hub_name(word)
        or ADDRESS.fullmatch(word) is not None
        or is_gguf(word)
        or (PATH.match(word) is not None and not is_file(word))
        or word.lower().endswith(MODEL_FILES)
        or LIBRARY_NAME.fullmatch(word.lower()) is not None
    )


def is_gguf(path: str) -> bool:
    """Whether the file of this path begins as GGUF files do, whatever its name."""
    if not is_file(path):
        return False
    from reference.model.gguf.header import MAGIC

    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_file(word: str) -> bool:
    """Whether a file has this path."""
    return "\0" not in word and os.path.isfile(word)


def refuse_arguments(
    parser: argparse.ArgumentParser,
    rest: Sequence[str],
    root: argparse.ArgumentParser,
    prompt: str | None = None,
) -> NoReturn:
    """Raise ConfigError for what the command did not understand.

    The suggestion is a flag of the command itself; else the command of ``root`` that has the flag.
    ``prompt`` is the argument before the rest, which may be meant as a model."""
    unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
    if unknown is not None:
        problem = f"unknown flag {unknown}: {flag_hint(unknown, parser, lambda: root)}"
        raise ConfigError(f"{problem}; see {parser.prog} --help")
    first = rest[0] if prompt is None else prompt
    if "--model" in flags_of(parser) and names_model(first):
        takes = f"to name a model, write --model {first}"
    elif parser.prog.endswith(" run") and is_file(first):
        takes = f"{first} is no model file; -f {first} reads a prompt from it"
    elif parser.prog.endswith(" run"):
        takes = _meant_model(first) or (
            "put a prompt of several words in quotes, or name a model of `zinc-rt model list`"
        )
    else:
        takes = "leave it out"
    raise ConfigError(f"unexpected argument {rest[0]!r}: {takes}; see {parser.prog} --help")


def _meant_model(word: str) -> str | None:
    """Advice about a word that resembles a model's name; None for any other word."""
    from harness.catalog.entries import suggestion

    hint = suggestion(word) if len(word.split()) == 1 else ""
    return f"no model is called {word!r}, {hint}" if hint.startswith("did you mean") else None


def refuse_command(
    words: Sequence[str], root: argparse.ArgumentParser, known: Sequence[str]
) -> NoReturn:
    """Raise ConfigError for a command line whose first word that is no flag is no command."""
    word = next(word for word in words if not word.startswith("-"))
    near = nearest(word, known, NEAR_COMMAND)
    if words[0] != word and words[0] not in flags_of(root):
        hint = f"name a command before {words[0]}, such as zinc-rt run {words[0]} {word} ..."
        raise ConfigError(f"{hint}; see zinc-rt --help")
    if word in advice("commands"):
        hint = advice("commands")[word]
    elif near is not None:
        hint = f"did you mean zinc-rt {near}?"
    else:
        hint = f'to ask a model, zinc-rt run "{word} ..."'
    raise ConfigError(f"there is no command {word!r}; {hint}; see zinc-rt --help")
