"""The argument parser of every command: errors are exceptions, and help can be searched."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NoReturn

from contract.errors import ConfigError

EXIT_CODES = """\
exit codes:
  0    done
  1    not ready, a difference was found, or a fault of the program (see --debug)
  2    bad input: a file, a flag, a setting or a request that cannot be used
  130  interrupted with Ctrl-C"""


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated flags; a usage error is a ConfigError of one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}{self._nearest(message)}; see {self.prog} --help")

    def _nearest(self, message: str) -> str:
        """A clause that suggests the known flag closest to the first unknown one, or ""."""
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        if not unknown.startswith("--") or unknown == message:
            return ""
        from difflib import get_close_matches

        known = {flag for _, action in actions(self) for flag in action.option_strings}
        near = get_close_matches(unknown.partition("=")[0], sorted(known), n=1)
        return f"; did you mean {near[0]}?" if near else ""


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the runnable commands, in order."""
    nested = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    if not nested:
        yield parser
    for action in nested:
        for child in action.choices.values():
            yield from commands(child)


def actions(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    """Every flag and argument of every command."""
    for command in commands(parser):
        for action in command._actions:
            yield command, action


def search(parser: argparse.ArgumentParser, word: str) -> list[str]:
    """Lines of help that mention ``word``: commands first, then flags and arguments."""
    requested = word.lower()
    found = [
        f"{command.prog}\n    {command.description}"
        for command in commands(parser)
        if requested in f"{command.prog} {command.description}".lower()
    ]
    shared: dict[tuple[str, str], list[str]] = {}
    for command, action in actions(parser):
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        text = (action.help or "").replace("%%", "%")
        if requested in f"{names} {text}".lower() and not isinstance(action, argparse._HelpAction):
            shared.setdefault((names, text), []).append(command.prog)
    for (names, text), programs in shared.items():
        found.append(f"{names}  ({', '.join(programs)})\n    {text}")
    return found
