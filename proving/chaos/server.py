"""The faults of a store that has a server: it dies, stands still, or one node can't reach it.

Used by `proving.chaos.round` in runs with `--store`. Each node asks the server through a proxy of
its own. The kinds that only the embedded store has are left out of such a run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from random import Random

from domicile.backends.registry import shown_url
from domicile.testing.suites.byte_proxy import ByteProxy
from proving.chaos.faults import Chaos, Fault, insistent
from proving.etcd_server import EtcdServer, NoEtcd
from proving.kube_commits import KubernetesCommits
from proving.kube_server import KubernetesServer, NoKubernetes
from proving.postgres_server import NoPostgres, PostgresServer
from proving.redis_server import NoRedis, RedisProcess

StoreServer = PostgresServer | EtcdServer | RedisProcess | KubernetesServer
SERVERS: dict[str, Callable[[], StoreServer]] = {
    "postgresql": PostgresServer, "etcd": EtcdServer, "redis": RedisProcess,
}  # fmt: skip
"""The servers that a run, a demo or a benchmark can start, by the name for `--store`."""

CHAOS_SERVERS: dict[str, Callable[[], StoreServer]] = {**SERVERS, "kubernetes": KubernetesServer}
"""Those of a chaos run: an API server has to be built first."""

NO_SERVER = (NoPostgres, NoEtcd, NoRedis, NoKubernetes)
"""What is raised where a server can't be started."""

EMBEDDED = (
    "full disk", "store cut", "asleep", "stale leader", "cut leader", "contest", "slow store",
)  # fmt: skip
"""Kinds of faults that are made inside SQLite."""


ASK_S = 0.3
SLOW_S = 0.5
"""An API server that needs longer for an answer did not get its share of the machine."""


class ServedStore:
    """A new store on a server, and a proxy in front of it for each node of a round."""

    def __init__(self, server: StoreServer, nodes: int) -> None:
        self.server = server
        self.url = server.new_database()
        self.proxies = [ByteProxy("127.0.0.1", server.port) for _ in range(nodes)]

    def at(self, node: int) -> str:
        """The URL by which a node asks it."""
        port = self.proxies[node].port
        if isinstance(self.server, KubernetesServer):
            return self.server.behind(self.url, port)
        return self.url.replace(f":{self.server.port}/", f":{port}/")

    def commits(self, now: Callable[[], float]) -> KubernetesCommits | None:
        """What reads its commits, if its backend can't."""
        server = self.server
        return (
            KubernetesCommits(server, self.url, now)
            if isinstance(server, KubernetesServer)
            else None
        )

    def start(self) -> None:
        """Start the proxies."""
        for proxy in self.proxies:
            proxy.start()

    async def close(self) -> None:
        """End the proxies."""
        for proxy in self.proxies:
            await proxy.close()

    def __str__(self) -> str:
        return shown_url(self.url)


@contextmanager
def answering(
    store: ServedStore | None,
    now: Callable[[], float],
    away: Callable[[], bool],
    late: Callable[[float, float], object],
) -> Generator[None]:
    """Ask an API server again and again, by a thread; `late` hears when it took long to answer.

    It has much to do for each call, and on a machine with other work it may stand still while the
    harness runs. `away`: a fault is at work on it.
    """
    over = threading.Event()
    server = None if store is None else store.server

    def ask(server: KubernetesServer) -> None:
        while not over.wait(ASK_S):
            asked, broken = now(), away()
            with suppress(OSError):
                server.ask("/livez")
            at = now()
            if at > asked + SLOW_S and not (broken or away() or over.is_set()):
                late(asked, at)

    thread = None
    if isinstance(server, KubernetesServer):
        thread = threading.Thread(target=ask, args=(server,), name="chaos-asks", daemon=True)
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread is not None:
            thread.join()


def server_faults(store: ServedStore) -> dict[str, Fault]:
    """The kinds of faults that a store with a server has in addition."""

    async def kill(chaos: Chaos, random: Random) -> None:
        """SIGKILL to all its processes; started again soon, or after every lease would be over."""
        await _away(chaos, random, "server kill", store.server.kill, store.server.start)

    async def freeze(chaos: Chaos, random: Random) -> None:
        """SIGSTOP to all its processes: connections stay open, and nothing is answered."""
        await _away(chaos, random, "server freeze", store.server.freeze, store.server.thaw)

    async def cut(chaos: Chaos, random: Random) -> None:
        """One node can't reach it: it is refused, or gets no answer, or loses one."""
        node = await chaos.victim(random)
        if node is None:
            return
        proxy, process = store.proxies[node], chaos.cluster.nodes[node]
        how = random.choice((proxy.refuse, proxy.hold, proxy.lose_next_answer))
        chaos.cluster.note_fault("outage", process)
        try:
            await how()
            chaos.struck("server cut")
            await chaos.lasts(0.3, 4.0, random)
        finally:
            await proxy.release()
            chaos.cluster.note_fault("back", process)
            chaos.touched.pop(node, None)

    found: dict[str, Fault] = {"server kill": kill, "server freeze": freeze, "server cut": cut}
    return {kind: insistent(kind, fault) for kind, fault in found.items()}


async def _away(
    chaos: Chaos, random: Random, kind: str, away: Callable[[], None], back: Callable[[], None]
) -> None:
    ttl_s = chaos.cluster.settings.ttl_s
    low_s = 0.2 if random.random() < 0.6 else ttl_s / chaos.scale
    async with chaos.disk:
        if chaos.calm.is_set():
            return
        chaos.cluster.note_fault("stall")
        await asyncio.to_thread(away)
        since = chaos.cluster.now()
        chaos.struck(kind)
        try:
            await chaos.lasts(low_s, max(1.5 * ttl_s, low_s + 1.0), random)
        finally:
            chaos.cluster.note_standstill(since, chaos.cluster.now())
            await asyncio.to_thread(back)
            chaos.cluster.note_fault("flow")
