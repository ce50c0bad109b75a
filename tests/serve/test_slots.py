"""llama.cpp's slots: a conversation saved to a file, restored in another server, and erased."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from contract.arithmetic import PAGE_TOKENS
from contract.errors import ConfigError
from harness.serve.llama_cpp import slot_files
from harness.serve.run import Running
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from tests.held_steps import hold_steps
from tests.serve.engine_child import check_memory, flush_disk, statistics_of
from tests.serve.http import Http
from tests.serve.tenants import write_tenants

Json = dict[str, Any]
PROMPT = "The quick brown fox jumps over the lazy dog and comes back again. "
ASKED: Json = {"n_predict": 20, "seed": 5, "ignore_eos": True, "return_tokens": True}
FILE = {"filename": "fox.bin"}


def keyed(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def continued(http: Http, key: str = "", **more: Any) -> Json:
    return http.post("/completion", {"prompt": PROMPT, **ASKED, **more}, **keyed(key)).answer


def act(http: Http, action: str, slot: object = 0, key: str = "", **body: Any) -> Json:
    return http.post(f"/slots/{slot}?action={action}", body, **keyed(key)).answer


def refused(http: Http, action: str, slot: object = 0, key: str = "", **body: Any) -> Json:
    reply = http.post(f"/slots/{slot}?action={action}", body, **keyed(key))
    return {"status": reply.status, **reply.json["error"]}


@pytest.fixture(scope="module")
def models(tiny_model_path, tmp_path_factory) -> dict[str, Path]:
    """A model of attention alone, and one with recurrent layers."""
    hybrid = tmp_path_factory.mktemp("slots") / "hybrid.gguf"
    write_synthetic(hybrid, sized_spec("tiny", architecture="qwen35", quant="q8_0", context=256))
    return {"dense": tiny_model_path, "hybrid": hybrid}


@pytest.mark.parametrize(("kind", "slots"), [("dense", 2), ("hybrid", 1)])
def test_a_conversation_goes_on_in_another_server(serve, models, tmp_path, kind, slots):
    folder = tmp_path / "saved"
    with serve(path=models[kind], slots=slots, slot_save_path=folder) as first:
        http = Http(first.url)
        told = continued(http, id_slot=slots - 1)
        assert told["id_slot"] == slots - 1
        saved = act(http, "save", slots - 1, **FILE)
        more = http.post("/tokenize", {"content": " And then?"}).json["tokens"]
        talk = http.post("/tokenize", {"prompt": PROMPT}).json["tokens"] + told["tokens"] + more
        cold = continued(http, prompt=talk)
        assert saved["n_saved"] % PAGE_TOKENS == 0 < saved["n_saved"]
        assert saved["n_written"] == (folder / "fox.bin").stat().st_size
        assert [each["is_processing"] for each in http.get("/slots").json] == [False] * slots
    with serve(path=models[kind], slots=slots, slot_save_path=folder) as second:
        http = Http(second.url)
        restored = act(http, "restore", **FILE)
        assert (restored["n_restored"], restored["n_read"]) == (
            saved["n_saved"],
            saved["n_written"],
        )
        assert http.get("/slots").json[0]["n_tokens"] == restored["n_restored"]
        warm = continued(http, prompt=talk)
        assert warm["tokens"] == cold["tokens"]
        assert warm["tokens_cached"] >= restored["n_restored"] > 0
        second.service.model.driver.call(check_memory)


def test_an_erased_conversation_is_computed_again(serve, tmp_path):
    with serve(slot_save_path=tmp_path, disk_cache=tmp_path / "cache") as server:
        http = Http(server.url)
        before = continued(http, id_slot=1)
        assert continued(http, id_slot=1)["tokens_cached"] > 0
        erased = act(http, "erase", 1)
        assert erased["n_erased"] == before["tokens_evaluated"] + before["tokens_predicted"]
        server.service.model.driver.call(flush_disk)
        again = continued(http, id_slot=1)
        assert (again["tokens_cached"], again["tokens"]) == (0, before["tokens"])
        other = continued(http, prompt=PROMPT + "Another end.", id_slot=2)
        assert other["tokens_cached"] > 0
        act(http, "erase", 2)
        assert continued(http, id_slot=1)["tokens_cached"] > 0, "what others begin with stays"
        assert refused(http, "save", 3, **FILE)["code"] == "slot_empty"


def damaged(kind: str, data: bytes) -> bytes:
    """The bytes of a file after an accident."""
    middle = len(data) // 2
    changed = bytes([data[middle] ^ 1])
    files = {
        "cut": data[:-1], "cut in its header": data[:40], "longer": data + b"\0",
        "changed": data[:middle] + changed + data[middle + 1 :], "empty": b"",
        "foreign": b"GGUF" + data[4:], "older": data[:16] + b"\0" + data[17:],
        "count": data[:52] + b"\xff\xff" + data[54:],
    }  # fmt: skip
    return files[kind]


KINDS = ("cut", "cut in its header", "longer", "changed", "empty", "foreign", "older", "count")


def test_a_file_that_is_not_whole_is_refused(serve, tmp_path):
    with serve(slot_save_path=tmp_path) as server:
        http = Http(server.url)
        told = continued(http)
        act(http, "save", **FILE)
        file = tmp_path / "fox.bin"
        sound = file.read_bytes()
        for kind in KINDS:
            file.write_bytes(damaged(kind, sound))
            error = refused(http, "restore", **FILE)
            assert (error["status"], error["code"]) == (400, "slot_file_refused"), kind
        file.unlink()
        file.symlink_to("/etc/passwd")
        assert refused(http, "restore", **FILE)["code"] == "slot_file_refused"
        file.unlink()
        assert refused(http, "restore", **FILE)["status"] == 404
        file.write_bytes(sound)
        act(http, "restore", **FILE)
        assert continued(http)["tokens"] == told["tokens"]


def test_a_file_of_another_model_or_folder_is_refused(serve, models, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    with serve(slot_save_path=one) as server:
        continued(Http(server.url))
        act(Http(server.url), "save", **FILE)
    with serve(slot_save_path=two) as server:
        (two / "fox.bin").write_bytes((one / "fox.bin").read_bytes())
        assert refused(Http(server.url), "restore", **FILE)["code"] == "slot_file_refused"
    with serve(slot_save_path=one, path=models["hybrid"]) as server:
        message = refused(Http(server.url), "restore", **FILE)["message"]
        assert "another model" in message


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../fox", "/etc/passwd", "a/b", "a\\b", ".secret", "a\0b", "é", "x" * 128],
)
def test_a_name_stays_in_its_folder(slotted, name):
    http = Http(slotted.url)
    continued(http)
    for action in ("save", "restore"):
        error = refused(http, action, filename=name)
        assert (error["status"], error["param"]) == (400, "filename")


@pytest.fixture(scope="module")
def slotted(serve, tmp_path_factory) -> Running:  # type: ignore[misc]
    with serve(slot_save_path=tmp_path_factory.mktemp("slotted")) as server:
        yield server  # type: ignore[misc]


def test_what_is_refused(slotted, server):
    http = Http(slotted.url)
    assert refused(http, "defrag")["param"] == "action"
    assert refused(http, "save")["param"] == "filename"
    for slot in (4, -1, "x", "9" * 30):
        assert refused(http, "erase", slot)["param"] == "id_slot"
    assert http.post("/completion", {"prompt": "a", "id_slot": 4}).error["param"] == "id_slot"
    without = refused(Http(server.url), "save", **FILE)
    assert without["status"] == 501
    assert "--slot-save-path" in without["message"]
    assert len(Http(server.url).get("/slots?fail_on_no_slot=1").json) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_for_a_slot_that_is_none_is_not_computed(serve, monkeypatch, stream):
    """It was submitted, since the prompt's slot is chosen by its tokens."""
    steps = hold_steps(monkeypatch)
    with serve() as server:
        http, driver = Http(server.url), server.service.model.driver
        reply = http.post("/completion", {"prompt": "a", **ASKED, "id_slot": 4, "stream": stream})
        assert (reply.status, reply.error["param"]) == (400, "id_slot")
        assert driver.call(statistics_of).waiting == 0
        assert driver._streams == {}
        steps.allow()


