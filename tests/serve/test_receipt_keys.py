"""Keys, chains, trees and the canonical form of receipts."""

import errno
import hashlib
import json
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ConfigError
from contract.types import Tenant
from harness.cli.main import main
from harness.serve.receipts.canonical import canonical
from harness.serve.receipts.document import parse_receipt
from harness.serve.receipts.keys import (
    HISTORY,
    LOCK,
    PRIVATE,
    open_key,
    public_keys,
    rotate_receipt_key,
    verifies,
)
from harness.serve.receipts.store import ReceiptStore, base_payload
from harness.serve.receipts.tree import tree_root
from harness.serve.receipts.verify import chain_verdict
from harness.serve.storage import StorageProblem
from tests.patience import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def a_slow_disk_is_waited_for(monkeypatch) -> None:
    """By whoever waits for a lock."""
    monkeypatch.setattr("harness.serve.receipts.keys.LOCK_SECONDS", 2 * PATIENCE_SECONDS)
    monkeypatch.setattr("harness.serve.storage.BUSY_SECONDS", 2 * PATIENCE_SECONDS)


FACTS = {
    "tenant": {"id": 7, "name": "x"}, "arithmetic": 2, "template": None, "sampling_defaults": {},
    "request": "{}", "prompts": [], "choices": [], "results": [], "usage": {},
    "model": {"name": "m", "architecture": "llama", "layers": 1, "hidden": 1, "vocab": 1,
              "types": [], "kv_dtype": "i12", "files": []},
}  # fmt: skip


def payload(number: int) -> dict[str, Any]:
    return base_payload(f"cmpl-{number}", "completion") | FACTS


def test_a_key_is_its_owners_alone(tmp_path):
    key = open_key(tmp_path / "folder")
    path = tmp_path / "folder" / PRIVATE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert open_key(tmp_path / "folder").public == key.public
    assert verifies(key.public, key.sign(b"a"), b"a")
    assert not verifies(key.public, key.sign(b"a"), b"b")
    assert not verifies("zz", "", b"a")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read"):
        open_key(tmp_path / "folder")
    path.chmod(0o600)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="no Ed25519 key"):
        open_key(tmp_path / "folder")


def test_a_rotated_key_is_signed_by_the_one_before(tmp_path):
    first, second = open_key(tmp_path), rotate_receipt_key(tmp_path)
    third = rotate_receipt_key(tmp_path)
    keys = [first.public, second.public, third.public]
    assert public_keys(tmp_path) == public_keys(tmp_path / HISTORY) == keys
    assert open_key(tmp_path).public == third.public
    lines = (tmp_path / HISTORY).read_text().splitlines()
    entry = json.loads(lines[1])
    forged = json.dumps(entry | {"key": first.public})
    for wrong in ([lines[0], lines[2]], [lines[1]], [lines[0], forged], [lines[2], lines[0]], []):
        path = tmp_path / "wrong.jsonl"
        path.write_text("\n".join(wrong))
        with pytest.raises(ConfigError):
            public_keys(path)


def test_all_who_open_a_new_folder_at_once_have_one_key(tmp_path):
    """As two servers do that start together."""
    for number in range(10):
        folder, begin = tmp_path / str(number), threading.Barrier(4)

        def opened(folder: Path = folder, begin: threading.Barrier = begin) -> str:
            begin.wait()
            return open_key(folder).public

        with ThreadPoolExecutor(4) as threads:
            keys = {each.result() for each in [threads.submit(opened) for _ in range(4)]}
        assert keys == set(public_keys(folder)) == {open_key(folder).public}


