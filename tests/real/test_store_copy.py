"""A cluster moves from one kind of store to another and back, with the commands that users type.

Another kind of server is one more line in `SERVERS`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import etcd_lab
import postgres_lab
import pytest
from redis_lab import server

from domicile import ConfigError, Entity, Node, Settings, Unavailable, handler
from domicile.backends.wiring import open_whole_store
from domicile.core.ids import Incarnation
from domicile.core.state.keys import MOVED_KEY, NODES
from domicile.core.state.records import MoveRecord, encode_record
from domicile.core.state.shardmap import decode_block
from domicile.core.state.txn import Put

SETTINGS = Settings(shards=8, ttl_s=3.0, ask_timeout_s=60.0)
PATIENCE_S = 120.0


class Tally(Entity, name="copied.tally"):
    """Says under which epoch it runs."""

    @handler
    async def under(self) -> int:
        return self.epoch


@contextmanager
def valkey() -> Iterator[str]:
    with server() as process:
        yield process.url


@contextmanager
def postgresql() -> Iterator[str]:
    yield postgres_lab.shared_server().new_database()


@contextmanager
def etcd() -> Iterator[str]:
    yield etcd_lab.shared_server().new_database()


SERVERS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "valkey": valkey, "postgresql": postgresql, "etcd": etcd,
}  # fmt: skip


def domicile(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "domicile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


async def epoch_under(store: str) -> int:
    """The epoch under which a shard is served by a node that joins now and leaves again."""
    async with Node(store, entities=[Tally], settings=SETTINGS) as node:
        return await node.ref(Tally, "t").ask(Tally.under)


async def epochs(store: str) -> list[int]:
    whole = open_whole_store(store, by="test")
    try:
        listing = await whole.store.list(b"domicile/map/")
        return [entry.epoch for item in listing.items for entry in decode_block(item.value).entries]
    finally:
        await whole.store.close()


@pytest.mark.parametrize("kind", SERVERS)
def test_a_cluster_moves_to_a_server_and_back(kind: str, tmp_path: Path) -> None:
    embedded = f"sqlite:///{tmp_path / 'dev.db'}"

    async def main(there: str) -> None:
        first = await epoch_under(embedded)
        said = await asyncio.to_thread(domicile, "store", "copy", embedded, there)
        assert said.returncode == 0, said.stderr
        assert "compared, all equal" in said.stdout
        before = await epochs(embedded)
        after = await epochs(there)
        assert after == before

        assert await epoch_under(there) > first
        with pytest.raises(ConfigError, match="was moved to the store"):
            await epoch_under(embedded)
        said = await asyncio.to_thread(domicile, "store", "copy", there, embedded)
        assert said.returncode == 1
        assert "--replace" in said.stderr

        grown = await epochs(there)
        said = await asyncio.to_thread(domicile, "store", "copy", there, embedded, "--replace")
        assert said.returncode == 0, said.stderr
        assert all(a >= max(b, c) for a, b, c in zip(await epochs(embedded), grown, before))  # noqa: B905
        assert await epoch_under(embedded) > max(grown) - 1

    with SERVERS[kind]() as there:
        asyncio.run(main(there))


@pytest.mark.parametrize(
    ("source", "target"),
    [("valkey", "postgresql"), ("postgresql", "etcd"), ("etcd", "valkey")],
)
def test_a_cluster_moves_from_one_kind_of_server_to_another(source: str, target: str) -> None:
    async def main(here: str, there: str) -> None:
        first = await epoch_under(here)
        said = await asyncio.to_thread(domicile, "store", "copy", here, there)
        assert said.returncode == 0, said.stderr
        assert "compared, all equal" in said.stdout
        assert await epochs(there) == await epochs(here)
        assert await epoch_under(there) > first
        with pytest.raises(ConfigError, match="was moved to the store"):
            await epoch_under(here)

    with SERVERS[source]() as here, SERVERS[target]() as there:
        asyncio.run(main(here, there))


def test_a_running_node_is_in_the_way_and_a_mark_ends_it(tmp_path: Path) -> None:
    embedded = f"sqlite:///{tmp_path / 'dev.db'}"

    async def main(there: str) -> None:
        async with Node(embedded, entities=[Tally], settings=SETTINGS, node_id="busy") as node:
            await node.ref(Tally, "t").ask(Tally.under)
            said = await asyncio.to_thread(
                domicile, "store", "copy", embedded, there, "--wait", "0"
            )
            assert said.returncode == 1
            assert "node busy" in said.stderr
            # A copy that did not see this node: the mark alone must stop it (I1).
            whole = open_whole_store(embedded, by="test")
            mark = encode_record(MoveRecord("to", there, "x"))
            await whole.store.commit([], [Put(b"domicile/" + MOVED_KEY, mark)])
            async with asyncio.timeout(PATIENCE_S):
                while (await whole.store.list(b"domicile/" + NODES)).items:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await whole.store.close()
            with pytest.raises(Unavailable):
                await node.ref(Tally, "t").options(timeout_s=1.0).ask(Tally.under)

    with valkey() as there:
        asyncio.run(main(there))


def test_records_of_a_killed_process_end_though_nobody_ticks(tmp_path: Path) -> None:
    """S4: its time stands still when all processes are gone; the command lets it advance."""
    embedded = f"sqlite:///{tmp_path / 'dev.db'}"

    async def main(there: str) -> None:
        whole = open_whole_store(there, by="test")
        store = whole.store
        await store.grant("l", 2.0)
        key = b"domicile/nodes/" + Incarnation("a" * 32).encode()
        await store.commit([], [Put(b"domicile/config", b'{"shards":{}}'), Put(key, b"?", "l")])
        await store.close()
        said = await asyncio.to_thread(domicile, "store", "copy", there, embedded)
        assert said.returncode == 0, said.stderr
        assert "waiting 20 s at most for node" in said.stderr

    with valkey() as there:
        asyncio.run(main(there))
