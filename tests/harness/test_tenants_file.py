"""Changing a file of tenants: one change at a time, whole, with the comments that were there."""

import errno
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.cached_files import PARTIAL
from contract.errors import ConfigError
from contract.types import QosClass, Tenant
from harness import tenants_file
from harness.cli.main import main
from harness.serve.keys import Keyring, key_digest
from harness.serve.ledger_store import Counts, LedgerStore
from harness.tenants import Account, read_accounts
from harness.tenants_file import add_tenant, remove_tenant, rotate_key
from tests.paths import ROOT
from tests.tables import table

WRITTEN = """\
# the people of the lab
[tenant.alice]  # since May
id = 4
keys = [
    "sha256:0000000000000000000000000000000000000000000000000000000000000000",  # laptop
]

# at night only
[tenant.nightly]
id = 2
qos = "batch"
"""


def accounts(path: Path) -> dict[str, Account]:
    return {account.tenant.name: account for account in read_accounts(path)}


def owner(path: Path, key: str) -> int | None:
    """Whose key it is."""
    pairs = ((digest, each.tenant.id) for each in read_accounts(path) for digest in each.keys)
    return Keyring(pairs).tenant_of(key)


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(WRITTEN)
    return path


def test_a_file_is_made_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "tenants.toml"
    key = add_tenant(path, "alice", {"qos": "interactive", "max_slots": 2, "admin": True})
    (account,) = read_accounts(path)
    assert (account.tenant.id, account.tenant.name, account.tenant.max_slots) == (1, "alice", 2)
    assert account.tenant.qos is QosClass.INTERACTIVE
    assert account.admin
    assert owner(path, key) == 1
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_others_wrote_stays(path):
    """Comments, order and mode, through every change."""
    path.chmod(0o640)
    add_tenant(path, "bob", {})
    assert accounts(path)["bob"].tenant.id == 5
    rotate_key(path, "nightly")
    remove_tenant(path, "5")
    text = path.read_text()
    assert text.startswith(WRITTEN.rstrip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert set(os.listdir(path.parent)) == {"tenants.toml", ".tenants.toml.lock"}


def test_keys_are_replaced_at_once_or_over_time(path):
    first = rotate_key(path, "alice")
    assert accounts(path)["alice"].keys == (key_digest(first),)
    second = rotate_key(path, "4", keep_old=True)
    assert (owner(path, first), owner(path, second)) == (4, 4)
    third = rotate_key(path, "alice", keep_old=True)
    assert (owner(path, first), owner(path, second), owner(path, third)) == (None, 4, 4)


def test_an_id_something_is_counted_under_is_not_given_again(path):
    add_tenant(path, "bob", {}, min_id=9)
    assert accounts(path)["bob"].tenant.id == 9


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    table(__file__, "test_tenants_file")["a_change_that_is_refused_changes_nothing"],
)
def test_a_change_that_is_refused_changes_nothing(path, name, values, problem):
    with pytest.raises(ConfigError, match=problem):
        add_tenant(path, name, values)
    assert path.read_text() == WRITTEN


def test_somebody_keeps_a_key(path):
    for change in (rotate_key, remove_tenant):
        with pytest.raises(ConfigError, match="there is no tenant 'bob'"):
            change(path, "bob")
    with pytest.raises(ConfigError, match="no tenant would have a key left"):
        remove_tenant(path, "alice")
    assert path.read_text() == WRITTEN
    path.write_text("[tenant.alice]\nid = 1\n")
    with pytest.raises(ConfigError, match="alice is its only tenant; add another"):
        remove_tenant(path, "alice")
    path.write_text("[tenant.alice]\nid = 1\nid = 2\n")
    with pytest.raises(ConfigError, match="cannot change it"):
        rotate_key(path, "alice")
    with pytest.raises(ConfigError, match="no such file of tenants"):
        rotate_key(path.with_name("none.toml"), "alice")


def test_a_write_that_fails_leaves_the_file(path, monkeypatch):
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tenants_file.os, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        rotate_key(path, "alice")
    assert path.read_text() == WRITTEN
    assert len(os.listdir(path.parent)) == 2


