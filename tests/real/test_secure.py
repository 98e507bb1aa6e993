"""DX-07 on real sockets: a stranger can neither send, register nor read, with a token and with
certificates; certificates change under load without a failed ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from certificates_lab import EARLY, EXPIRED, Authority, Files
from real_entities import Diary
from real_lab import balanced, run

from domicile import Client, ConfigError, DomicileError, Node, Settings, Unavailable, connect
from domicile.core.ids import NOBODY, Incarnation
from domicile.core.wire import (
    Frame,
    Hello,
    Packet,
    Ping,
    Refused,
    Request,
    decode_packet,
    encode_packet,
)
from domicile.links.token import prove_hello
from domicile.testing import Processes
from domicile.transports import tls
from domicile.transports.addresses import parse
from domicile.transports.framing import FrameDecoder, header

TOKEN = "the token of this cluster, and no other"
OTHER = "the token of another cluster"
SETTINGS = Settings(shards=4, ttl_s=20.0, settle_s=0.1, ask_timeout_s=60.0, poison_deaths=1_000)
IMPATIENT = Settings(shards=4, linger_s=0.1, drain_deadline_s=0.1)
LIMIT_S = 90.0


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOMICILE_TOKEN", raising=False)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, as paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        yield Path(name)


class Stranger:
    """A process that can read the store, knows the protocol, and has a socket."""

    def __init__(self, cluster: Processes, node: int) -> None:
        self._members = cluster._looked().members
        incarnation = cluster.incarnation(node)
        assert incarnation is not None
        self._receiver = incarnation
        self.address = self._members.nodes[incarnation].address
        self._shard = cluster.shard(Diary, "d")
        self._entry = cluster.entry(self._shard)

    def hello(self, token: str, **changes: Any) -> Hello:
        """What a client would say that had this token."""
        fields: dict[str, Any] = {
            "cluster": "domicile",
            "sender": Incarnation("5" * 32),
            "receiver": self._receiver,
            "address": "",
            "link": "1" * 16,
            "session": 1_000_000,
            "resume": False,
            "received": 0,
            "protocol": 1,
            "newest": 3,
        }
        hello = Hello(**{**fields, **changes})
        return msgspec.structs.replace(hello, proof=prove_hello(token, hello))

    def request(self) -> Request:
        """A line in a diary, addressed as it should be."""
        role, shard = self._shard
        entry = self._entry
        return Request(
            role, shard, 1, entry.epoch, entry.change, "diary", "d", "write",
            LINE, True, False, 10.0,
        )  # fmt: skip

    def clients(self) -> list[Incarnation]:
        return list(self._members.clients)


LINE = msgspec.msgpack.encode(["a stranger's line"])


def exchange(sock: socket.socket, *packets: Packet) -> list[Packet]:
    """Say something and hear everything up to the end."""
    sock.settimeout(LIMIT_S)
    decoder = FrameDecoder()
    heard: list[Packet] = []
    with sock:
        with contextlib.suppress(OSError):
            for packet in packets:
                data = encode_packet(packet)
                sock.sendall(header(len(data)) + data)
        with contextlib.suppress(OSError):
            while piece := sock.recv(65536):
                heard += [decode_packet(packet) for packet in decoder.feed(piece)]
    return heard


def knock(address: str) -> socket.socket:
    return socket.create_connection(parse(address, "")[:2], LIMIT_S)


# a token


@pytest.mark.scenario("DX-07")
def test_a_stranger_without_the_token_neither_sends_nor_registers_nor_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOMICILE_TOKEN", TOKEN)

    async def scenario() -> None:
        async with Processes([Diary], nodes=2, settings=SETTINGS) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            diary = cluster.ref(Diary, "d")
            assert await diary.ask(Diary.write, "ours") == 1
            home = cluster.owner(Diary, "d")
            stranger = Stranger(cluster, home)
            mine = stranger.clients()
            for token in ("", OTHER, f"{OTHER},and another one"):
                given = token or None
                if not token:
                    monkeypatch.delenv("DOMICILE_TOKEN")
                for changes in (
                    {},
                    {"resume": True},
                    {"sender": mine[0]},
                    {"sender": mine[0], "resume": True},
                    {"sender": cluster.incarnation(1 - home)},
                ):
                    hello = stranger.hello(token, **changes)
                    ask = Frame(1, 0, (stranger.request(), Ping(1)))
                    heard = await asyncio.to_thread(exchange, knock(stranger.address), hello, ask)
                    assert [type(packet) for packet in heard] == [Refused], "told no, nothing else"
                with pytest.raises(ConfigError, match="DOMICILE_TOKEN"):
                    async with connect(cluster.store, token=given, settings=SETTINGS):
                        pass
                before = dict(cluster._looked().members.nodes)
                with pytest.raises(ConfigError, match="DOMICILE_TOKEN"):
                    async with Node(
                        cluster.store, entities=[Diary], token=given, settings=SETTINGS
                    ):
                        pass
                assert cluster._looked().members.nodes == before
            assert await diary.ask(Diary.write, "ours") == 2, "no stranger wrote in between"
            await cluster.wait_until(lambda: cluster.counts(home)["token.refused"] >= 15)
            log = cluster.nodes[home].log
            assert log is not None
            text = log.read_text(encoding="utf-8")
            assert "this cluster has a token" in text
            assert TOKEN not in text
            async with connect(cluster.store, token=TOKEN, settings=SETTINGS) as client:
                assert await client.ref(Diary, "d").ask(Diary.write, "ours, too") == 3

    run(scenario())


@pytest.mark.scenario("DX-07")
def test_the_same_request_with_the_token_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the refusals above are for the token, not for a mistake in what the stranger says."""
    monkeypatch.setenv("DOMICILE_TOKEN", TOKEN)

    async def scenario() -> None:
        async with Processes([Diary], nodes=1, settings=SETTINGS) as cluster:
            stranger = Stranger(cluster, 0)
            sock = knock(stranger.address)
            hello, ask = stranger.hello(TOKEN), Frame(1, 0, (stranger.request(),))

            def hear() -> Any:
                sock.settimeout(LIMIT_S)
                decoder, found = FrameDecoder(), list[Packet]()
                for packet in (hello, ask):
                    data = encode_packet(packet)
                    sock.sendall(header(len(data)) + data)
                while not any(isinstance(one, Frame) and one.messages for one in found):
                    piece = sock.recv(65536)
                    assert piece, found
                    found += [decode_packet(packet) for packet in decoder.feed(piece)]
                return found

            with sock:
                await asyncio.to_thread(hear)
            assert await cluster.ref(Diary, "d").ask(Diary.write, "second") == 2

    run(scenario())


