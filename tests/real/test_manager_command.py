"""`domicile manager`, as a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_lab import APP, Clerk, as_client, running

from domicile import Client

STORE = "sqlite:///clerk.db"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.setenv("DOMICILE_TTL_S", "20")
    (tmp_path / "clerkapp.py").write_text(APP, encoding="utf-8")
    return tmp_path


async def add(client: Client) -> int:
    return await client.ref(Clerk, "anna").options(timeout_s=120).ask(Clerk.add)


def status(place: Path) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "domicile", "status", STORE, "--json"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_manager_coordinates_until_a_signal_asks_it_to_leave(
    place: Path, kind: signal.Signals
) -> None:
    with running(place, "manager", STORE, "--node-id", "boss") as manager:
        assert " INFO  boss  listening at 127.0.0.1:" in manager.hear("listening")
        with running(place, "run", "clerkapp:follower") as node:
            node.hear("listening")
            assert as_client(place, add) == 1
            seen = {one["node"]: one for one in status(place)["nodes"]}
            assert (seen["boss"]["manager"], seen["boss"]["coordinator"]) == (True, True)
            assert (seen["aide"]["manager"], seen["aide"]["candidate"]) == (False, False)
            with running(place, "manager", "--app", "clerkapp:node", "--node-id", "vice") as vice:
                vice.hear("listening")
                manager.signal(kind)
                assert manager.ended() == 0
                vice.hear("coordinating from now on")
                assert as_client(place, add) == 2
                vice.signal(signal.SIGTERM)
                assert vice.ended() == 0
            # Known shards are served on without any coordinator (I7).
            assert as_client(place, add) == 3
            node.signal(signal.SIGTERM)
            assert node.ended() == 0


def test_a_store_that_cannot_be_is_told(place: Path) -> None:
    (place / "clerk.db").mkdir()
    with running(place, "manager", STORE) as manager:
        assert manager.ended() == 3
        assert "error: " in manager.said[-1]
