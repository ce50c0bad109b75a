"""What is done when the tenants change is done for all of it, and until it has succeeded."""

import logging
from collections.abc import Collection
from pathlib import Path

import pytest

from harness.serve.accounts import Accounts
from harness.serve.keys import new_key
from harness.serve.storage import StorageProblem
from tests.serve.tenants import write_tenants


@pytest.mark.parametrize("error", [StorageProblem("the disk is full", True), ValueError("secret")])
def test_one_that_fails_keeps_no_other_from_its_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """It is called again until it succeeds, with whoever is a tenant then."""
    names = {"alice": new_key(), "bob": new_key()}
    accounts = Accounts(write_tenants(tmp_path, names))
    fails, told = [error], list[tuple[str, int]]()

    def failing(tenants: Collection[int]) -> None:
        told.append(("failing", len(tenants)))
        if fails:
            raise fails[0]

    accounts.on_change += [failing, lambda tenants: told.append(("other", len(tenants)))]
    del names["bob"]
    write_tenants(tmp_path, names)
    with caplog.at_level(logging.ERROR, "zinc_rt.serve"):
        accounts.reload(lambda work: None)
        assert told == [("failing", 1), ("other", 1)]
        accounts.reload(lambda work: None)
    assert told[2:] == [("failing", 1)]
    (record,) = caplog.records
    assert ("the disk is full" in record.getMessage()) == isinstance(error, StorageProblem)
    assert "secret" not in caplog.text
    fails.clear()
    accounts.reload(lambda work: None)
    accounts.reload(lambda work: None)
    assert told[3:] == [("failing", 1)]
