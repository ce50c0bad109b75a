"""The argument parser of every command: errors are exceptions, and help is short or complete."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from contract.errors import ConfigError
from harness.setting_kinds import ENV_PREFIX, UINT64_MAX, SettingKind, integer, number, path_of
from harness.settings import group_of
from harness.settings_table import GROUPS, SETTINGS

EXIT_CODES = """\
exit codes:
  0    done
  1    not ready, a difference was found, or the machine or the program failed
  2    bad input: a file, a flag, a setting or a request that cannot be used
  130  interrupted with Ctrl-C"""
ENVIRONMENT = re.compile(r" \[env [^]]*\]")
"""The part of a help text that names the environment variable."""
FIRST_GROUPS = ("arguments", "commands", "measurement", "input")
LAST_GROUPS = ("options", "other")
GROUP_ORDER = {title: number for number, title in enumerate((*FIRST_GROUPS, *GROUPS, *LAST_GROUPS))}
ALWAYS_RARE = ("config", "debug", "help_all")
DEBUG_ENV = f"{ENV_PREFIX}DEBUG"
MORE = "More options: {prog} --help-all"
MORE_SETTINGS = """
Every option with a default can also be set by an environment variable or in the
configuration file (zinc-rt config init)."""
COMMAND = "COMMAND"
"""How the help names the command of a group."""
MAX_COLUMNS = 78
WHOLE = integer(-UINT64_MAX, UINT64_MAX)
REAL = number(-sys.float_info.max, sys.float_info.max)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows of an option its short flag and its own long one, and no other alias."""

    complete = False

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        values = "" if action.nargs == 0 else f" {self._format_args(action, _metavar(action))}"
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(action.option_strings)
        return ", ".join(shown_flags(action)) + values

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        return text if text is None or self.complete else ENVIRONMENT.sub("", text)


class CompleteFormatter(Formatter):
    """Shows the environment variables too."""

    complete = True


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated flags; a usage error is a ConfigError of one line.

    ``rare`` are the flags that only ``--help-all`` shows, besides settings that are not common."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", Formatter)
        self.appendix = options.pop("appendix", "")
        self.rare: set[str] = set(ALWAYS_RARE)
        super().__init__(**options)
        self._positionals.title = "arguments"
        self.add_argument(
            "--help-all", action=_CompleteHelp, nargs=0, help="show every option and exit"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help; unlike the library's own, raises OSError when the output fails."""
        print(message, end="", file=file)

    def error(self, message: str) -> NoReturn:
        nested = _nested(self)
        if nested is not None and message.endswith(f"required: {COMMAND}"):
            message = f"name a command: {', '.join(nested)}"
        raise ConfigError(f"{message}; see {self.prog} --help")

    def is_rare(self, action: argparse.Action) -> bool:
        """Whether the short help leaves the option out."""
        setting = SETTINGS.get(action.dest)
        return action.dest in self.rare or (setting is not None and not setting.common)

    def format_help(self, complete: bool = False) -> str:
        """The help text; unless ``complete`` of the common options only."""
        kind = CompleteFormatter if complete else Formatter
        formatter = kind(prog=self.prog)
        formatter.add_usage(self._usage(), self._actions, [])
        formatter.add_text(textwrap.fill(_sentence(self.description or ""), MAX_COLUMNS))
        hidden = False
        for group in sorted(self._action_groups, key=_order):
            shown = [
                action for action in group._group_actions if action.help is not argparse.SUPPRESS
            ]
            common = [action for action in shown if not self.is_rare(action)]
            hidden = hidden or any(a.dest not in ALWAYS_RARE for a in shown if a not in common)
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(shown if complete else common)
            formatter.end_section()
        formatter.add_text(self.epilog)
        if complete:
            formatter.add_text(self.appendix)
        elif hidden or self.appendix:
            settings = any(action.dest == "config" for _, action in actions(self))
            formatter.add_text(MORE.format(prog=self.prog) + MORE_SETTINGS * settings)
        return formatter.format_help()

    def _usage(self) -> str:
        """``zinc-rt run [options] [PROMPT]``; options that are required are named."""
        words = ["%(prog)s", "[options]"]
        for action in self._actions:
            if action.option_strings and action.required:
                words.append(f"{shown_flags(action)[-1]} {_metavar(action)}")
            elif not action.option_strings:
                name = str(_metavar(action))
                words.append(f"[{name}]" if action.nargs in ("?", "*") else name)
        return " ".join(words)


class _CompleteHelp(argparse.Action):
    """Prints the complete help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help(complete=True), end="")
        parser.exit()


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a command whose result programs may read."""
    add_switch(group_of(parser, "output"), "--json", help="print one JSON object")


def add_text_source(parser: argparse.ArgumentParser) -> argparse._ActionsContainer:
    """Add the arguments of a text: a file, or the text itself. Returns their group, of which one
    must be given."""
    given = group_of(parser, "input").add_mutually_exclusive_group(required=True)
    given.add_argument("file", nargs="?", metavar="FILE", help="text file; - is standard input")
    given.add_argument("-p", "--prompt", metavar="TEXT", help="the text itself")
    return given


def add_count(
    group: argparse._ActionsContainer, flag: str, default: int, text: str, **options: Any
) -> None:
    """Add a flag for a whole number; its help is ``text`` and the default."""
    text = f"{text} [default: {default}]"
    group.add_argument(flag, type=whole_number, default=default, metavar="N", help=text, **options)


def whole_number(text: str) -> int:
    """The whole number that an argument gives. Raises ArgumentTypeError."""
    return int(_number(WHOLE, text, "a whole number"))


def real_number(text: str) -> float:
    """The finite number that an argument gives. Raises ArgumentTypeError."""
    return float(_number(REAL, text, "a number"))


def _number(kind: SettingKind, text: str, description: str) -> float:
    try:
        found: float = kind.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shortened(text)} is not {description}") from None
    return found


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MAX_COLUMNS else f"{text[:MAX_COLUMNS]}...")


