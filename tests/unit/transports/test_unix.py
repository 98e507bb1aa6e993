"""Unix sockets: files for their owner alone, which come and go with their listener."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tcp_lab import Echo, Recorder, on_both_loops, run, until

from domicile.errors import ConfigError
from domicile.transports import unix
from domicile.transports.tcp import TcpTransport

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets")
MIB = 1024 * 1024


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, as paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        yield Path(name)


def stale(path: Path) -> None:
    """What a killed process leaves."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


async def talk(address: str, *packets: bytes) -> Recorder:
    near = TcpTransport()
    try:
        recorder = Recorder()
        near.dial(address, recorder)
        await until(lambda: recorder.connection or recorder.reasons)
        if recorder.connection:
            recorder.send(*packets)
            await until(lambda: len(recorder.data) == len(packets))
        return recorder
    finally:
        await near.close()


@on_both_loops
def test_packets_go_both_ways(loop: str, place: Path) -> None:
    async def body() -> None:
        far = TcpTransport(f"unix:{place}/s")
        address = await far.listen(Echo)
        assert address == f"unix:{place}/s"
        packets = [b"hello", b"x" * 5 * MIB, b""]
        assert (await talk(address, *packets)).data == packets
        await far.close()

    run(loop, body())
    assert list(place.iterdir()) == []


def test_the_file_is_for_its_owner_alone(place: Path) -> None:
    async def body() -> None:
        far = TcpTransport(f"unix:{place}/s", only_here=True)
        await far.listen(Echo)
        assert stat.S_IMODE((place / "s").stat().st_mode) == 0o600
        await far.close()

    run("asyncio", body())


def test_the_way_to_the_file_is_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers run in directories of their own."""
    monkeypatch.chdir(place)
    whole = os.path.realpath(place)

    async def body() -> None:
        far = TcpTransport("unix:s")
        address = await far.listen(Echo)
        assert address == f"unix:{whole}/s"
        await far.close()

    run("asyncio", body())


def test_a_stale_file_is_replaced(place: Path) -> None:
    stale(place / "s")

    async def body() -> None:
        far = TcpTransport(f"unix:{place}/s")
        address = await far.listen(Echo)
        assert (await talk(address, b"x")).data == [b"x"]
        await far.close()

    run("asyncio", body())


def test_a_file_that_is_in_use_or_no_socket_stays(place: Path) -> None:
    (place / "note").write_text("keep me", encoding="utf-8")

    async def body() -> None:
        far = TcpTransport(f"unix:{place}/s")
        address = await far.listen(Echo)
        second = TcpTransport(f"unix:{place}/s")
        with pytest.raises(ConfigError, match="another process listens there"):
            await second.listen(Echo)
        await second.close()
        assert (await talk(address, b"x")).data == [b"x"]
        with pytest.raises(ConfigError, match="no socket"):
            await TcpTransport(f"unix:{place}/note").listen(Echo)
        await far.close()

    run("asyncio", body())
    assert [path.name for path in place.iterdir()] == ["note"]


def test_a_file_that_took_the_name_meanwhile_stays(place: Path) -> None:
    async def body() -> None:
        far = TcpTransport(f"unix:{place}/s")
        await far.listen(Echo)
        # A file of its own first, such that the kernel does not give it the same number.
        (place / "other").touch()
        (place / "other").replace(place / "s")
        await far.close()

    run("asyncio", body())
    assert (place / "s").exists()


def test_a_directory_gets_a_new_name_for_each_and_is_tidied(place: Path) -> None:
    stale(place / "domicile-00000000.sock")
    stale(place / "somebody-elses.sock")

    async def body() -> None:
        transports = [TcpTransport(f"unix:{place}") for _ in range(5)]
        addresses = [await transport.listen(Echo) for transport in transports]
        assert len(set(addresses)) == 5
        for address in addresses:
            assert (await talk(address, b"x")).data == [b"x"]
        assert not (place / "domicile-00000000.sock").exists()
        for transport in transports:
            await transport.close()

    run("asyncio", body())
    assert [path.name for path in place.iterdir()] == ["somebody-elses.sock"]


def test_only_one_of_many_that_start_at_once_gets_a_stale_name(place: Path) -> None:
    stale(place / "s")

    async def body() -> None:
        transports = [TcpTransport(f"unix:{place}/s") for _ in range(5)]
        tries = await asyncio.gather(
            *(transport.listen(Echo) for transport in transports), return_exceptions=True
        )
        assert sum(isinstance(one, ConfigError) for one in tries) == 4
        assert (await talk(f"unix:{place}/s", b"x")).data == [b"x"]
        for transport in transports:
            await transport.close()

    run("asyncio", body())


def test_a_directory_is_looked_through_by_one_process_at_a_time(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that find the same stale file would remove each other's new one."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(unix, "_LOCK_TRIES", 3)

    async def body() -> None:
        far = TcpTransport(f"unix:{place}/s")
        other = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match="another process keeps it locked"):
                await far.listen(Echo)
        finally:
            os.close(other)
        await far.listen(Echo)
        await far.close()

    run("asyncio", body())


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("unix:", "names no file"),
        ("unix:/" + "x" * 200, "too long"),
        ("unix:/nowhere/at/all/s", "Make the directory first"),
    ],
)
def test_a_file_that_cannot_be_is_refused(address: str, complaint: str) -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match=complaint):
            await TcpTransport(address).listen(Echo)

    run("asyncio", body())


@on_both_loops
def test_nobody_there_is_a_failed_dial(loop: str, place: Path) -> None:
    stale(place / "stale")

    async def body() -> None:
        for name in ("nothing", "stale"):
            recorder = await talk(f"unix:{place}/{name}")
            assert recorder.connection is None
            assert f"unix:{place}/{name}" in recorder.reasons[0]
        assert "names no file" in (await talk("unix:")).reasons[0]

    run(loop, body())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue is not said")
def test_a_listener_with_a_full_queue_is_a_failed_dial(place: Path) -> None:
    """A socket that is not connected looks as if it were: it is writable and has no error."""

    async def body() -> None:
        with socket.socket(socket.AF_UNIX) as busy:
            busy.bind(str(place / "s"))
            busy.listen(0)
            callers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
            for caller in callers:
                caller.setblocking(False)
                caller.connect_ex(str(place / "s"))
            recorder = await talk(f"unix:{place}/s")
            assert recorder.connection is None
            assert recorder.reasons
            for caller in callers:
                caller.close()

    run("asyncio", body())


def test_what_peers_dial_may_be_named(place: Path) -> None:
    async def body() -> None:
        far = TcpTransport(f"unix:{place}/s", advertise=f"unix:{place}/other")
        assert await far.listen(Echo) == f"unix:{place}/other"
        await far.close()

    run("asyncio", body())


# addresses of this machine only


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_other_machines_are_not_served_without_a_proof(address: str) -> None:
    with pytest.raises(ConfigError, match="token") as caught:
        TcpTransport(address, only_here=True)
    assert "insecure=True" in str(caught.value)


def test_names_are_looked_at_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        for address in ("127.0.0.1:0", "localhost:0", "127.0.0.9:0"):
            here = TcpTransport(address, only_here=True)
            await here.listen(Echo)
            await here.close()
        there = TcpTransport("host.example:0", only_here=True)
        loop = asyncio.get_running_loop()

        async def found(*_: object, **__: object) -> list[object]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))]

        monkeypatch.setattr(loop, "getaddrinfo", found)
        with pytest.raises(ConfigError, match=r"host\.example.*token"):
            await there.listen(Echo)
        await there.close()

    run("asyncio", body())