def test_rotations_at_once_follow_each_other(tmp_path):
    first = open_key(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        rotated = [threads.submit(rotate_receipt_key, tmp_path) for _ in range(8)]
        made = {each.result().public for each in rotated}
    keys = public_keys(tmp_path)
    assert keys[0] == first.public
    assert set(keys[1:]) == made
    assert len(keys) == 9
    assert keys[-1] == open_key(tmp_path).public


@pytest.mark.parametrize("name", [PRIVATE, HISTORY])
def test_a_rotation_without_room_on_the_disk_changes_nothing(tmp_path, monkeypatch, name):
    """The old key signs, and the next rotation follows it."""
    first, replace = open_key(tmp_path), os.replace

    def full(path: Path, target: Path) -> None:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(ConfigError, match="No space"):
            rotate_receipt_key(tmp_path)
    assert open_key(tmp_path).public == first.public
    second = rotate_receipt_key(tmp_path)
    assert public_keys(tmp_path) == [first.public, second.public]
    assert {path.name for path in tmp_path.iterdir()} == {PRIVATE, HISTORY, LOCK}


def test_what_a_killed_process_wrote_of_a_key_goes(tmp_path):
    """It may be a private key; a copy of the owner's stays."""
    key = open_key(tmp_path)
    killed = [tmp_path / f".{name}.{number:016x}.partial" for name in (PRIVATE, HISTORY)
              for number in (1, 99999)]  # fmt: skip
    names = (f"{PRIVATE}.old", f"{PRIVATE}.1.bak", f"{PRIVATE}.20261129", f"{HISTORY}.1", "7")
    kept = [tmp_path / name for name in (*names, f"{PRIVATE}.{os.getpid()}")]
    for path in killed + kept:
        path.write_bytes((tmp_path / PRIVATE).read_bytes())
    assert open_key(tmp_path).public == key.public
    assert [path for path in killed if path.exists()] == []
    rotate_receipt_key(tmp_path)
    assert all(path.exists() for path in kept)


def test_what_another_process_writes_of_a_key_stays(tmp_path, monkeypatch):
    """Who opens the folder meanwhile waits for it, and has the key that it made."""
    open_key(tmp_path)
    replace, opened = os.replace, []

    def meanwhile(source: str | Path, target: str | Path) -> None:
        if not opened and Path(target).name == PRIVATE:
            opened.append(others.submit(open_key, tmp_path))
            time.sleep(0.2)
            assert Path(source).exists()
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    with ThreadPoolExecutor(1) as others:
        key = rotate_receipt_key(tmp_path)
        assert opened[0].result().public == key.public
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((LOCK, PRIVATE, HISTORY))


def test_a_key_without_its_public_half_gets_it_again(tmp_path):
    """A process that ended between the two files; without the private key nothing is made."""
    key = open_key(tmp_path)
    (tmp_path / HISTORY).unlink()
    assert open_key(tmp_path).public == key.public
    assert public_keys(tmp_path) == [key.public]
    (tmp_path / PRIVATE).unlink()
    with pytest.raises(ConfigError, match="is missing"):
        open_key(tmp_path)
    assert public_keys(tmp_path) == [key.public]


def test_a_key_that_goes_while_a_store_is_open_is_a_problem_of_storage(tmp_path):
    """Gone, readable by others, or no key at all; then it is back, and the chain goes on."""
    with ReceiptStore(tmp_path) as store:
        store.add(7, payload(1), [])
        path = tmp_path / PRIVATE
        pem = path.read_bytes()

        def readable() -> None:
            path.write_bytes(pem)
            path.chmod(0o644)

        for spoil in (path.unlink, readable, lambda: path.write_text("nothing")):
            spoil()
            with pytest.raises(StorageProblem, match=r"the receipts .* cannot be used"):
                store.add(7, payload(2), [])
        path.write_bytes(pem)
        path.chmod(0o600)
        assert store.add(7, payload(2), [])["payload"]["number"] == 2


def test_a_running_store_signs_with_a_rotated_key(tmp_path):
    with ReceiptStore(tmp_path) as store:
        before = store.add(7, payload(1), [])
        rotated = rotate_receipt_key(tmp_path)
        after = store.add(7, payload(2), [])
    receipts = [parse_receipt(json.dumps(one).encode(), "r") for one in (before, after)]
    assert receipts[1].signature.key == rotated.public
    assert {one.signature.key for one in receipts} == set(public_keys(tmp_path))
    assert all(one.is_signed for one in receipts)
    assert chain_verdict(receipts) == []


def test_a_chain_stays_one_with_many_writers(tmp_path):
    """Two stores of one folder, as two processes have, and several threads each."""
    with ReceiptStore(tmp_path) as first, ReceiptStore(tmp_path) as second:

        def write(store: ReceiptStore, start: int) -> None:
            for number in range(start, start + 10):
                store.add(7 if number % 2 else 8, payload(number), [])

        threads = [
            threading.Thread(target=write, args=(store, start))
            for start, store in enumerate((first, second, first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ReceiptStore(tmp_path) as store:
        assert store.tenants() == {7: 20, 8: 20}
        chain = [parse_receipt(text.encode(), "r") for text in store.exported(7)]
        assert store.listed(Tenant(7, "x"), 18, 100)[-1]["sha256"] == chain[-1].digest
        assert store.find(Tenant(8, "x"), "cmpl-1") is None
    assert [one.payload.number for one in chain] == list(range(1, 21))
    assert chain_verdict(chain) == []


def test_files_of_a_store_are_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        with ReceiptStore(tmp_path / "folder") as store:
            store.add(7, payload(1), [])
            modes = {
                path.name: stat.S_IMODE(path.stat().st_mode)
                for path in (tmp_path / "folder").iterdir()
            }
    finally:
        os.umask(before)
    del modes[HISTORY]
    assert set(modes.values()) == {0o600}


def test_the_tree_is_that_of_rfc_9162():
    """The roots that Certificate Transparency's own tests have for these leaves."""
    leaves = [bytes.fromhex(text) for text in (
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )]  # fmt: skip
    roots = {
        0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    }
    for count, root in roots.items():
        assert tree_root(leaves[:count]).hex() == root
    one = hashlib.sha256(b"\0" + b"x").digest()
    assert tree_root([b"x"]) == one


def test_the_canonical_form_is_that_of_rfc_8785():
    """The example of the standard, and its table of numbers."""
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": '\u20ac$\u000f\nA\'B"\\\\"/',
        "literals": [None, True, False],
    }
    assert canonical(value).decode() == (
        '{"literals":[null,true,false],'
        '"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    for number, text in (
        (0.0, "0"), (-0.0, "0"), (5e-324, "5e-324"), (-5e-324, "-5e-324"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (9007199254740992.0, "9007199254740992"),
        (295147905179352830000.0, "295147905179352830000"),
        (9.999999999999997e22, "9.999999999999997e+22"), (1e23, "1e+23"), (1e21, "1e+21"),
        (999999999999999900000.0, "999999999999999900000"), (0.000001, "0.000001"), (1e-7, "1e-7"),
        (333333333.33333325, "333333333.33333325"),
        (-0.0000033333333333333333, "-0.0000033333333333333333"),
    ):  # fmt: skip
        assert canonical(number).decode() == text
    order = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\u0080": 6, "\u00f6": 7}
    assert list(json.loads(canonical(order)).values()) == [2, 4, 6, 7, 1, 5, 3]
    for wrong in (float("nan"), float("inf"), 2**53):
        with pytest.raises(ValueError, match=r"beyond|not a JSON number"):
            canonical(wrong)


def test_the_command_makes_rotates_and_exports(tmp_path, capsys):
    flags = ["--receipts", str(tmp_path)]
    assert main(["receipts", "list", *flags]) == 2
    assert main(["receipts", "key", *flags]) == 0
    first = capsys.readouterr().out
    with ReceiptStore(tmp_path) as store:
        store.add(7, payload(1), [])
        store.add(7, payload(2), [])
    assert main(["receipts", "key", "--rotate", *flags]) == 0
    assert capsys.readouterr().out.startswith(first)
    assert main(["receipts", "list", *flags]) == 0
    assert "7         2" in capsys.readouterr().out
    assert main(["receipts", "export", "local", *flags]) == 2
    assert "'local' is not a tenant's number" in capsys.readouterr().err
    assert main(["receipts", "export", "7", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    receipts = [parse_receipt(line.encode(), "r") for line in lines]
    assert chain_verdict(receipts) == []
    assert [one.payload.number for one in receipts] == [1, 2]