def path_argument(text: str) -> Path:
    """The path that an argument names. Raises ArgumentTypeError."""
    if text == "-":
        raise argparse.ArgumentTypeError("- is no file; standard input and output are not taken")
    try:
        return path_of(text)
    except (ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{_shortened(text)} is not a path: {error}") from None


def add_file(group: argparse._ActionsContainer, *flags: str, help: str) -> None:
    """Add a flag for the path of a file, None if it is not given."""
    group.add_argument(*flags, type=path_argument, metavar="FILE", help=help)


def add_switch(group: argparse._ActionsContainer, *flags: str, help: str) -> None:
    """Add a flag without a value, which is true if it is given."""
    group.add_argument(*flags, action="store_true", help=help)


def add_quiet_flag(parser: argparse._ActionsContainer, printed: str) -> None:
    """Add ``--quiet``, which leaves only what is ``printed`` and errors."""
    parser.add_argument(
        "-q",
        "--quiet",
        dest="silent",
        action="store_true",
        default=argparse.SUPPRESS,
        help=f"print {printed} and errors only: no progress, no notes, no timings",
    )


def add_common_flags(leaf: argparse.ArgumentParser) -> None:
    """Add the flags of every command."""
    leaf.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help=f"show a traceback with every error [env {DEBUG_ENV}]",
    )
    if "--quiet" not in leaf._option_string_actions and isinstance(leaf, Parser):
        leaf.rare.add("silent")
        add_quiet_flag(leaf, "results")


def shown_flags(action: argparse.Action) -> list[str]:
    """The short flag of an option and its first long one."""
    short = [flag for flag in action.option_strings if len(flag) == 2]
    long = [flag for flag in action.option_strings if flag.startswith("--")]
    return [*short[:1], *long[:1]]


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the runnable commands, in order."""
    nested = _nested(parser)
    if nested is None:
        yield parser
        return
    for child in nested.values():
        yield from commands(child)


def inherit_examples(parser: argparse.ArgumentParser) -> None:
    """Add to the help of each nested command without examples those lines of its parent's examples
    that call it."""
    for child in (_nested(parser) or {}).values():
        lines = [
            line
            for line in (parser.epilog or "").splitlines()
            if f"{line} ".startswith(f"  {child.prog} ")
        ]
        if lines and "examples:" not in (child.epilog or ""):
            child.epilog = "\n".join(("examples:", *lines, f"\n{child.epilog or ''}"))
        inherit_examples(child)


def named_parser(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.ArgumentParser, int]:
    """The parser of the command that the first words name, and how many words that are."""
    used = 0
    for word in words:
        nested = _nested(parser)
        if nested is None or word not in nested:
            break
        parser, used = nested[word], used + 1
    return parser, used


def actions(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    """Every flag and argument of every command."""
    for command in commands(parser):
        for action in command._actions:
            yield command, action


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Every flag of one command, and the flag that the help shows for it."""
    return {
        flag: shown_flags(action)[-1]
        for action in parser._actions
        for flag in action.option_strings
    }


def search(parser: argparse.ArgumentParser, word: str) -> list[str]:
    """Lines of help that mention ``word``, or are of the group with that title: commands first,
    then flags and arguments."""
    requested = word.lower()
    found = [
        f"{command.prog}\n    {command.description}"
        for command in commands(parser)
        if requested in f"{command.prog} {command.description}".lower()
    ]
    shared: dict[tuple[str, str], list[str]] = {}
    for command, action in actions(parser):
        if action.help is argparse.SUPPRESS or action.dest in ("help", "help_all"):
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        text = (action.help or "").replace("%%", "%")
        group = getattr(getattr(action, "container", None), "title", "")
        if requested == group or requested in f"{names} {text}".lower():
            shared.setdefault((names, text), []).append(command.prog)
    for (names, text), programs in shared.items():
        found.append(f"{names}  ({', '.join(programs)})\n    {text}")
    return found


def nearest(word: str, known: Collection[str], likeness: float = 0.6) -> str | None:
    """The known word most like ``word``, None if none has that ``likeness`` (at most 1)."""
    from difflib import get_close_matches

    near = get_close_matches(word, sorted(known), n=1, cutoff=likeness)
    return near[0] if near else None


def _nested(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return None


def _sentence(text: str) -> str:
    """The text with a capital letter first and a full stop last."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}." if text else ""


def _order(group: argparse._ArgumentGroup) -> float:
    return GROUP_ORDER.get(str(group.title), GROUP_ORDER[LAST_GROUPS[0]] - 0.5)


def _metavar(action: argparse.Action) -> str:
    if action.metavar is not None:
        return str(action.metavar)
    if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()