@pytest.mark.parametrize("words", [("add", "bob"), ("rotate", "alice")], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("number", "code"), [(errno.EPIPE, 141), (errno.ENOSPC, 1), (errno.EBADF, 1)]
)
def test_a_key_that_cannot_be_shown_is_not_in_the_file(path, monkeypatch, words, number, code):
    """It would be lost, and with ``rotate`` the old one, too."""

    class Unwritable(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as changed:
        changed.setattr("sys.stdout", Unwritable())
        assert main(["tenants", *words, "--tenants", str(path)]) == code
    assert path.read_text() == WRITTEN
    assert not [name for name in os.listdir(path.parent) if name.endswith(PARTIAL)]
    assert main(["tenants", *words, "--tenants", str(path)]) == 0
    assert path.read_text() != WRITTEN


def test_what_a_killed_writer_left_goes_with_the_next_change(path):
    killed = path.with_name(f".{path.name}.{'0a' * 8}.partial")
    kept = [path.with_name(f".{path.name}.{end}") for end in ("20261128", "backup", "partial")]
    for one in (killed, *kept):
        one.write_text("")
    rotate_key(path, "alice")
    assert not killed.exists()
    assert all(one.exists() for one in kept)


def test_two_who_change_it_at_once_lose_nothing(path):
    program = (
        "import sys; from pathlib import Path; from harness.tenants_file import add_tenant\n"
        "for i in range(10): add_tenant(Path(sys.argv[1]), f'{sys.argv[2]}{i}', {})\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(path), name], cwd=ROOT)
        for name in ("b", "c")
    ]
    assert [process.wait() for process in running] == [0, 0]
    assert len(accounts(path)) == 22


@given(st.text())
def test_no_name_breaks_the_file(name):
    if tenants_file.NAME.fullmatch(name):
        assert name.isprintable()
        assert not name.isdecimal()
        assert "/" not in name


def test_the_commands(path, tmp_path, capsys):
    """add, list, usage, rotate and rm, as they are typed."""
    ledger = tmp_path / "ledger.sqlite"
    with LedgerStore(ledger) as store:
        store.add(Tenant(7, "dora"), Counts(requests=3, prompt_tokens=1000))
        store.add(Tenant(6, "eve"), Counts(requests=3, prompt_tokens=1000))
    where = ["--tenants", str(path)]

    def run(*words: str) -> str:
        assert main(["tenants", *words, *where]) == 0
        return capsys.readouterr().out

    more = ("--models", "qwen3-0.6b, tiny", "--ledger", str(ledger))
    key = run("add", "bob", "--qos", "batch", "--weight", "0.5", *more).split()[-1]
    assert accounts(path)["bob"].models == ("qwen3-0.6b", "tiny")
    assert owner(path, key) == accounts(path)["bob"].tenant.id == 8
    assert accounts(path)["bob"].tenant.weight == 0.5
    run("add", "dora", "--id", "7")
    run("add", "finn", "--id", "6")
    listed = {row["name"]: row for row in json.loads(run("list", "--json"))}
    assert set(listed) == {"alice", "bob", "nightly", "dora", "finn"}
    assert (listed["bob"]["qos"], listed["bob"]["keys"]) == ("batch", 1)
    assert "sha256" not in json.dumps(listed)
    used = json.loads(run("usage", "--json", "--ledger", str(ledger)))
    assert (used["dora"]["prompt_tokens"], used["alice"]["prompt_tokens"]) == (1000, 0)
    assert used["finn"]["prompt_tokens"] == 0  # the usage of its number is another's
    assert "1,000" not in run("usage", "finn", "--ledger", str(ledger))
    assert "1,000" in run("usage", "dora", "--ledger", str(ledger))
    fresh = run("rotate", "bob").removesuffix("\n")
    assert (owner(path, key), owner(path, fresh)) == (None, 8)
    run("rm", "bob")
    assert "bob" not in accounts(path)
    assert main(["tenants", "usage", "bob", "--ledger", str(ledger), *where]) == 2
    assert "there is no tenant 'bob'" in capsys.readouterr().err
    assert main(["tenants", "list"]) == 2
    assert "give --tenants FILE" in capsys.readouterr().err
