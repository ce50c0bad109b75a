"""Keys, whose they are, what they open, and what is kept of their use."""

import base64
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from contract.errors import ConfigError
from contract.types import Tenant
from harness.serve import accounts
from harness.serve.keys import Keyring, key_digest, new_key, presented_key
from harness.serve.ledger_store import Counts, LedgerStore
from harness.serve.routes import ROUTES
from harness.serve.run import Running
from harness.tenants import Account, named_account, read_accounts
from tests.serve.conftest import wait_for_rest
from tests.serve.engine_child import tenant_of
from tests.serve.http import Http, bearer, posted
from tests.serve.tenants import write_tenants

ALICE, BOB, OPERATOR = new_key(), new_key(), new_key()
BODY = {"prompt": "abc", "max_tokens": 3}


def tenants_file(folder: Path, *, alice: str = ALICE) -> Path:
    return write_tenants(
        folder,
        {"alice": alice, "bob": BOB, "root": OPERATOR},
        alice={"qos": "interactive"},
        bob={"qos": "batch", "max_context": 32},
        root={"operator": True},
    )


@pytest.fixture(scope="module")
def keyed(serve, tmp_path_factory) -> Iterator[Running]:
    with serve(tenants=tenants_file(tmp_path_factory.mktemp("tenants"))) as server:
        yield server


def test_every_route_but_probes_needs_a_key(keyed):
    """Also those that are not there, and other spellings of those that are."""
    http = Http(keyed.url)
    paths = [
        (route.method, route.path) for route in ROUTES if route.path not in ("/health", "/ready")
    ]
    assert len(paths) > 10
    more = (
        *("/nowhere", "/page/nowhere", "/operator/", "/page/../v1/models", "//v1/models"),
        *("/v1/%6dodels", "/health/x", "/./v1/models"),
    )
    for method, path in [*paths, *(("GET", path) for path in more)]:
        for headers in ({}, bearer(new_key()), bearer(""), bearer(key_digest(ALICE))):
            reply = http.send(method, path, b"{}", headers)
            assert (reply.status, b"API key" in reply.body) == (401, True), path
    assert http.get("/health").json == {"status": "ok"}


def test_a_key_opens_the_routes_of_its_tenant(keyed):
    http = Http(keyed.url)
    assert http.get("/v1/tenants/1/usage", **bearer(ALICE)).status == 200
    assert http.get("/v1/tenants/alice/usage", **bearer(ALICE)).status == 200
    assert http.get("/v1/tenants/2/usage", **bearer(ALICE)).status == 404
    assert http.get("/v1/tenants/2/usage", **bearer(OPERATOR)).status == 200
    assert http.get("/metrics", **bearer(ALICE)).status == 403
    assert http.get("/metrics", **bearer(OPERATOR)).status == 200


def test_the_pages_need_no_key_and_nothing_of_a_tenant_is_in_them(keyed):
    """A page asks for the key itself. A file is only read: whatever else is done with it is not."""
    http = Http(keyed.url)
    for path in ("/", "/operator", "/page/js/key.js", "/page/css/base.css"):
        assert http.get(path).status == 200
        assert http.send("POST", path, b"{}", {}).status == 405
        assert b"alice" not in http.get(path).body


def test_a_key_may_be_sent_as_a_password_but_no_browser_is_told_to(keyed):
    pair = base64.b64encode(f"anybody:{ALICE}".encode()).decode()
    http = Http(keyed.url)
    assert http.get("/v1/models", Authorization=f"Basic {pair}").status == 200
    assert http.get("/v1/models").headers["WWW-Authenticate"].startswith("Bearer ")


