"""Names that resolve anew, and IPv6: of nodes, and of the store's server."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from backends_lab import SERVERS
from hosts_lab import all_renew, needs_namespaces
from real_entities import Diary
from real_lab import balanced, judge, run, written
from redis_lab import free_port

from domicile import Node, Settings, connect
from domicile.testing import Processes
from domicile.testing.suites.byte_proxy import ByteProxy

SETTINGS = Settings(shards=4, ttl_s=3.0, balance_interval_s=0.3, ask_timeout_s=60.0)
LIMIT_S = 120.0


def ipv6() -> bool:
    """Whether this machine has ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not ipv6(), reason="this machine has no ::1")


ALL = os.environ.get("DOMICILE_TEST_STORES") == "all"
STORES = list(SERVERS) if ALL else ["etcd"]
"""etcd's library looks names up by itself; the others ask the loop."""


def test_a_link_is_resumed_though_the_name_of_its_node_means_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node lives on, and what is under way is answered."""
    meant, asked = ["127.0.0.2"], list[str]()
    look_up = socket.getaddrinfo

    def looked_up(host: Any, *arguments: Any, **named: Any) -> Any:
        if host == "here.test":
            asked.append(host := meant[0])
        return look_up(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    store = f"sqlite:///{tmp_path / 'store.db'}"
    real, told = free_port(), free_port()

    async def scenario() -> None:
        node = Node(
            store, entities=[Diary], settings=SETTINGS,
            listen=f"127.0.0.1:{real}", advertise=f"here.test:{told}",
        )  # fmt: skip
        async with (
            ByteProxy("127.0.0.1", real, ("127.0.0.2", told)) as old,
            ByteProxy("127.0.0.1", real, ("127.0.0.3", told)),
            node,
            connect(store, settings=SETTINGS) as client,
        ):
            diary = client.ref(Diary, "d")
            assert await diary.ask(Diary.write, "at the old address") == 1
            assert set(asked) == {"127.0.0.2"}
            nap = asyncio.ensure_future(diary.ask(Diary.nap, 1.0))
            second = asyncio.ensure_future(diary.ask(Diary.write, "behind it"))
            await asyncio.sleep(0)
            meant[0] = "127.0.0.3"
            await old.refuse()
            await nap
            assert await second == 2
            assert await diary.ask(Diary.write, "at the new address") == 3
            assert asked[-1] == "127.0.0.3"

    run(scenario())


@needs_namespaces
@pytest.mark.parametrize("kind", STORES)
def test_nodes_find_the_store_again_when_its_name_means_another_address(
    kind: str, tmp_path: Path
) -> None:
    """As after a failover: the old address refuses, or it does not answer any more."""
    server = SERVERS[kind]()
    hosts, port = tmp_path / "hosts", free_port()

    def means(address: str) -> None:
        # In place: the nodes see this very file.
        hosts.write_text(f"127.0.0.1 localhost\n{address} db.test\n", encoding="ascii")

    async def scenario() -> None:
        store = server.new_database()
        named = store.replace(f"127.0.0.1:{server.port}", f"db.test:{port}")
        means("127.0.0.2")
        async with (
            ByteProxy("127.0.0.1", server.port, ("127.0.0.2", port)) as old,
            ByteProxy("127.0.0.1", server.port, ("127.0.0.3", port)) as new,
            Processes(
                [Diary], nodes=2, settings=SETTINGS, store=store, hosts=hosts,
                store_at=lambda node: named,
            ) as cluster,
        ):  # fmt: skip
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            means("127.0.0.3")
            await old.refuse()
            # An incarnation whose lease ran out meanwhile is followed by another one.
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            await all_renew(cluster, 3)
            await old.release()
            means("127.0.0.2")
            await new.hold()
            await all_renew(cluster, 3)
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            assert await written(cluster, "d", "after") >= 1
            await new.release()
            history = cluster.history()
        judge(history)

    run(scenario())


@needs_ipv6
@pytest.mark.parametrize("kind", list(SERVERS))
def test_nodes_and_the_store_may_have_addresses_of_ipv6(kind: str) -> None:
    server = SERVERS[kind]()

    async def scenario() -> None:
        async with ByteProxy("127.0.0.1", server.port, ("::1", 0)) as proxy:
            plain = server.new_database()
            store = plain.replace(f"127.0.0.1:{server.port}", f"[::1]:{proxy.port}")
            assert store != plain
            nodes = [
                Node(
                    store, entities=[Diary], settings=SETTINGS, listen="[::1]:0", node_id=f"n{n}",
                    journal="memory://",
                )
                for n in range(2)
            ]  # fmt: skip
            async with nodes[0], nodes[1], connect(store, settings=SETTINGS) as client:
                for n in range(8):
                    assert await client.ref(Diary, f"d{n}").ask(Diary.write, "once") == 1
                    assert await nodes[n % 2].ref(Diary, f"d{n}").ask(Diary.write, "twice") == 2

    run(scenario())
