"""Dialling and listening: every failure is told, in a later turn or as a `ConfigError`."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest
from tcp_lab import Recorder, lab, on_both_loops, run, until

from domicile.errors import ConfigError
from domicile.transports import tcp
from domicile.transports.tcp import TcpTransport


def taken(port: int = 0) -> socket.socket:
    """A socket that holds a port of this machine. Nobody listens there until it does."""
    sock = socket.socket()
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return sock


def two_taken() -> tuple[socket.socket, socket.socket]:
    """Two sockets that hold neighbouring ports."""
    while True:
        one = taken()
        try:
            return one, taken(port_of(one) + 1)
        except (OSError, OverflowError):
            one.close()


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


async def listened(transport: TcpTransport) -> str:
    try:
        return await transport.listen(Recorder)
    finally:
        await transport.close()


@on_both_loops
def test_a_dial_that_fails_is_told_in_a_later_turn(loop: str) -> None:
    async def body() -> None:
        sock = taken()
        transport = TcpTransport()
        hopeless = {
            f"127.0.0.1:{port_of(sock)}": "refused",
            f"localhost:{port_of(sock)}": "refused",
            "host.invalid:80": "not known",
            f"{'x' * 70}.invalid:80": "not known",
            "nonsense": "no address",
            "127.0.0.1:0": "",
            "[::1:80": "no address",
        }
        handlers: dict[str, Recorder] = {}
        for address in hopeless:
            handlers[address] = Recorder()
            transport.dial(address, handlers[address])
            assert handlers[address].reasons == []
        await until(lambda: all(handler.reasons for handler in handlers.values()))
        for address, handler in handlers.items():
            assert handler.reasons[0].startswith(f"cannot connect to {address}: ")
            assert hopeless[address] in handler.reasons[0].lower()
        await transport.close()
        sock.close()

    run(loop, body())


@on_both_loops
def test_every_address_of_a_host_is_tried(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            port = int(made.address.rpartition(":")[2])
            dial = tcp._Dial(made.near._shared, made.near._dials, "name:1", near := Recorder())
            hosts = [(7777, "no such family"), (socket.AF_INET, "127.0.0.3")]
            dial._targets = [(family, (host, port)) for family, host in hosts]
            dial._targets.append((socket.AF_INET, ("127.0.0.1", port)))
            dial._next("nothing was tried")
            await until(lambda: near.connection)
            assert near.reasons == []

    run(loop, body())


@on_both_loops
def test_a_name_may_be_dialled(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            made.address = made.address.replace("127.0.0.1", "localhost")
            near = await made.dial()
            near.send(b"x")
            await until(lambda: made.accepted[0].data)

    run(loop, body())


@on_both_loops
def test_a_dial_that_meets_itself_has_failed(loop: str) -> None:
    """A kernel may give a dial the very port that it dials, if nobody listens there."""

    async def body() -> None:
        sock = taken()
        sock.connect(sock.getsockname())
        sock.setblocking(False)
        transport = TcpTransport()
        dial = tcp._Dial(transport._shared, transport._dials, "name:1", near := Recorder())
        dial._sock = sock
        dial._on_writable()
        await until(lambda: near.reasons)
        assert "nobody listens there" in near.reasons[0]
        assert sock.fileno() < 0

    run(loop, body())


@pytest.mark.skipif(sys.platform != "linux", reason="a full backlog swallows dials on Linux only")
@on_both_loops
def test_a_dial_takes_only_so_long(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUT_S", 0.1)

    async def body() -> None:
        with socket.socket() as full, socket.socket() as one, socket.socket() as two:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for sock in (one, two):
                sock.setblocking(False)
                sock.connect_ex(full.getsockname())
            transport = TcpTransport()
            transport.dial(f"127.0.0.1:{port_of(full)}", near := Recorder())
            await until(lambda: near.reasons)
            assert near.reasons[0].endswith("timed out")
            assert not transport._dials
            transport.dial(f"127.0.0.1:{port_of(full)}", silent := Recorder())
            await transport.close()
            await asyncio.sleep(0.15)
            assert silent.reasons == []

    run(loop, body())


@on_both_loops
def test_closing_ends_dials_and_look_ups_without_a_word(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            handlers = [Recorder() for _ in range(4)]
            for handler, host in zip(handlers, ["127.0.0.1", "localhost", "x y", "h.invalid"]):  # noqa: B905
                made.near.dial(made.address.replace("127.0.0.1", host), handler)
            await made.near.close()
            assert not made.near._dials
            await asyncio.sleep(0.02)
            assert [handler.reasons for handler in handlers] == [[], [], [], []]
            assert all(handler.connection is None for handler in handlers)

    run(loop, body())


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
@on_both_loops
def test_without_free_descriptors_accepting_pauses(
    loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    monkeypatch.setattr(tcp, "ACCEPT_PAUSE_S", 0.02)

    async def body() -> None:
        async with lab() as made:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            sock = socket.socket()
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))
                made.near.dial(made.address, starved := Recorder())
                await until(lambda: starved.reasons)
                assert "open files" in starved.reasons[0]
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", int(made.address.rpartition(":")[2])))
                await until(lambda: made.notes.counts["tcp.exhausted"] > 1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await until(lambda: made.accepted)
            sock.close()

    run(loop, body())
    assert "no connection can be accepted for now" in caplog.text


@on_both_loops
def test_the_first_free_port_of_a_range_is_taken(loop: str) -> None:
    async def body() -> None:
        transports: list[TcpTransport] = []
        with taken() as sock:
            sock.listen()
            first = port_of(sock)
            span = f"127.0.0.1:{first}-{first + 40}"
            ports: list[int] = []
            for _ in range(3):
                transports.append(TcpTransport(span))
                host, _, port = (await transports[-1].listen(Recorder)).rpartition(":")
                assert host == "127.0.0.1"
                ports.append(int(port))
            assert first < ports[0] < ports[1] < ports[2] <= first + 40
            short = TcpTransport(f"127.0.0.1:{first}-{first}")
            with pytest.raises(ConfigError, match=f"127.0.0.1:{first}.*listens there"):
                await short.listen(Recorder)
            for transport in transports:
                await transport.close()

    run(loop, body())


def test_a_range_without_a_free_port_is_refused() -> None:
    async def body() -> None:
        one, two = two_taken()
        with one, two:
            one.listen()
            two.listen()
            span = f"127.0.0.1:{port_of(one)}-{port_of(two)}"
            with pytest.raises(ConfigError, match=f"{span}.*Widen it"):
                await listened(TcpTransport(span))

    run("asyncio", body())


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("host.invalid:0", "host.invalid.*not known"),
        ("192.0.2.7:0", r"192\.0\.2\.7:0.*address of this machine"),
    ],
)
def test_a_host_that_is_not_here_is_refused(address: str, text: str) -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match=text):
            await listened(TcpTransport(address))

    run("asyncio", body())


@pytest.mark.parametrize(
    "address",
    [
        *("", "7000", "host", "host:", ":7000", "host:x", "host:70000", "host:9-", "host:9-8"),
        *("host:-9", "::1:7000", "[::1]", "[host]:7000", "host:0-9", "a b:7000"),
        *("tcp://host:7000", "host:١"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match="the address to listen at"):
        TcpTransport(address)


@pytest.mark.parametrize("advertise", ["", "host:0", "host:7-9", "::1", "[::1", "host:x", "a/b"])
def test_an_advertised_address_that_is_none_is_refused_at_once(advertise: str) -> None:
    with pytest.raises(ConfigError, match="the advertised address"):
        TcpTransport(advertise=advertise)


@pytest.mark.parametrize("size", [0, -1, 2**32])
def test_a_frame_limit_that_no_header_can_say_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="max_frame_bytes"):
        TcpTransport(max_frame_bytes=size)


def test_peers_are_told_the_advertised_address() -> None:
    async def body() -> None:
        assert await listened(TcpTransport(advertise="node-1.example:7")) == "node-1.example:7"
        assert await listened(TcpTransport(advertise="[2001:db8::7]:7")) == "[2001:db8::7]:7"
        for advertise in ("node-1", "[::7]"):
            transport = TcpTransport(advertise=advertise)
            host, _, port = (await transport.listen(Recorder)).rpartition(":")
            assert host == advertise
            transport.dial(f"127.0.0.1:{port}", near := Recorder())
            await until(lambda near=near: near.connection)  # type: ignore[misc]
            await transport.close()

    run("asyncio", body())


@on_both_loops
def test_who_listens_everywhere_tells_an_address_that_can_be_dialled(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            await made.far.close()
            made.far = TcpTransport("0.0.0.0:0")
            made.address = await made.far.listen(made.accept)
            assert not made.address.startswith("0.0.0.0")
            await made.dial()

    run(loop, body())


@on_both_loops
def test_ipv6_works_where_the_machine_has_it(loop: str) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def body() -> None:
        async with lab() as made:
            for address in ("[::1]:0", "[::]:0"):
                await made.far.close()
                made.far = TcpTransport(address)
                made.address = await made.far.listen(made.accept)
                if address == "[::1]:0":
                    assert made.address.startswith("[::1]:")
                near = await made.dial()
                near.send(b"x")
                await until(lambda: made.accepted[-1].data)

    run(loop, body())


class Blind(asyncio.SelectorEventLoop):
    """Watches no sockets for others, as Windows' own loop."""

    add_reader = asyncio.AbstractEventLoop.add_reader  # type: ignore[assignment]


def test_a_loop_that_cannot_watch_sockets_is_refused() -> None:
    refused = pytest.raises(ConfigError, match=r"Blind cannot watch sockets.*SelectorEventLoop")
    transport = TcpTransport()

    async def body() -> None:
        with refused:
            TcpTransport()
        with refused:
            await transport.listen(Recorder)
        transport.dial("127.0.0.1:1", near := Recorder())
        await until(lambda: near.reasons)
        assert "Blind cannot watch sockets" in near.reasons[0]

    with asyncio.Runner(loop_factory=Blind) as runner:
        runner.run(body())


def test_a_closed_transport_does_not_listen_again() -> None:
    async def body() -> None:
        transport = TcpTransport()
        await transport.close()
        with pytest.raises(ConfigError, match="is closed"):
            await transport.listen(Recorder)

    run("asyncio", body())
