"""A node under load and under attack: it serves on, and nothing of the attack stays (DX-08)."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_entities import Clerk
from real_lab import balanced, run

from domicile import ConfigError, EventSourced, Node, Settings, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import (
    AskRevert,
    Begun,
    CallingTurn,
    Cancel,
    Carried,
    Carry,
    Flush,
    Frame,
    Hello,
    Message,
    Ping,
    Pong,
    Probe,
    Probed,
    Refused,
    Released,
    Reply,
    ReplyStatus,
    Request,
    Return,
    Suspect,
    Told,
    Welcome,
    encode_packet,
)
from domicile.testing import Processes

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "labs" / "corpus"

SHARDS = 8
LINK_TIMEOUT_S = 2.0
PATIENCE_S = 120.0
ROGUE = Incarnation("f" * 32)
MIB = 1024 * 1024


class Tally(EventSourced[int, int], name="tally"):
    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int, /) -> int:
        return state + event

    @handler
    async def add(self, amount: int) -> int:
        return await self.persist(amount)


def corpus(name: str) -> list[bytes]:
    """Bytes that are no packets, from the tests of transports."""
    lines = (CORPUS / name).read_text(encoding="ascii").splitlines()
    return [bytes.fromhex(line.partition(" ")[2]) for line in lines if not line.startswith("#")]


def framed(*packets: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(packet)) + packet for packet in packets)


def request(n: int, shard: int = 0, **changes: Any) -> Request:
    made = Request(
        "default", shard, n, 1, 1, "clerk", "x", "quick", b"\x91\xc4\x01x", True, False, 1.0
    )
    return msgspec.structs.replace(made, **changes)


def poison(shard: int, owner: Incarnation) -> Told:
    """An entry that would close a shard at its home for good."""
    return Told("default", shard, Entry(owner, 10**6, "serving", owner, 10**9))


class Attacker:
    """Raw sockets to one node, as many incarnations as it takes."""

    def __init__(self, address: str, victim: Incarnation, other: Incarnation) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.victim, self.other = victim, other
        self.made = 0

    def hello(self, **changes: Any) -> bytes:
        self.made += 1
        sender = Incarnation(f"{self.made:032x}")
        made = Hello("domicile", sender, self.victim, "x:1", "l", 1, False, 0, 1, 3)
        return encode_packet(msgspec.structs.replace(made, **changes))

    async def send(self, *pieces: bytes, pause_s: float = 0.0, stays: bool = False) -> None:
        """Send pieces and read until the node closes the connection; it must, unless it `stays`."""
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                while not stays and await reader.read(65_536):
                    pass
            except ConnectionError:
                pass
            finally:
                writer.close()

    async def frames(self, *frames: Frame, stays: bool = False) -> None:
        """An admitted peer's frames."""
        await self.send(framed(self.hello(), *map(encode_packet, frames)), stays=stays)

    def attacks(self) -> list[Callable[[], Awaitable[None]]]:
        """Everything at once is up to the caller."""
        send, frames, hello = self.send, self.frames, self.hello
        first = encode_packet(Frame(1, 0, (request(1),)))
        long = framed(first)[:4] + b"\x00" * 3
        found: list[Callable[[], Awaitable[None]]] = []
        found += [partial(send, data) for data in corpus("streams.txt")]
        for packet in corpus("packets.txt"):
            found += [partial(send, framed(packet)), partial(send, framed(hello(), packet))]
        wrong_way: list[Message] = [
            Reply("default", 0, 1, ReplyStatus.OK, b""),
            Begun("default", (0,) * 100_000, tuple(range(100_000))),
            Return(
                "default", 0, tuple(range(100_000)), Entry(ROGUE, 9, "serving", ROGUE, 99), True
            ),
            Pong(1),
        ]
        found += [partial(frames, Frame(1, 0, (message,))) for message in wrong_way]
        found += [
            # numbers that jump, go back, or acknowledge what was never sent
            lambda: frames(Frame(2, 0, (request(1),))),
            lambda: frames(Frame(1, 7, (request(1),))),
            lambda: frames(Frame(0, 0, (request(1),))),
            lambda: frames(Frame(1, 0, ())),
            lambda: frames(
                Frame(1, 0, (Ping(1),)), Frame(1, 0, (Ping(2),)), Frame(9, 0, (Ping(3),))
            ),
            # out of place
            lambda: send(framed(first)),
            lambda: send(framed(encode_packet(Welcome(0, 3)))),
            lambda: send(framed(encode_packet(Refused("go away")))),
            lambda: send(framed(hello(), hello())),
            lambda: send(framed(hello(resume=True))),
            lambda: send(framed(hello(cluster="other"))),
            lambda: send(framed(hello(receiver=ROGUE))),
            lambda: send(framed(hello(sender=self.victim, link="local"), first)),
            # replayed
            lambda: self.replay(first),
            # too long, before and after it is known who speaks
            lambda: send(struct.pack(">I", 20 * MIB), *[b"x" * MIB] * 20),
            lambda: send(framed(hello()) + struct.pack(">I", 1 << 30)),
            lambda: send(framed(hello()) + struct.pack(">II", 8 | 1 << 31, 1 << 30) + b"bomb"),
            # dribbling: a hello that never ends, and a packet that stops on its way
            lambda: send(*[b"\x00", b"\x00", b"\x10", b"\x00", *[b"x"] * 200], pause_s=0.05),
            lambda: send(framed(hello()) + long),
            lambda: send(framed(hello()) + struct.pack(">I", MIB) + b"x" * 1_000),
        ]
        return found

    async def replay(self, first: bytes) -> None:
        """The beginning of a connection once more, on another one."""
        stream = framed(self.hello(), first)
        await self.send(stream, stays=True)
        await self.send(stream)

    def lies(self, shards: int) -> tuple[Message, ...]:
        """What an admitted peer may say that nobody should believe."""
        said: list[Message] = []
        for shard in (*range(shards), 10**6):
            for role in ("default", "unheard"):
                said += [
                    msgspec.structs.replace(poison(shard, ROGUE), role=role),
                    msgspec.structs.replace(poison(shard, self.other), role=role),
                    Released(role, shard, 10**6, 10**9),
                    Released(role, shard, 1, 10**9),
                    AskRevert(role, shard, 1),
                    Cancel(role, shard, 1),
                    Carry(role, shard, 1, 1, (Carried("clerk", "x", b"\x80"),)),
                    Flush(role, shard, -1),
                ]
        chain = (CallingTurn("default", 0, "clerk", "x", False),) * 4_000
        said += [
            Probe(self.victim), Probe(ROGUE), Probed(self.victim, False), Probed(self.other, False),
            Suspect(self.victim), Suspect(ROGUE),
            request(1, id="i" * MIB), request(2, chain=chain), request(3, method="gone"),
            request(4, type="unheard"), request(5, epoch=10**6), request(6, change=10**9),
            request(7, shard=10**6), request(8, role="unheard"), request(9, ttl_s=1e300),
            request(10, body=b"\xc1"), request(11, key="k" * 10_000), request(0, finishing=True),
        ]  # fmt: skip
        return tuple(said)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.scenario("DX-08")