# certificates


class Tls:
    """What strangers try on a node that wants certificates; each returns what they read."""

    def __init__(self, address: str, ours: Authority, theirs: Files) -> None:
        self._address = address
        self._ours, self._theirs = ours, theirs

    def plain(self) -> bytes:
        return self._read(lambda sock: sock)

    def without_certificate(self) -> bytes:
        return self._read(lambda sock: self._context().wrap_socket(sock))

    def of_another_authority(self) -> bytes:
        context = self._context()
        context.load_cert_chain(self._theirs.cert, self._theirs.key)
        return self._read(lambda sock: context.wrap_socket(sock))

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self._ours.cert)
        return context

    def _read(self, wrap: Callable[[socket.socket], socket.socket]) -> bytes:
        found = b""
        with knock(self._address) as raw, contextlib.suppress(OSError), wrap(raw) as sock:
            sock.settimeout(LIMIT_S)
            first = Hello("domicile", NOBODY, NOBODY, "", "l", 1, False, 0)
            hello = encode_packet(first)
            sock.sendall(header(len(hello)) + hello)
            while piece := sock.recv(65536):
                found += piece
        return found


@pytest.mark.scenario("DX-07")
def test_a_stranger_without_a_certificate_neither_sends_nor_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Certificates that nobody accepts are refused at the start; these have become so since then.
    monkeypatch.setattr(tls, "_check_own", lambda *_: float("inf"))
    ours = Authority(tmp_path / "ours")
    theirs = Authority(tmp_path / "theirs").issue("stranger")
    settings = ours.issue("node").into(SETTINGS)

    async def scenario() -> None:
        async with Processes([Diary], nodes=2, settings=settings) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            diary = cluster.ref(Diary, "d")
            assert await diary.ask(Diary.write, "ours") == 1
            home = cluster.owner(Diary, "d")
            strangers = Tls(Stranger(cluster, home).address, ours, theirs)
            for attempt in (
                strangers.plain,
                strangers.without_certificate,
                strangers.of_another_authority,
            ):
                read = await asyncio.to_thread(attempt)
                # To whoever speaks no TLS the library's own alert is all that is said.
                assert len(read) <= 7
            address = Stranger(cluster, home).address
            for files, why in (
                (theirs, r"certificate of the peer is not accepted"),
                (theirs._replace(ca=ours.cert), "authority is unknown there"),
                (ours.issue("old", EXPIRED), r"has expired\. Replace tls_cert here"),
                (None, "the peer speaks TLS and this process has no certificates"),
            ):
                unsuspecting = IMPATIENT if files is None else files.into(IMPATIENT)
                async with connect(cluster.store, settings=unsuspecting) as client:
                    said = await refusal(client, f"{address}.*{why}")
                    assert "did not run" in said
                    assert "TLS" in said
            assert await diary.ask(Diary.write, "ours") == 2, "no stranger wrote in between"
            await cluster.wait_until(lambda: cluster.counts(home)["tls.refused"] >= 5)
            other = ours.issue("client").into(SETTINGS)
            async with connect(cluster.store, settings=other) as client:
                assert await client.ref(Diary, "d").ask(Diary.write, "ours, too") == 3

    run(scenario())


