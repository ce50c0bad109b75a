"""The commands of ``zinc-rt chat``: an answer again, taken back, saved, and read back."""

import io
import json
import os
import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract.errors import ConfigError, TemplateError, TemplateRefused
from harness.cli import chat as chat_module
from harness.cli.chat import Chat, take_turns, typed_turns
from harness.cli.conversation_file import read_conversation, save_conversation
from harness.cli.prompt import Messages
from harness.cli.sessions import RUN_SETTINGS
from harness.settings import Settings, resolve
from tests.cli.conftest import Result, Zinc
from tests.full_disk import largest_file

DRAWN = ("--temperature", 1.5, "--max-tokens", 5)
TALK: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "naïve\n日本語 🎉"},
    {"role": "assistant", "content": ""},
]
BEHIND = "/etc is a folder.\n\nIs it?"
"""A message that begins as a command does and has an empty line."""


class Echo:
    """A partner that says the last message again."""

    name = "echo"

    def facts(self, messages: Messages, settings: Settings) -> list[tuple[str, str]]:
        return [("context", f"{len(messages)} messages")]

    def answer(self, messages: Messages, settings: Settings) -> tuple[str, bool]:
        return str(messages[-1]["content"]), False


def talk(zinc: Zinc, model: Path, text: str, *words: object) -> Result:
    result = zinc("chat", "--model", model, *(words or DRAWN), stdin=text.encode())
    assert result.code == 0, result.err
    return result


def test_retry_draws_with_the_next_seed_and_undo_takes_a_turn_back(zinc, tiny_model):
    """The history behind both is that of a conversation without them."""
    again = talk(zinc, tiny_model, "a\nb\n/retry\nc\n/undo\n/undo\n/set seed 0\nb\n").out
    plain = talk(zinc, tiny_model, "a\nb\n").out
    shifted = talk(zinc, tiny_model, "a\n/set seed 1\nb\nc\n").out
    first = talk(zinc, tiny_model, "a\n").out
    second = plain.removeprefix(first)
    assert again == plain + shifted.removeprefix(first) + second


def test_retry_at_temperature_0(zinc, tiny_model):
    """The same answer is not computed again, unless a setting changed."""
    lines = "/retry\nhello\n/retry\n/set max-tokens 3\n/regenerate\n"
    result = talk(zinc, tiny_model, lines, "--max-tokens", 5)
    assert result.err.count("prompt tokens") == 2
    assert "no message to answer again" in result.err
    assert "at temperature 0" in result.err
    long, short = result.out.splitlines()
    assert long.startswith(short)


def test_a_conversation_goes_on_where_it_was_saved(zinc, tiny_model, tmp_path):
    saved = tmp_path / "talk.json"
    whole = talk(zinc, tiny_model, f"/system Be brief.\na\n/save {saved}\nb\n").out
    first = talk(zinc, tiny_model, "/system Be brief.\na\n").out
    assert talk(zinc, tiny_model, f"/load {saved}\nb\n").out == whole.removeprefix(first)
    roles = [message["role"] for message in json.loads(saved.read_text("utf-8"))["messages"]]
    assert roles == ["system", "user", "assistant"]


def test_a_message_of_several_lines(zinc, tiny_model, tmp_path):
    """It is one turn, never a command, whether its fences have lines of their own or not."""
    for number, fenced in enumerate((f'"""\n{BEHIND}\n"""', f'"""{BEHIND}"""')):
        saved = tmp_path / f"{number}.json"
        result = talk(zinc, tiny_model, f"{fenced}\n/save {saved}\n/bye\nunread\n")
        assert read_conversation(str(saved))[0] == {"role": "user", "content": BEHIND}
        assert result.err.count("prompt tokens") == 1


def test_what_answers_is_shown(zinc, tiny_model):
    """And ollama's way of naming a parameter is taken."""
    result = talk(zinc, tiny_model, "/show info\nhello\n/context\n/set parameter seed 4\n")
    shown = [
        line for line in result.err.splitlines() if line.startswith(("model ", "tier ", "context "))
    ]
    assert str(tiny_model) in shown[0]
    assert "exact-" in shown[1]
    empty, used = (int(line.split()[1]) for line in shown if line.startswith("context"))
    assert used > empty == 0
    assert "seed  4" in result.err


@pytest.mark.parametrize("word", ["exit", "quit"])
def test_a_word_leaves_a_terminal(word, monkeypatch):
    """Between fences it is a message."""
    typed = f'a\n\n"""\n{word}\n"""\n{word}\nb\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert list(typed_turns()) == ["a", word]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set colour 3", "'colour' is not one of temperature"),
        ("/set seed -1", "/set seed: '-1' is not accepted; expected a whole number"),
        ("/save", "'' is not a path"),
        ("/load no-such.json", "no-such.json cannot be read"),
    ],
)
def test_a_wrong_command_changes_nothing(line, said):
    chat = Chat(Echo(), resolve(Namespace(), RUN_SETTINGS, {}))
    chat.take("hello")
    before = chat.messages, chat.settings
    with pytest.raises(ConfigError, match=re.escape(said)):
        chat.take(line)
    assert (chat.messages, chat.settings) == before


