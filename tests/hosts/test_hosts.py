"""Clusters over hosts on every server of a store: cuts, delays, and a minute without the store.

Started by `make test-hosts`: it needs root, and about ten minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from backends_lab import installed
from hosts_lab import (
    LOCKED,
    Starts,
    a_host_is_cut_off_the_store,
    needs_namespaces,
    nobody_reaches_the_store,
    nodes_go_on_without_the_store,
    server_of_its_own,
)
from real_lab import run

from domicile.backends import registry
from domicile.testing.processes.environment import StoreHost

pytestmark = needs_namespaces

STORES = ["postgresql", "etcd", "redis"]
OUTAGE_S = float(os.environ.get("DOMICILE_TEST_OUTAGE_S", "60"))


def locked(kind: str, store: Starts, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    """The same store, with file locks beside it that prove deaths."""
    scheme, package = f"locked+{kind}", f"locked_{kind}"
    site = directory / "site"
    installed(site, package, LOCKED.replace("SCHEME", scheme), scheme)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    monkeypatch.setenv("DOMICILE_TEST_LOCKS", str(directory / "locks"))

    def start(host: StoreHost) -> str:
        return f"locked+{store(host)}"

    return start


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.scenario("LS-12")
def test_a_host_that_is_cut_off_the_store_stops_and_its_shards_are_served_elsewhere(
    kind: str,
) -> None:
    with server_of_its_own(kind) as start:
        run(a_host_is_cut_off_the_store(start))


@pytest.mark.parametrize("kind", STORES)
def test_a_minute_without_the_store_stops_all_nodes_and_takes_no_home_twice(kind: str) -> None:
    with server_of_its_own(kind) as start:
        run(nobody_reaches_the_store(start, OUTAGE_S))


@pytest.mark.parametrize("kind", STORES)
def test_a_minute_without_the_store_stops_nothing_where_only_death_frees_a_home(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of_its_own(kind) as start:
        run(nodes_go_on_without_the_store(locked(kind, start, tmp_path, monkeypatch), OUTAGE_S))
