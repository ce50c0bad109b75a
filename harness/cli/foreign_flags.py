"""Flags of other programs: taken where they mean the same, or answered with what to do instead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from contract.errors import ConfigError
from harness.cli.parser import commands, flags_of, nearest
from harness.other_programs import advice

GLUED = re.compile(r"-[ncst][a-z-]")
"""A flag of one letter that takes a number, with what is none: a flag of several letters."""
NEAR = 0.75
"""Likeness of two flags from which on one is suggested for the other."""
SHORTEST_BEGINNING = 4
"""Characters from which on the beginning of a flag, dashes included, is that flag."""
HUB_REPOSITORIES = ("-hf", "-hfr", "--hf-repo")
HUB_FILES = ("-hff", "--hf-file")
HUB = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/")
Root = Callable[[], argparse.ArgumentParser]


def own_spelling(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The command line with ``--max_tokens`` as ``--max-tokens``, and llama.cpp's ``-hf ORG/REPO``
    as ``--model hf.co/ORG/REPO``."""
    known = flags_of(parser)
    own: list[str] = []
    hub: dict[bool, str] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            own.append(word)
            break
        flag, equals, value = word.partition("=")
        if flag in (*HUB_REPOSITORIES, *HUB_FILES) and "--model" in known:
            hub[flag in HUB_FILES] = value if equals else next(rest, "")
        elif flag not in known and (dashed := flag.replace("_", "-")) in known:
            own.append(dashed + equals + value)
        else:
            own.append(word)
    if False in hub:
        name = f"hf.co/{HUB.sub('', hub[False])}" + (f"/{hub[True]}" if True in hub else "")
        own += ["--model", name]
    elif hub:
        own.append(HUB_FILES[-1])
    return [*own, *rest]


def advice_about(word: str) -> list[str]:
    """Lines about the flag of another program that ``word`` names, with or without dashes."""
    known = advice("flags")
    flags = [flag for flag in (word, f"-{word}", f"--{word}") if flag in known]
    return [f"{flag}  (of other programs)\n    {known[flag]}" for flag in flags]


def refuse_foreign_flags(parser: argparse.ArgumentParser, words: Sequence[str], root: Root) -> None:
    """Raise ConfigError that names every flag which the command does not have, with advice.

    ``root`` gives the parser of all commands. This runs before the words are parsed: ``-ngl 99``
    would else be ``-n`` with the value "gl"."""
    hints: dict[str, list[str]] = {}
    for flag in dict.fromkeys(_unknown(flags_of(parser), words)):
        if flag in advice("flags"):
            hints.setdefault(advice("flags")[flag], []).append(flag)
        else:
            hints[flag_hint(flag, parser, root)] = [f"unknown flag {flag}"]
    if hints:
        text = "; ".join(f"{', '.join(flags)}: {hint}" for hint, flags in hints.items())
        raise ConfigError(f"{text}; see {parser.prog} --help")


def _unknown(known: Mapping[str, str], words: Sequence[str]) -> Iterator[str]:
    """The flags among the words that are not ``known``."""
    for word in words:
        flag = word.partition("=")[0]
        if word == "--":
            return
        # What has a space is a text for argparse, too.
        if flag in known or not re.match(r"-[^\d.\s]", flag) or " " in word:
            continue
        glued = flag[:2] in known and not GLUED.match(flag)
        foreign = flag.startswith("--") or f"-{flag}" in known or flag in advice("flags")
        if foreign or not glued:
            yield flag


def flag_hint(flag: str, parser: argparse.ArgumentParser, root: Root) -> str:
    """What to do instead of giving a flag that neither the command nor the table of advice has."""
    own = flags_of(parser)
    if f"-{flag}" in own:
        return f"did you mean -{flag}?"
    begun = [known for known in own if len(flag) >= SHORTEST_BEGINNING and known.startswith(flag)]
    near = begun[0] if begun else nearest(flag, own, NEAR)
    if near is not None:
        return f"did you mean {own[near]}?"
    others = [command.prog for command in commands(root()) if flag in flags_of(command)]
    return f"it is a flag of {' and '.join(others[:3])}" if others else "no command has it"