def test_what_is_forgotten_is_the_older_half_behind_the_system_prompt():
    chat = Chat(Echo(), resolve(Namespace(system="Be brief."), RUN_SETTINGS, {}))
    for turn in "abcde":
        chat.take(turn)
    for left in ("cde", "de", "e", "e"):
        chat.take("/forget")
        assert chat.messages[0] == {"role": "system", "content": "Be brief."}
        assert [one["content"] for one in chat.messages[1::2]] == list(left)
        assert [one["content"] for one in chat.messages[2::2]] == list(left)


def test_a_text_that_is_never_closed(zinc, tiny_model):
    result = zinc("chat", "--model", tiny_model, stdin=b'"""hello\n')
    assert (result.code, result.out) == (2, "")
    assert 'ends in a text that begins with """' in result.err.splitlines()[-1]


def test_what_was_saved_is_read_back_and_may_be_replaced(tmp_path):
    path = tmp_path / "talk.json"
    path.touch()
    for messages in (TALK, [], TALK[:2]):
        assert save_conversation(str(path), messages) == path
        assert read_conversation(str(path)) == messages


def test_a_private_conversation_stays_private(tmp_path):
    """Also where it was saved under a name that is a link to it."""
    path, link = tmp_path / "talk.json", tmp_path / "link.json"
    for named in (path, link):
        path.touch(mode=0o600)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        save_conversation(str(named), TALK)
        assert named.stat().st_mode & 0o777 == 0o600
        path.unlink()


@pytest.mark.parametrize("error", [TemplateRefused("x", "no"), TemplateError("x", "no"), None])
def test_a_turn_that_the_template_refuses_ends_no_conversation(monkeypatch, capsys, error):
    """At a terminal; a file of turns ends there. So may /system and /load lead to one."""
    partner = Refusing(error)
    settings = resolve(Namespace(), RUN_SETTINGS, {})
    monkeypatch.setattr(chat_module, "typed_turns", lambda: iter(["a", "b"]))
    monkeypatch.setattr(chat_module, "piped_turns", lambda: iter(["a", "b"]))
    for interactive in (True, False):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=partial(bool, interactive)))
        partner.asked.clear()
        if interactive or error is None:
            assert take_turns(partner, settings, None) == 0
            assert partner.asked == ["a", "b"]
        else:
            with pytest.raises(type(error)):
                take_turns(partner, settings, None)
            assert partner.asked == ["a"]
    assert ("error:" in capsys.readouterr().err) == (error is not None)


class Refusing(Echo):
    """A partner that raises ``error`` for every message, if there is one."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked: list[object] = []

    def answer(self, messages: Messages, settings: Settings) -> tuple[str, bool]:
        self.asked.append(messages[-1]["content"])
        if self.error is not None:
            raise self.error
        return super().answer(messages, settings)


@pytest.mark.parametrize(
    "more", [{"model": "m"}, {"messages": [{"role": "user", "content": "a", "name": "b"}]}]
)
def test_a_request_with_more_in_it_is_read_and_not_lost(tmp_path, more):
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}], **more}))
    before = path.read_bytes()
    assert read_conversation(str(path)) == [{"role": "user", "content": "a"}]
    with pytest.raises(ConfigError, match="name another file"):
        save_conversation(str(path), TALK)
    assert path.read_bytes() == before


def test_a_full_disk_keeps_the_conversation_that_was_there(tmp_path):
    path = save_conversation(str(tmp_path / "talk.json"), TALK)
    longer = [*TALK, {"role": "user", "content": "a" * 10_000}]
    with largest_file(1000), pytest.raises(ConfigError, match="cannot be written"):
        save_conversation(str(path), longer)
    assert read_conversation(str(path)) == TALK
    assert list(tmp_path.glob("talk*")) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "my notes", "{}", "[" * 5000, '{"messages": {}}', '{"messages": ["hi"]}',
        '{"messages": [{"role": "tool", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)  # fmt: skip
def test_another_file_is_neither_read_nor_lost(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no conversation as /save writes it"):
        read_conversation(str(path))
    with pytest.raises(ConfigError, match="name another file"):
        save_conversation(str(path), TALK)
    assert path.read_text() == text


def test_what_is_no_file_is_not_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("pipe", "no conversation"), (".", "folder"), ("no/file", "not a folder")):
        with pytest.raises(ConfigError, match=said):
            save_conversation(str(tmp_path / name), TALK)