async def refusal(client: Client, pattern: str) -> str:
    """The error of an ask, once it names this reason: a busy machine may not have tried before."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            # Nothing was sent, so nothing can have run (I9).
            with pytest.raises(Unavailable) as caught:
                await client.ref(Diary, "d").options(timeout_s=2.0).ask(Diary.write, "x")
            if re.search(pattern, str(caught.value)):
                return str(caught.value)


@pytest.mark.scenario("DX-07")
def test_certificates_and_authority_change_under_load_without_a_failed_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process reads the same files. Old connections stay, new ones are made all the time:
    by clients that come and go, and by a node that leaves and comes back."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    files = old.issue("node")
    settings = files.into(SETTINGS)

    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=settings) as cluster:
            over = asyncio.Event()
            answered = 0

            async def load(client: Client, id: str) -> None:
                nonlocal answered
                while not over.is_set():
                    assert await client.ref(Diary, id).ask(Diary.visit, f"{id}'s", "line") > 0
                    answered += 1

            async def visitors() -> None:
                while not over.is_set():
                    await visit(cluster, files.into(SETTINGS))

            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(load(cluster, f"d{number}"))
                group.create_task(visitors())
                await renew(files, old.issue("again"), files.ca.read_bytes())
                await progress(cluster, lambda: answered)
                both = old.cert.read_bytes() + new.cert.read_bytes()
                await renew(files, files, both)
                await progress(cluster, lambda: answered)
                await renew(files, new.issue("node"), both)
                await cluster.stop(1)
                cluster.start(1)
                await progress(cluster, lambda: answered)
                await renew(files, files, new.cert.read_bytes())
                await cluster.wait_until(cluster.settled)
                await progress(cluster, lambda: answered)
                await visit(cluster, new.issue("client").into(SETTINGS))
                over.set()
            monkeypatch.setattr(tls, "_check_own", lambda *_: float("inf"))
            late = old.issue("late")._replace(ca=files.ca).into(IMPATIENT)
            # A node looks at its files once a second, so it may trust the old authority so long.
            async with asyncio.timeout(LIMIT_S):
                while await accepted(cluster, late):
                    pass

    run(scenario())


async def accepted(cluster: Processes, settings: Settings) -> bool:
    """Whether a client with these files is answered."""
    async with connect(cluster.store, settings=settings) as client:
        try:
            await client.ref(Diary, "d0").options(timeout_s=1.0).ask(Diary.write, "line")
        except DomicileError:
            return False
        return True


async def visit(cluster: Processes, settings: Settings) -> None:
    """A client that comes, asks at every node, and goes."""
    async with connect(cluster.store, settings=settings) as client:
        for number in range(8):
            assert await client.ref(Diary, f"v{number}").ask(Diary.write, "line") > 0


async def progress(cluster: Processes, count: Callable[[], int]) -> None:
    before = count()
    await cluster.wait_until(lambda: count() > before + 50)


async def renew(files: Files, others: Files, ca: bytes) -> None:
    """New files in place of the old, as whoever distributes them would put them there."""
    draft = files.ca.with_suffix(".draft")
    draft.write_bytes(ca)
    os.replace(draft, files.ca)
    if others is not files:
        for mine, its in ((files.key, others.key), (files.cert, others.cert)):
            shutil.copy(its, draft)
            os.replace(draft, mine)


# where a node listens


@pytest.mark.scenario("DX-07")
def test_without_token_and_certificates_only_this_machine_is_served(place: Path) -> None:
    store = f"sqlite:///{place}/store.db"

    async def scenario() -> None:
        for listen in ("0.0.0.0:0", "[::]:0"):
            with pytest.raises(ConfigError, match="neither a token nor certificates"):
                async with Node(store, entities=[Diary], listen=listen, settings=SETTINGS):
                    pass
        assert not (place / "store.db").exists(), "nothing was begun"
        trusting = Settings(shards=4, settle_s=0.1, insecure=True)
        for token, settings in ((TOKEN, SETTINGS), (TOKEN, trusting)):
            async with (
                Node(store, entities=[Diary], listen="0.0.0.0:0", token=token, settings=settings),
                connect(store, token=token, settings=settings) as client,
            ):
                assert await client.ref(Diary, "d").ask(Diary.write, "line") == 1

    run(scenario())


@pytest.mark.scenario("DX-07")
def test_whoever_insists_may_serve_strangers(place: Path) -> None:
    store = f"sqlite:///{place}/store.db"
    trusting = Settings(shards=4, settle_s=0.1, insecure=True)

    async def scenario() -> None:
        async with (
            Node(store, entities=[Diary], listen="0.0.0.0:0", settings=trusting),
            connect(store, settings=SETTINGS) as client,
        ):
            assert await client.ref(Diary, "d").ask(Diary.write, "line") == 1

    run(scenario())


def home_to(node: Node) -> int:
    """How many shards a node has open."""
    hosts = {} if node.life is None else node.life.runtime.hosts
    return sum(host.owner.phase.value == "open" for host in hosts.values())


@pytest.mark.scenario("DX-07")
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_a_cluster_on_unix_sockets(place: Path, tmp_path: Path, secured: bool) -> None:
    store = f"sqlite:///{place}/store.db"
    (place / "run").mkdir(mode=0o700)
    settings = Authority(tmp_path / "ours").issue("node").into(SETTINGS) if secured else SETTINGS

    async def scenario() -> None:
        async with (
            Node(store, entities=[Diary], listen=f"unix:{place}/run", settings=settings) as one,
            Node(store, entities=[Diary], listen=f"unix:{place}/run", settings=settings) as two,
            connect(store, settings=settings) as client,
        ):
            # A diary forgets its lines when it moves, so both have their share first.
            async with asyncio.timeout(LIMIT_S):
                while not home_to(one) == home_to(two) == 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for number in range(12):
                assert await client.ref(Diary, f"d{number}").ask(Diary.write, "line") == 1
                assert await one.ref(Diary, f"d{number}").ask(Diary.write, "line") == 2

    run(scenario())
    assert list((place / "run").iterdir()) == []


@pytest.mark.scenario("DX-07")
def test_what_is_wrong_with_certificates_is_said_at_the_start(place: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{place}/store.db"
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    files = ours.issue("node")
    files.key.write_text("nonsense", encoding="utf-8")

    async def scenario() -> None:
        for bad, why in (
            (ours.issue("old", EXPIRED), "certificate has expired"),
            (ours.issue("early", EARLY), "certificate is not yet valid"),
            (theirs.issue("their")._replace(ca=ours.cert), "unable to get local issuer"),
        ):
            for process in (
                Node(store, entities=[Diary], settings=bad.into(SETTINGS)),
                connect(store, settings=bad.into(SETTINGS)),
            ):
                with pytest.raises(ConfigError, match=f"no peer would accept: {why}"):
                    async with process:
                        pass
        assert not (place / "store.db").exists(), "nothing was begun"
        with pytest.raises(ConfigError, match=r"tls_key=.*PEM"):
            async with Node(store, entities=[Diary], settings=files.into(SETTINGS)):
                pass
        half = Settings(shards=4, tls_cert=str(files.cert))
        with pytest.raises(ConfigError, match="tls_key and tls_ca are missing"):
            async with connect(store, settings=half):
                pass

    run(scenario())
