"""The stores' benchmark runs on each store, and keeps what it measured. No speed is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proving.benchmarks.store_servers import ABSENT, STORES
from proving.chaos.server import SERVERS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("store", STORES)
def test_each_kind_of_cell_is_measured(store: str, tmp_path: Path) -> None:
    if store in SERVERS:
        try:
            SERVERS[store]().stop()
        except ABSENT as error:
            pytest.skip(str(error))
    keys = [f"commits-{store}-1x64", f"watch-{store}", f"idle-{store}-1-16"]
    command = [sys.executable, "-m", "proving.benchmarks.stores", "--quick"]
    command += ["--cache", str(tmp_path), *(part for key in keys for part in ("--only", key))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "stores-quick.json").read_text(encoding="utf-8"))["cells"]
    assert sorted(cells) == sorted(keys)
    for key, [one] in cells.items():
        assert one["value"] > 0, key
