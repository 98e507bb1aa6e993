"""Ports for servers that a run starts."""

from __future__ import annotations

import pytest

from proving.etcd_server import LOWEST_PORT, first_outgoing_port, free_ports


def test_no_outgoing_connection_takes_a_port_before_its_server_has_started() -> None:
    if first_outgoing_port() <= LOWEST_PORT:
        pytest.skip("this kernel gives all ports to outgoing connections")
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(LOWEST_PORT <= port < first_outgoing_port() for port in found)