@pytest.mark.skipif(sys.platform != "linux", reason="it looks at another process by /proc")
def test_a_node_serves_on_while_fifty_connections_attack_it() -> None:
    limits = Settings(
        shards=SHARDS, ttl_s=20.0, link_timeout_s=LINK_TIMEOUT_S, ask_timeout_s=60.0,
        compress_bytes=1_000,
    )  # fmt: skip

    async def scenario() -> None:
        async with Processes([Clerk], nodes=2, settings=limits) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            await attack_and_judge(cluster)

    run(scenario())


async def attack_and_judge(cluster: Processes) -> None:
    leader = cluster.leader()
    assert leader is not None
    victim, other = cluster.incarnation(leader), cluster.incarnation(1 - leader)
    process = cluster.nodes[leader].process
    assert victim is not None
    assert other is not None
    assert process is not None
    ids = [next(id for n in range(999) if cluster.shard(Clerk, id := f"c{n}").shard == shard)
           for shard in range(SHARDS)]  # fmt: skip
    for id in ids:
        assert await cluster.ref(Clerk, id).ask(Clerk.quick, b"before") == 6
    before = entries(cluster)
    open_before, resident_before = descriptors(process.pid), resident_bytes(process.pid)
    address = cluster._looked().members.nodes[victim].address
    attacker = Attacker(address, victim, other)

    over = asyncio.Event()
    served: list[int] = []

    async def load(id: str, lane: int) -> None:
        body = f"lane {lane} ".encode() * 1_000
        while not over.is_set():
            served.append(await cluster.ref(Clerk, id).ask(Clerk.quick, body))
            # A handler asks, so the victim's own map and links are in use, too.
            await cluster.ref(Clerk, id).ask(Clerk.curious, f"{ids[lane - 1]}'s neighbour")

    async def wave(attacks: list[Callable[[], Awaitable[None]]]) -> None:
        for attack in attacks:
            await attack()

    async with asyncio.TaskGroup() as serving:
        for lane, id in enumerate(ids):
            serving.create_task(load(id, lane))
        attacks = attacker.attacks()
        async with asyncio.TaskGroup() as attacking:
            for start in range(50):
                attacking.create_task(wave(attacks[start::50]))
            lies = attacker.lies(SHARDS)
            for at in range(0, len(lies), 10):
                # Each in frames of its own, so that none is hidden by another's.
                told = [Frame(no, 0, (lie,)) for no, lie in enumerate(lies[at : at + 10], 1)]
                attacking.create_task(attacker.frames(*told, Frame(99, 0, (Ping(1),))))
        count = len(served)
        await cluster.wait_until(lambda: len(served) > count + 50)
        over.set()

    assert process.poll() is None
    assert cluster.incarnation(leader) == victim, "it was never fenced"
    assert entries(cluster) == before, "no shard moved"
    for id in ids:
        assert await cluster.ref(Clerk, id).ask(Clerk.quick, b"after") == 5
    counts = cluster.counts(leader)
    for name in ("link.garbage", "link.broken", "link.stranger", "link.refused"):
        assert counts[name] > 0, name
    assert counts["tcp.garbage"] > 0
    assert counts["tcp.stalled"] > 0
    log = cluster.nodes[leader].log
    assert log is not None
    lines = [line for line in log.read_text().splitlines() if "closed the connection" in line]
    assert 5 < len(lines) < 100, "reasons are logged, and not all of them"
    assert "Traceback" not in log.read_text()
    await check_move(cluster, leader, before)
    await cluster.wait_until(lambda: descriptors(process.pid) <= open_before + 1)
    assert resident_bytes(process.pid) < resident_before + 64 * MIB


async def check_move(cluster: Processes, leader: int, before: list[Entry]) -> None:
    """What was said of epochs left no trace: a shard that moves gets the next one."""
    shard = next(n for n, entry in enumerate(before) if entry.owner == cluster.incarnation(leader))
    await cluster.wish(ShardKey("default", shard), 1 - leader)
    target = cluster.incarnation(1 - leader)
    await cluster.wait_until(lambda: entries(cluster)[shard].owner == target)
    assert entries(cluster)[shard].epoch == before[shard].epoch + 1


def entries(cluster: Processes) -> list[Entry]:
    return [cluster.entry(ShardKey("default", number)) for number in range(SHARDS)]


def test_a_key_that_cannot_travel_fails_its_own_call_only() -> None:
    async def scenario() -> None:
        async with Node("memory://keys", entities=[Tally], journal="memory://") as node:
            tally = node.ref(Tally, "t")
            with pytest.raises(ConfigError, match="can't travel"):
                tally.options(key="\ud800")
            assert await tally.options(key="k").ask(Tally.add, 1) == 1

    run(scenario())
