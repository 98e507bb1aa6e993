"""Clusters over hosts: the nodes and the server of the store in network namespaces of their own.

One representative for the gate; `tests/hosts` plays more, on every server and for longer
(`make test-hosts`).
"""

from __future__ import annotations

import pytest
from hosts_lab import a_host_is_cut_off_the_store, needs_namespaces, server_of_its_own
from real_lab import run


@needs_namespaces
@pytest.mark.scenario("LS-12")
def test_a_host_that_is_cut_off_the_store_stops_and_its_shards_are_served_elsewhere() -> None:
    with server_of_its_own("postgresql") as start:
        run(a_host_is_cut_off_the_store(start, ["no answers", "the leader"]))