def test_prompts_choose_the_slot_they_continue(slotted):
    http = Http(slotted.url)
    slots = [continued(http, prompt=f"{letter} story: {PROMPT}")["id_slot"] for letter in "ABC"]
    assert len(set(slots)) == 3
    assert [continued(http, prompt=f"{x} story: {PROMPT}!")["id_slot"] for x in "CAB"] == [
        slots[2],
        slots[0],
        slots[1],
    ]


def test_tenants_have_slots_and_files_of_their_own(serve, tmp_path):
    admin, folder = {"admin": True}, tmp_path / "saved"
    file = write_tenants(tmp_path, {"ann": "ann", "bob": "bob"}, ann=admin, bob=admin)
    with serve(slot_save_path=folder, tenants=file) as server:
        http = Http(server.url)
        continued(http, "ann", id_slot=0)
        act(http, "save", 0, "ann", **FILE)
        assert http.get("/slots", **keyed("bob")).json[0]["n_tokens"] == 0
        assert refused(http, "save", 0, "bob", **FILE)["code"] == "slot_empty"
        assert refused(http, "restore", 0, "bob", **FILE)["status"] == 404
        continued(http, "bob", id_slot=0)
        act(http, "save", 0, "bob", **FILE)
        anns, bobs = sorted(folder.glob("*/fox.bin"), key=lambda path: path.stat().st_mtime_ns)
        bobs.write_bytes(anns.read_bytes())
        assert refused(http, "restore", 0, "bob", **FILE)["code"] == "slot_file_refused"
        assert http.send("DELETE", "/v1/tenants/ann", None, keyed("bob")).status == 200
        assert not anns.exists()
        assert bobs.exists()


