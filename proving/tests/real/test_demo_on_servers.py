"""`make demo STORE=…`: the demo starts a server of its own and shows the same report."""

from __future__ import annotations

import subprocess
import sys

import pytest

from proving.chaos.server import NO_SERVER, SERVERS


@pytest.mark.parametrize("store", SERVERS)
def test_the_demo_on_a_server_shows_the_same_report(store: str) -> None:
    try:
        SERVERS[store]().stop()
    except NO_SERVER as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "proving.demo", "--store", store, "--seconds", "10", "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every promise was kept." in done.stdout
    assert "kill -9" in done.stdout
    assert store in done.stdout
