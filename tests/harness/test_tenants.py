"""A file of tenants: what it declares is what is read, and what is wrong is named."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from contract.types import QosClass, Tenant
from harness.tenants import KEYS, read_accounts
from reference.sched.tenants import Tenants
from tests.tables import table

WHOLE = """
[tenant.nightly]
id = 7
qos = "batch"
weight = 0.25
max_slots = 2
max_kv_pages = 512
decode_tokens_per_s = 200
prefill_tokens_per_s = 5000
max_context = 8192
max_waiting = 40
reserved_pages = 64
keys = ["sha256:0000000000000000000000000000000000000000000000000000000000000000"]
operator = true
admin = false
models = ["tiny"]
isolation_group = 3

[tenant."alice w."]
id = 1
qos = "interactive"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_field_can_be_declared_and_the_others_have_their_defaults(tmp_path):
    alice, nightly = (account.tenant for account in read_accounts(written(tmp_path, WHOLE)))
    assert alice == Tenant(1, "alice w.", qos=QosClass.INTERACTIVE)
    assert nightly == Tenant(
        id=7, name="nightly", weight=0.25, max_slots=2, max_kv_pages=512, isolation_group=3,
        qos=QosClass.BATCH, decode_tokens_per_s=200, prefill_tokens_per_s=5000, max_context=8192,
        max_waiting=40, reserved_pages=64,
    )  # fmt: skip
    assert all(f"{key} = " in WHOLE for key in KEYS)
    accounts = read_accounts(written(tmp_path, WHOLE))
    assert [(account.keys, account.operator) for account in accounts] == [
        ((), False),
        ((f"sha256:{'0' * 64}",), True),
    ]


def test_an_admin_is_an_operator(tmp_path):
    (account,) = read_accounts(written(tmp_path, "[tenant.a]\nid = 1\nadmin = true"))
    assert (account.admin, account.operator, account.tenant.name) == (True, True, "a")
    with pytest.raises(ConfigError, match="admin is 1, not true or false"):
        read_accounts(written(tmp_path, "[tenant.a]\nid = 1\nadmin = 1"))


def test_what_is_read_can_be_registered(tmp_path):
    declared = [account.tenant for account in read_accounts(written(tmp_path, WHOLE))]
    tenants = Tenants(declared, clock=lambda: 0.0)
    assert [tenant.id for tenant in tenants] == [1, 7]


@pytest.mark.parametrize(
    ("text", "message"), table(__file__, "test_tenants")["what_is_wrong_is_named"]
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"tenants.toml: .*{message}"):
        read_accounts(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml: no such file of tenants"):
        read_accounts(tmp_path / "none.toml")


VALUES = st.one_of(
    st.integers(-2, 5000).map(str),
    st.floats().map(lambda x: repr(x) if x == x and abs(x) != float("inf") else "inf"),
    st.sampled_from(('"batch"', '"x"', "true", "[]", "{}", "1979-05-27")),
)


@given(st.dictionaries(st.sampled_from((*KEYS, "name", "slots")), VALUES, max_size=6))
def test_any_values_are_tenants_or_a_config_error(tmp_path_factory, values):
    """No value makes reading fail in another way, and what is accepted is valid."""
    lines = [f"{key} = {value}" for key, value in values.items()]
    path = written(tmp_path_factory.mktemp("tenants"), "\n".join(["[tenant.a]", *lines]))
    try:
        (tenant,) = (account.tenant for account in read_accounts(path))
    except ConfigError as error:
        problem = str(error)
    else:
        tenant.validate()
        assert values.keys() <= set(KEYS)
        return
    assert problem.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('keys = "zrt-secret"', "keys is not a list of digests"),
        ('keys = ["zrt-secret"]', "zinc-rt tenants key"),
        ('keys = ["sha256:12"]', "keys is not a list of digests"),
        ("operator = 1", "operator is 1, not true or false"),
    ],
)
def test_keys_and_operators_are_checked(tmp_path, lines, problem):
    """And no key is repeated in an error, in case somebody wrote one down as it is."""
    with pytest.raises(ConfigError, match=problem) as refused:
        read_accounts(written(tmp_path, f"[tenant.a]\nid = 1\n{lines}\n"))
    assert "secret" not in str(refused.value)


def test_two_tenants_cannot_share_a_key(tmp_path):
    key = f'keys = ["sha256:{"a" * 64}"]'
    text = f"[tenant.a]\nid = 1\n{key}\n[tenant.b]\nid = 2\n{key}\n"
    with pytest.raises(ConfigError, match="'a' and 'b' share a key"):
        read_accounts(written(tmp_path, text))
