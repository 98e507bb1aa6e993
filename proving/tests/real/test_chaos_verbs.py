"""The faults of real processes: each verb does what it says, on both kinds of network."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from domicile import DomicileError, Entity, Settings, handler
from domicile.core.ids import Incarnation
from domicile.core.state.records import NodeRecord, decode_record
from domicile.testing import Event, HarnessError, Processes, check
from domicile.testing.checkers.reading import read
from domicile.testing.processes.environment import Network, claim
from domicile.testing.processes.faults import next_version
from domicile.testing.processes.history import RealHistory

T = TypeVar("T")

ROOT = sys.platform == "linux" and os.geteuid() == 0
DISK_BYTES = 16 * 1024 * 1024
HOUR_S = 3_600.0
LAG_S = 0.5


class Post(Entity, name="post"):
    """Tells who and when it is, and asks others."""

    @handler(shared=True)
    async def pid(self) -> int:
        return os.getpid()

    @handler(shared=True)
    async def clocks(self) -> tuple[float, float, float]:
        return time.time(), time.time_ns() / 1e9, self.now().timestamp()

    @handler(shared=True)
    async def via(self, other: str, patience_s: float) -> int:
        return await self.ref(Post, other).options(timeout_s=patience_s).ask(Post.pid)


class Town:
    """A cluster with an entity at each node, and what was learned about it on the way."""

    def __init__(self, cluster: Processes) -> None:
        self.cluster = cluster
        self.at: dict[int, str] = {}

    async def place(self) -> None:
        """Find an entity at each node."""
        homes = len(self.cluster.nodes)
        await self.cluster.wait_until(self.cluster.settled)

        def found() -> bool:
            self.at = {}
            for number in range(400):
                self.at.setdefault(self.cluster.owner(Post, f"p{number}"), f"p{number}")
            return len(self.at) == homes

        await self.cluster.wait_until(lambda: self.cluster.settled() and found())

    async def reaches(self, one: int, other: int, patience_s: float = 0.6) -> bool:
        """Whether an answer comes to one node from another; -1 is the test itself."""
        try:
            if one < 0:
                ref = self.cluster.ref(Post, self.at[other]).options(timeout_s=patience_s)
                await ref.ask(Post.pid)
            else:
                ref = self.cluster.ref(Post, self.at[one]).options(timeout_s=patience_s + 5)
                await ref.ask(Post.via, self.at[other], patience_s)
        except DomicileError:
            return False
        return True

    async def until_reached(self, one: int, other: int) -> bool:
        """The same with patience, for a network that is whole again."""
        for _ in range(15):
            if await self.reaches(one, other, 2.0):
                return True
        return False


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, 180.0))


def network(kind: str) -> Network:
    if kind == "namespaces" and not ROOT:
        pytest.skip("network namespaces need root")
    return "namespaces" if kind == "namespaces" else "loopback"


# the network

KINDS = pytest.mark.parametrize("kind", ["namespaces", "loopback"])


@KINDS
def test_the_network_is_cut_slowed_and_healed(kind: str) -> None:
    async def scenario() -> Processes:
        settings = Settings(shards=12, ttl_s=30.0)
        cluster = Processes([Post], nodes=3, settings=settings, network=network(kind))
        async with cluster:
            town = Town(cluster)
            await town.place()
            assert await town.until_reached(-1, 0)
            assert await town.until_reached(0, 1)

            cluster.delay(0, 0.2, to=1)
            began = time.monotonic()
            assert await town.reaches(0, 1, 5.0)
            assert time.monotonic() - began >= 0.4, "there and back"
            assert await town.until_reached(0, 2)
            cluster.heal()

            assert cluster.cut(0, 1) > 0
            assert await town.until_reached(0, 1)

            # Nothing passes from 0 to 1, so neither gets an answer; 2 gets both.
            cluster.partition(0, 1, one_way=True)
            assert not await town.reaches(0, 1)
            assert await town.until_reached(2, 0)
            assert await town.until_reached(2, 1)
            cluster.heal()
            assert await town.until_reached(0, 1)
            assert await town.until_reached(1, 0)

            cluster.partition([0], [1, 2])
            assert not await town.reaches(0, 2)
            assert not await town.reaches(1, 0)
            assert await town.until_reached(1, 2)
            assert await town.until_reached(-1, 0)
            cluster.heal()
            assert await town.until_reached(0, 2)

            cluster.partition(-1, [2])
            assert not await town.reaches(-1, 2)
            cluster.heal()
            assert await town.until_reached(-1, 2)
            assert await town.until_reached(0, 1)

            cluster.loss(1, 0.5)
            lost = 0
            for _ in range(10):
                lost += not await town.reaches(0, 1, 0.3)
            cluster.heal()
            assert lost > 0
            assert await town.until_reached(0, 1)
            assert cluster.leader() is not None
        return cluster

    cluster = run(scenario())
    history = cluster.history()
    assert check(history) == []
    faults = Counter(event.fields["fault"] for event in history.of("fault"))
    assert faults == Counter(
        {"delay": 1, "cut": 1, "block": 1, "partition": 2, "loss": 1, "heal": 5, "shutdown": 1}
    )
    assert not any(True for _ in history.of("fenced")), "the store was there all along"


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets")
def test_no_two_clusters_of_a_machine_have_the_same_network() -> None:
    names = [f"test-{os.getpid()}-{number}" for number in range(2)]
    first, held = claim(names)
    second, also = claim(names)
    assert [first, second] == names
    with pytest.raises(HarnessError, match="other clusters"):
        claim(names)
    held.close()
    again, once_more = claim(names)
    assert again == first
    once_more.close()
    also.close()


def test_verbs_of_the_network_need_one() -> None:
    async def scenario() -> None:
        async with Processes([Post], nodes=1, settings=Settings(shards=2)) as cluster:
            for verb in (
                lambda: cluster.partition(0, -1),
                lambda: cluster.delay(0, 1.0),
                lambda: cluster.cut(0, -1),
            ):
                with pytest.raises(HarnessError, match="network="):
                    verb()

    run(scenario())


def test_what_makes_no_sense_is_refused() -> None:
    async def scenario() -> None:
        settings = Settings(shards=2)
        async with Processes([Post], nodes=1, settings=settings, network="loopback") as cluster:
            with pytest.raises(HarnessError, match="two sides"):
                cluster.partition([0])
            with pytest.raises(HarnessError, match="exactly two"):
                cluster.partition([0], [-1], [0], one_way=True)
            with pytest.raises(HarnessError, match="no node 7"):
                cluster.partition(0, 7)
            with pytest.raises(HarnessError, match="from 0 to 1"):
                cluster.loss(0, 1.5)
            cluster.freeze(0)
            with pytest.raises(HarnessError, match="thaw it first"):
                await cluster.restart(0)
            cluster.thaw(0)

    run(scenario())


# the machine


async def fenced(cluster: Processes, incarnations: list[Incarnation | None]) -> None:
    def all_fenced() -> bool:
        gone = {event.fields["inc"] for event in cluster.history().of("fenced")}
        return gone >= {*incarnations}

    await cluster.wait_until(all_fenced)


@KINDS
def test_the_disk_is_full_and_the_wall_clock_is_set(kind: str) -> None:
    async def scenario() -> Processes:
        settings = Settings(shards=8, ttl_s=2.0)
        cluster = Processes(
            [Post], nodes=3, settings=settings, network=network(kind), disk_bytes=DISK_BYTES
        )
        async with cluster:
            assert cluster.disk_is_real == (kind == "namespaces")
            town = Town(cluster)
            await town.place()

            cluster.clock_step(HOUR_S)
            told = await cluster.ref(Post, "p0").ask(Post.clocks)
            assert all(abs(clock - time.time() - HOUR_S) < 60 for clock in told), told
            cluster.clock_step(-HOUR_S)
            told = await cluster.ref(Post, "p0").ask(Post.clocks)
            assert all(abs(clock - time.time()) < 60 for clock in told), told

            before = [cluster.incarnation(node) for node in range(3)]
            cluster.fill_disk()
            await fenced(cluster, before)
            cluster.free_disk()
            await cluster.wait_until(
                lambda: all(cluster.incarnation(n) not in (None, before[n]) for n in range(3))
            )
            await cluster.wait_until(cluster.settled)

        return cluster

    cluster = run(scenario())
    history = cluster.history()
    assert check(history) == []
    assert [event.fields["by"] for event in history.of("stepped")] == [HOUR_S, -HOUR_S]


def test_nodes_are_replaced_one_by_one_and_by_versions() -> None:
    async def scenario() -> Processes:
        cluster = Processes([Post], nodes=3, settings=Settings(shards=8, ttl_s=2.0))
        async with cluster:
            town = Town(cluster)
            await town.place()
            pids = [node.process.pid for node in cluster.nodes if node.process is not None]
            await cluster.roll()
            assert [node.version for node in cluster.nodes] == ["2", "2", "2"]
            later = [node.process.pid for node in cluster.nodes if node.process is not None]
            assert not {*pids} & {*later}
            await cluster.wait_until(cluster.settled)
            await town.place()
            homes = {await cluster.ref(Post, id).ask(Post.pid) for id in town.at.values()}
            assert homes == {*later}

            first = cluster.incarnation(0)
            cluster.kill(0)
            assert not cluster.nodes[0].up
            cluster.start(0)
            await cluster.wait_until(lambda: cluster.incarnation(0) not in (None, first))
            await cluster.wait_until(cluster.settled)
            second = cluster.incarnation(0)
            await cluster.restart(0, version="3.1")
            await cluster.wait_until(lambda: cluster.incarnation(0) not in (None, second))
            assert next_version(cluster.nodes) == "4"
        return cluster

    cluster = run(scenario())
    history = cluster.history()
    assert check(history) == []
    versions = {
        decode_record(value, NodeRecord).version
        for event in history.of("commit")
        for key, value, _ in event.fields["puts"]
        if key.startswith(b"nodes/")
    }
    assert versions == {"", "2", "3.1"}


def test_a_store_that_one_node_cannot_use_is_there_for_the_others() -> None:
    async def scenario() -> None:
        settings = Settings(shards=4, ttl_s=2.0)
        async with Processes([Post], nodes=2, settings=settings) as cluster:
            before = [cluster.incarnation(node) for node in range(2)]
            cluster.cut_store(0)
            await fenced(cluster, before[:1])
            await cluster.wait_until(lambda: cluster.settled() and cluster.incarnation(0) is None)
            assert cluster.incarnation(1) == before[1]
            cluster.heal()
            await cluster.wait_until(lambda: cluster.incarnation(0) not in (None, before[0]))
            history = cluster.history()
        assert check(history) == []

    run(scenario())


def test_a_store_is_seen_late_by_one_node_and_stalls_for_all() -> None:
    async def scenario() -> None:
        settings = Settings(shards=4, ttl_s=3.0)
        async with Processes([Post], nodes=3, settings=settings) as cluster:
            # All of them have something, so nothing moves by itself.
            await Town(cluster).place()
            before = [cluster.incarnation(node) for node in range(3)]
            shard = cluster.shard(Post, "p0")
            assert cluster.phase(cluster.owner(Post, "p0"), shard) == "open"

            cluster.lag(0, LAG_S)
            cluster.kill(2)
            await cluster.wait_until(lambda: _learned(cluster, before[2]) >= {*before[:2]})
            cluster.heal()

            cluster.stall_store()
            with pytest.raises(HarnessError, match="stalled already"):
                cluster.stall_store()
            wish = asyncio.ensure_future(cluster.wish(shard, 1))
            done, _ = await asyncio.wait([wish], timeout=0.3)
            assert not done, "a write went through a store that stalls"
            cluster.unstall_store()
            cluster.unstall_store()
            await wish
            await cluster.wait_until(cluster.settled)
            assert [cluster.incarnation(node) for node in range(2)] == before[:2]
            assert [cluster.status(inc) for inc in before if inc] == ["up", "up", None]
            history = cluster.history()
        assert check(history) == []
        removed = f"nodes/{before[2]}".encode()
        [gone_at] = [
            event.at
            for event in history.of("commit", "expire")
            if removed in event.fields["deletes"]
        ]
        learned_at = {
            event.fields["inc"]: event.at
            for event in history.of("gone")
            if event.fields["peer"] == before[2]
        }
        assert before[0] is not None
        assert learned_at[before[0]] >= gone_at + LAG_S

    run(scenario())


def _learned(cluster: Processes, peer: Incarnation | None) -> set[Incarnation]:
    gone = (event for event in cluster.recorded if event.kind == "gone")
    return {event.fields["inc"] for event in gone if event.fields["peer"] == peer}


# what checkers are told


def test_checkers_know_how_long_faults_last() -> None:
    def event(at: float, fault: str) -> Event:
        return Event(at, "fault", {"fault": fault, "node": None, "inc": None})

    for fault, end in (
        *((name, "heal") for name in ("partition", "block", "delay", "lag", "loss", "outage")),
        ("full", "free"),
        ("stall", "flow"),
    ):
        wrong = "free" if end == "heal" else "heal"
        events = [event(0.0, fault), event(100.0, wrong), event(200.0, end)]
        disturbed = read(RealHistory([*events, event(300.0, "x")], Counter())).disturbed
        assert disturbed.overlap(50.0, 60.0), fault
        assert disturbed.overlap(150.0, 160.0), fault
        assert not disturbed.overlap(230.0, 290.0), fault


# nothing is left behind

STANDS = """
import asyncio, os, sys
from domicile import Settings
from domicile.testing import Processes
from test_chaos_verbs import Post

async def main() -> None:
    async with Processes(
        [Post], nodes=2, settings=Settings(shards=2), network="auto", disk_bytes=1 << 24,
    ) as cluster:
        processes = [node.process.pid for node in cluster.nodes]
        print(cluster.directory, *processes, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def traces(directory: str, pids: list[int]) -> list[str]:
    """What is left of a cluster."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    found = ["a mount"] if directory in mounts else []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if directory.encode() in command or int(path.parent.name) in pids:
            found.append(f"a process: {command!r}")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_outlives_a_test_that_is_killed(tmp_path: Path) -> None:
    links = {*os.listdir("/sys/class/net")}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "TMPDIR": str(tmp_path),
    }
    test = subprocess.Popen(
        [sys.executable, "-c", STANDS], stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert test.stdout is not None
        directory, *pids = test.stdout.readline().split()
        assert traces(directory, [int(pid) for pid in pids])
        assert not ROOT or {*os.listdir("/sys/class/net")} - links
    finally:
        test.send_signal(signal.SIGKILL)
        test.wait()
        assert test.stdout is not None
        test.stdout.close()
    deadline = time.monotonic() + 15.0
    while left := traces(directory, [int(pid) for pid in pids]):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
