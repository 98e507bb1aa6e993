"""Real processes and operators' tools on a store of another package: no file, no locks, no log."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from backends_lab import WRAPPED, installed

from domicile import ConfigError, Entity, Settings, handler
from domicile.backends import registry
from domicile.testing import HarnessError, Processes

SETTINGS = Settings(shards=4, ttl_s=2.0)


class Gong(Entity, name="backends.gong"):
    """Rings."""

    @handler
    async def ring(self) -> int:
        return os.getpid()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store that an installed package knows."""
    installed(tmp_path / "site", "wrapped_store", WRAPPED)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wrapped_store", raising=False)
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    return f"wrapped://{tmp_path / 'wrapped.db'}"


def domicile(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, as a process of its own with the same import path."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "domicile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


async def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(domicile, *arguments)


async def a_node_is_killed_and_replaced(store: str, directory: Path) -> None:
    async with Processes(
        [Gong], nodes=2, settings=SETTINGS, store=store, directory=directory
    ) as cluster:
        assert cluster.store == store
        gong = cluster.ref(Gong, "g")
        before, home = await gong.ask(Gong.ring), cluster.owner(Gong, "g")

        said = await asked("status", store, "--json")
        assert said.returncode == 0, said.stderr
        seen = json.loads(said.stdout)
        assert [node["node"] for node in seen["nodes"]] == ["node-0", "node-1"]
        assert [node["status"] for node in seen["nodes"]] == ["up", "up"]
        assert [node["age_s"] for node in seen["nodes"]] == [None, None]
        assert seen["served"]

        cluster.crash(home)
        await cluster.wait_until(cluster.settled)
        assert cluster.owner(Gong, "g") != home
        assert await gong.ask(Gong.ring) != before
        cluster.start(home)
        await cluster.wait_until(lambda: cluster.incarnation(home) is not None)

        other = cluster.owner(Gong, "g")
        said = await asked("drain", cluster.node_id(other), store)
        assert said.returncode == 0, said.stderr
        await cluster.wait_until(lambda: cluster.settled() and cluster.owner(Gong, "g") == home)
        assert await gong.ask(Gong.ring) != before

        cluster.freeze(other)
        cluster.thaw(other)
        verbs: list[Callable[[], object]] = [
            cluster.stall_store, cluster.fill_disk, lambda: cluster.cut_store(0),
            lambda: cluster.lag(0, 1.0),
        ]  # fmt: skip
        for verb in verbs:
            with pytest.raises(HarnessError, match="needs a store in a SQLite file"):
                verb()
        with pytest.raises(HarnessError, match="a store that keeps a log of its commits"):
            cluster.history()


def test_a_node_is_killed_and_replaced(store: str, tmp_path: Path) -> None:
    asyncio.run(a_node_is_killed_and_replaced(store, tmp_path / "run"))
    assert list((tmp_path / "run").glob("*.log"))
    assert not list((tmp_path / "run").glob("store.db*"))


def test_a_store_that_is_not_there_is_told_in_the_words_of_its_backend(store: str) -> None:
    said = domicile("status", store)
    assert said.returncode == 3
    assert "error: nothing is wrapped at" in said.stderr
    said = domicile("status", "wrapped://")
    assert said.returncode == 2
    assert "names nothing: write wrapped://path/to/file" in said.stderr


def test_a_store_of_one_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="lives inside one process: name one that other"):
        Processes([Gong], store="memory://x")
    with pytest.raises(ConfigError, match="did you mean sqlite:///dev\\.db"):
        Processes([Gong], store="dev.db")
    with pytest.raises(ConfigError, match="leave out store="):
        Processes([Gong], store="sqlite:///dev.db", disk_bytes=1 << 24, network="auto")


async def the_file_of_a_given_store_is_used(path: Path) -> None:
    url = f"sqlite:///{path}"
    async with Processes([Gong], nodes=1, settings=SETTINGS, store=url) as cluster:
        assert cluster.store == url
        cluster.stall_store()
        cluster.unstall_store()
        assert cluster.history().events


def test_the_file_of_a_given_store_is_used(tmp_path: Path) -> None:
    asyncio.run(the_file_of_a_given_store_is_used(tmp_path / "mine.db"))
    assert (tmp_path / "mine.db").exists()
