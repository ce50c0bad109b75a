"""Links to a server name a host that others can reach."""

import ipaddress

import pytest

from harness.serve.run import reachable_host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "llm.example.org", "192.0.2.7"])
def test_a_named_host_stays(host):
    assert reachable_host(host) == host


def test_an_ipv6_address_is_in_brackets():
    assert reachable_host("::1") == "[::1]"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_becomes_one_of_this_machine(host):
    found = ipaddress.ip_address(reachable_host(host).strip("[]"))
    assert not found.is_unspecified
    assert found.version == ipaddress.ip_address(host).version
