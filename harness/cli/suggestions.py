"""What to type instead of an unknown flag or command, also for those of other programs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from contract.errors import ConfigError
from harness.cli.parser import commands, flags_of, nearest

ONE_DEVICE = "one device runs the whole model: choose it with --tier, see zinc-rt devices"
NOT_NEEDED = "nothing needs to be switched on for this: leave it out"
ADVICE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("-ngl", "--ngl", "--n-gpu-layers", "--gpu-layers"), ONE_DEVICE),
        **dict.fromkeys(("-fa", "--flash-attn", "--mlock", "--mmap", "--no-mmap"), NOT_NEEDED),
        **dict.fromkeys(
            ("-hf", "-hfr", "--hf-repo"), "write --model hf.co/ORG/REPO[:QUANT] instead"
        ),
        **dict.fromkeys(
            ("-b", "-ub", "--batch-size", "--ubatch-size"),
            "--chunk sets the most prompt tokens of a step",
        ),
        **dict.fromkeys(
            ("-i", "-it", "-cnv", "--interactive", "--conversation"),
            "use zinc-rt chat for a conversation",
        ),
        **dict.fromkeys(
            ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"),
            "--kv-dtype sets how keys and values are stored",
        ),
        **dict.fromkeys(
            ("-tp", "--tensor-parallel-size"), "--device 0,1 runs one model on several devices"
        ),
        **dict.fromkeys(
            ("--dtype", "--quantization"), "the model file determines how weights are stored"
        ),
        "--gpu-memory-utilization": "--memory-budget sets the most memory, such as 20GB",
        "--api-key": "keys belong to tenants: see zinc-rt tenants add",
        "--verbose": "the last line of an answer has the timings; --debug explains errors",
        "--stream": "answers are always streamed: leave it out",
        "--keepalive": "a served model stays in memory: leave it out",
    }
)
"""Flags of other programs that have no equal here, and what to do instead."""
SURE = 0.8
"""Likeness of two flags from which on one is a misspelling of the other."""
NEAR_COMMAND = 0.75
"""Likeness of a word and a command from which on the command is suggested."""
SAME_COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pull": ("model", "pull"),
        "list": ("model", "list"),
        "ls": ("model", "list"),
        "rm": ("model", "rm"),
        "show": ("inspect",),
        "version": ("--version",),
        "model ls": ("model", "list"),
        "model remove": ("model", "rm"),
        "model delete": ("model", "rm"),
        "model show": ("inspect",),
    }
)
"""Commands of other programs that mean the same as ours, and ours."""
A_FILE_IS_ENOUGH = "a GGUF file is used as it is: zinc-rt run --model FILE.gguf"
COMMAND_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("create", "cp", "import", "push"), A_FILE_IS_ENOUGH),
        "download": "use zinc-rt model pull",
        "models": "use zinc-rt model list",
        "info": "use zinc-rt inspect",
        "generate": "use zinc-rt run",
        "complete": "use zinc-rt run --raw",
        "server": "use zinc-rt serve",
        "start": "use zinc-rt serve",
        "doctor": "use zinc-rt check",
        "benchmark": "use zinc-rt bench",
        "settings": "use zinc-rt config init",
        "login": "models of the hub that need an account are not fetched; download the file",
        "embed": "zinc-rt serve answers at /v1/embeddings, and LLM.embed in Python",
        "tokenize": "zinc-rt serve answers at /tokenize, and LLM.tokenize in Python",
    }
)
"""Commands of other programs, and what does the same here."""


def translated(words: list[str]) -> list[str]:
    """The command line with our command where it begins with one of another program."""
    for count in (2, 1):
        same = SAME_COMMANDS.get(" ".join(words[:count]))
        if same is not None:
            return [*same, *words[count:]]
    return words


def names_model(word: str) -> bool:
    """Whether the word looks like a name of the catalog or the hub, or of a model file."""
    from harness.catalog.entries import ENTRIES
    from harness.catalog.names import is_hub_name

    return len(word.split()) == 1 and (
        word in ENTRIES or is_hub_name(word) or word.endswith(".gguf")
    )


def refuse_foreign_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise ConfigError for a flag of another program, with advice.

    This runs before the words are parsed: ``-ngl 99`` would else be ``-n`` with the value "gl".
    """
    known = flags_of(parser)
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if flag in ADVICE and flag not in known:
            raise ConfigError(f"{flag}: {ADVICE[flag]}; see {parser.prog} --help")


def refuse_arguments(
    parser: argparse.ArgumentParser,
    rest: Sequence[str],
    root: argparse.ArgumentParser,
    prompt: str | None = None,
) -> NoReturn:
    """Raise ConfigError for what the command did not understand.

    The suggestion is a flag of the command itself; else the command of ``root`` that has the flag.
    ``prompt`` is the argument before the rest, which may be meant as a model.
    """
    unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
    if unknown is None:
        first = rest[0] if prompt is None else prompt
        if "--model" in flags_of(parser) and names_model(first):
            takes = f"to name a model, write --model {first}"
        elif parser.prog.endswith(" run"):
            takes = _meant_model(first) or (
                "put a prompt of several words in quotes, or name a model of `zinc-rt model list`"
            )
        else:
            takes = "leave it out"
        raise ConfigError(f"unexpected argument {rest[0]!r}: {takes}; see {parser.prog} --help")
    own = flags_of(parser)
    near = nearest(unknown, own)
    others = [command.prog for command in commands(root) if unknown in flags_of(command)]
    if near is not None and not (others and nearest(unknown, own, SURE) is None):
        hint = f"did you mean {own[near]}?"
    elif others:
        hint = f"it is a flag of {' and '.join(others[:3])}"
    else:
        hint = "no command has it"
    raise ConfigError(f"unknown flag {unknown}: {hint}; see {parser.prog} --help")


def _meant_model(word: str) -> str | None:
    """What to say of a word that is almost the name of a model; None for any other word."""
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
    if word in COMMAND_ADVICE:
        hint = COMMAND_ADVICE[word]
    elif near is not None:
        hint = f"did you mean zinc-rt {near}?"
    else:
        hint = f'to ask a model, zinc-rt run "{word} ..."'
    raise ConfigError(f"there is no command {word!r}; {hint}; see zinc-rt --help")