def test_a_full_disk_saves_nothing_and_leaves_nothing(slotted, monkeypatch):
    http = Http(slotted.url)
    continued(http, id_slot=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slot_files.os, "fsync", full)
    error = refused(http, "save", 0, filename="full.bin")
    assert (error["status"], error["code"]) == (503, "disk_full")
    monkeypatch.undo()
    files = slotted.service.slots.files
    assert files is not None
    assert {path.name for path in files.path.iterdir()} == {".secret"}


def test_a_server_that_caches_nothing_saves_nothing(serve, tmp_path):
    with pytest.raises(ConfigError, match="--ray"), serve(slot_save_path=tmp_path, replicas=1):
        pass


def test_a_name_that_is_no_slot_is_told_as_it_is(hermes):
    for name in ("abc", "-1", "1.5", "0x1", "99", "9999999999", "%D9%A3"):
        reply = Http(hermes.url).post(f"/slots/{name}?action=erase", {})
        assert (reply.status, reply.error["param"]) == (400, "id_slot"), name
        assert unquote(name) in reply.error["message"]


def test_a_file_that_is_no_saved_slot_is_not_overwritten(serve, tmp_path):
    """A client names the file, and the folder may have others, also behind a link."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF and so on")
    (tmp_path / "link.bin").symlink_to(tmp_path / "model.gguf")
    with serve(slot_save_path=tmp_path) as server:
        http = Http(server.url)
        continued(http, id_slot=0)
        for name in ("model.gguf", "link.bin"):
            answer = refused(http, "save", filename=name)
            assert (answer["status"], answer["param"]) == (400, "filename")
        assert act(http, "save", **FILE)["n_saved"] == act(http, "save", **FILE)["n_saved"]
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF and so on"
    assert (tmp_path / "link.bin").is_symlink()


def test_a_secret_of_another_program_stays(tmp_path):
    (tmp_path / slot_files.SECRET).write_bytes(b"a password")
    with pytest.raises(ConfigError, match="another program's"):
        slot_files.SlotFolder(tmp_path)
    assert (tmp_path / slot_files.SECRET).read_bytes() == b"a password"