def test_the_client_sends_its_key(keyed):
    with OpenAI(base_url=f"{keyed.url}/v1", api_key=ALICE, max_retries=0) as client:
        answer = client.completions.create(model="tiny", **BODY)
        assert answer.model_extra is not None
        assert answer.model_extra["x_zinc"]["tenant"] == "alice"
        assert answer.model_extra["service_tier"] == "priority"
    with (
        OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_limits_are_the_tenants(keyed):
    http = Http(keyed.url)
    long = {"prompt": list(range(40)), "max_tokens": 3}
    assert http.post("/v1/completions", long, **bearer(ALICE)).status == 200
    refused = http.post("/v1/completions", long, **bearer(BOB))
    assert refused.error["code"] == "context_length_exceeded"
    usage = http.get("/v1/tenants/bob/usage", **bearer(BOB)).json
    assert usage["total"]["rejected"] == 1
    assert usage["tenant"] == {"id": 2, "name": "bob", "qos": "batch"}


def test_usage_is_what_the_client_saw(keyed):
    """Streamed or not, and split between tenants."""
    http = Http(keyed.url)
    before = http.get("/v1/tenants/alice/usage", **bearer(ALICE)).json["total"]
    other = http.get("/v1/tenants/bob/usage", **bearer(BOB)).json["total"]
    told = http.post("/v1/completions", BODY, **bearer(ALICE)).json["usage"]
    http.post("/v1/completions", {**BODY, "stream": True}, **bearer(ALICE))
    after = http.get("/v1/tenants/alice/usage", **bearer(ALICE)).json["total"]
    assert after["requests"] - before["requests"] == 2
    assert after["completed"] - before["completed"] == 2
    assert after["prompt_tokens"] - before["prompt_tokens"] == 2 * told["prompt_tokens"]
    assert 0 < after["completion_tokens"] - before["completion_tokens"] <= 6
    assert http.get("/v1/tenants/bob/usage", **bearer(BOB)).json["total"] == other


def test_metrics_count_by_tenant(keyed):
    http = Http(keyed.url)
    http.post("/v1/completions", BODY, **bearer(ALICE))
    wait_for_rest(keyed)
    text = http.get("/metrics", **bearer(OPERATOR)).body.decode()
    for name in (
        'zinc_rt:generation_tokens_total{qos="interactive",tenant="alice"}',
        'zinc_rt:num_requests_running{model_name="tiny"} 0.0',
        "zinc_rt:time_to_first_token_seconds_count",
        'zinc_rt:kv_pages{model_name="tiny",state="free"}',
        'zinc_rt:request_success_total{finished_reason="length",qos="interactive",tenant="alice"}',
    ):
        assert name in text


def test_tokens_are_counted_as_they_come(keyed):
    """Not at the end of a request: an open stream's are there already, and no more in the end."""
    http = Http(keyed.url)
    before = samples(http)
    body = {"prompt": "abc", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with http.connected() as connection:
        request = posted("/v1/completions", body)
        head = f"Authorization: Bearer {ALICE}\r\nContent-Type".encode()
        connection.sendall(request.replace(b"Content-Type", head, 1))
        heard = connection.recv(65536)
        while b'"text"' not in heard:
            heard += connection.recv(65536)
        in_flight = samples(http)[GENERATED] - before[GENERATED]
        assert 0 < in_flight <= 150
        while b"[DONE]" not in heard:
            heard += connection.recv(65536)
    after = samples(http)
    assert after[GENERATED] - before[GENERATED] == 150
    assert after[STEPS] - before[STEPS] >= 150
    assert after['zinc_rt:tenant_live{qos="interactive",tenant="alice"}'] == 0.0
    assert 'zinc_rt:tenant_pages{qos="batch",tenant="bob"}' in after


GENERATED = 'zinc_rt:generation_tokens_total{qos="interactive",tenant="alice"}'
STEPS = "zinc_rt:engine_step_seconds_count"


def samples(http: Http) -> dict[str, float]:
    text = http.get("/metrics", **bearer(OPERATOR)).body.decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_a_changed_file_is_in_force(serve, tmp_path, monkeypatch, caplog):
    """A new key, a tenant who is gone, and a file that is wrong, which changes nothing."""
    monkeypatch.setattr(accounts, "POLL_SECONDS", 0.0)
    path = tenants_file(tmp_path)
    fresh = new_key()
    with serve(tenants=path) as server:
        http = Http(server.url)
        assert http.get("/v1/models", **bearer(ALICE)).status == 200
        tenants_file(tmp_path, alice=fresh)
        assert http.get("/v1/models", **bearer(ALICE)).status == 401
        assert http.get("/v1/models", **bearer(fresh)).status == 200
        path.write_text("[tenant.alice]\nid = 1\nqos = 'royal'\n")
        assert http.get("/v1/models", **bearer(fresh)).status == 200
        assert "'royal'" in caplog.text
        path.write_text(f'[tenant.bob]\nid = 2\nmax_slots = 1\nkeys = ["{key_digest(BOB)}"]\n')
        assert http.get("/v1/models", **bearer(fresh)).status == 401
        driver = server.service.model.driver
        second = driver.call(tenant_of, 2)
        assert second is not None
        assert second.max_slots == 1
        assert driver.call(tenant_of, 1) is None


def test_an_open_address_needs_keys(serve, tmp_path):
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(ConfigError, match="nobody needs a key"), serve(host=host):
            pass
    keyless = tmp_path / "keyless.toml"
    keyless.write_text("[tenant.alice]\nid = 1\n")
    with pytest.raises(ConfigError, match="no tenant has a key"), serve(tenants=keyless):
        pass


def test_keys_are_compared_whole():
    ring = Keyring([(key_digest(ALICE), 1), (key_digest(BOB), 2)])
    assert [ring.tenant_of(key) for key in (ALICE, BOB, ALICE[:-1], "", "ä")] == [
        1, 2, None, None, None,
    ]  # fmt: skip
    assert presented_key("bearer  abc ") == "abc"
    for header in (
        *(None, "", "Bearer", "Basic !", "Basic YWJj", "Digest abc", "Bearer " + "a" * 999),
    ):
        assert presented_key(header) is None


def today() -> str:
    """The day as ledgers name it."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def test_the_ledger_survives_being_killed(tmp_path):
    """Every count that was acknowledged before kill -9 is there afterwards."""
    path, began = tmp_path / "ledger.sqlite", today()
    program = (
        "import sys, itertools; from pathlib import Path; from contract.types import Tenant\n"
        "from harness.serve.ledger_store import Counts, LedgerStore\n"
        "store = LedgerStore(Path(sys.argv[1]))\n"
        "for n in itertools.count(1):\n"
        "    store.add(Tenant(7, 'a'), Counts(requests=1, prompt_tokens=n)); print(n, flush=True)\n"
    )
    for round_ in range(3):
        before = LedgerStore(path)
        had = before.total(Tenant(7, "a"))
        before.close()
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(50):
                acknowledged = int(writer.stdout.readline())
            writer.kill()
            acknowledged = int((writer.stdout.read().split() or [acknowledged])[-1])
        with LedgerStore(path) as after:
            total = after.total(Tenant(7, "a"))
            added = total.requests - had.requests
            assert acknowledged <= added <= acknowledged + 1, round_
            assert total.prompt_tokens - had.prompt_tokens == added * (added + 1) // 2
            days = after.days(Tenant(7, "a"))
            assert sum(day.requests for day in days.values()) == total.requests
            assert set(days) <= {began, today()}


def test_usage_is_of_a_number_and_a_name(tmp_path):
    """A tenant that gets the number of a removed one sees none of its usage; what servers counted
    that knew the number alone is its present owner's."""
    path, (old, new) = tmp_path / "ledger.sqlite", (Tenant(1, "old"), Tenant(1, "new"))
    with LedgerStore(path) as store:
        store.add(old, Counts(requests=2))
        store.add(new, Counts(requests=1))
        store.add(Tenant(2, "new"), Counts(requests=7))
        assert (store.total(old).requests, store.total(new).requests) == (2, 1)
        assert [day.requests for day in store.days(new).values()] == [1]
        assert store.tenants() == {1, 2}
    with sqlite3.connect(path) as file:
        file.execute("INSERT INTO usage (tenant, day, requests) VALUES (1, ?, 5)", (today(),))
    with LedgerStore(path) as store:
        assert store.total(new) == Counts(requests=6) == store.days(new)[today()]
        assert store.total(Tenant(3, "new")) == Counts()


def test_a_name_of_digits_goes_before_a_number():
    accounts = [Account(Tenant(1, "bob")), Account(Tenant(2, "1")), Account(Tenant(3, "4"))]
    found = [named_account(accounts, name) for name in ("1", "bob", "2", "3", "4", "5")]
    assert [one and one.tenant.id for one in found] == [2, 1, 2, 3, 3, None]


def test_a_ledger_that_is_none(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database at all, but some text" * 100)
    with pytest.raises(
        ConfigError, match=r"cannot be the ledger: [A-Za-z ]+; name another with --ledger"
    ):
        LedgerStore(path)
    with LedgerStore(tmp_path / "new.sqlite") as store:
        assert store.total(Tenant(1, "a")) == Counts()


@pytest.mark.parametrize(
    ("names", "status"), [('["tiny"]', 200), ('["x", "tiny"]', 200), ('["x"]', 403)]
)
def test_a_server_of_one_model_keeps_others_tenants_out(serve, tmp_path, names, status):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenant.alice]\nid = 1\nmodels = {names}\nkeys = ["{key_digest(ALICE)}"]\n')
    with serve(tenants=path) as server:
        http = Http(server.url)
        for more in ({}, {"model": "tiny"}):
            assert http.post("/v1/completions", {**BODY, **more}, **bearer(ALICE)).status == status


@pytest.mark.parametrize("names", ['"tiny"', "[1]", '[""]', "{}"])
def test_models_of_a_tenant_are_a_list_of_names(tmp_path, names):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenant.alice]\nid = 1\nmodels = {names}\nkeys = ["{key_digest(ALICE)}"]\n')
    with pytest.raises(ConfigError, match="tenant 'alice': models is not a list of names"):
        read_accounts(path)
