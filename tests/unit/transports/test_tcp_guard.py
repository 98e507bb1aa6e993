"""L3 on TCP: no byte that was put off reaches the kernel once the guard says no."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tcp_lab import Recorder, framed, lab, on_both_loops, read_all, read_on, run, until

from domicile.ports.transport import Connection

MIB = 1024 * 1024


@on_both_loops
def test_past_the_guard_nothing_that_waits_leaves(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call(receive_bytes=8192)
            packets = [bytes([number]) * MIB for number in range(24)]
            far.send(*packets)
            await read_on(sock, 1000)
            await asyncio.sleep(0.01)
            far.valid = False
            before = sum(made.notes.handed)
            found = await read_all(sock)
            assert sum(made.notes.handed) == before, "not one byte since"
            assert len(found) + 1000 <= before < len(framed(*packets))
            withheld = made.notes.counts["tcp.withheld_bytes"]
            assert withheld == len(framed(*packets)) - before > 0
            assert "withheld" in far.reasons[0]
            far.valid = True
            far.send(b"nothing")
            assert sum(made.notes.handed) == before

    run(loop, body())


@on_both_loops
def test_what_the_kernel_holds_is_dropped_with_what_waits(loop: str) -> None:
    """The peer sees a reset: it can tell that the stream did not end here by intent."""

    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call(receive_bytes=8192)
            far.send(b"x" * 24 * MIB)
            await asyncio.sleep(0.01)
            far.valid = False
            far.close()
            assert far.reasons == [], "it closed the connection itself"
            assert made.notes.counts["tcp.withheld_bytes"] > 0
            await until(lambda: sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            assert len(await read_all(sock)) < sum(made.notes.handed)

    run(loop, body())


@on_both_loops
def test_the_guard_is_compared_at_the_end_of_a_turn(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call()
            far.send(b"one", b"two", b"three")
            far.valid = False
            assert framed(b"one").startswith(await read_all(sock))
            assert made.notes.handed == [7]
            assert made.notes.counts["tcp.withheld_bytes"] == len(framed(b"two", b"three"))

    run(loop, body())


@on_both_loops
def test_the_guard_is_compared_when_a_connection_is_closed(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call()
            far.send(b"one", b"two")
            far.valid = False
            far.close()
            await read_all(sock)
            assert made.notes.handed == [7]
            assert made.notes.counts["tcp.withheld_bytes"] == 7
            sock, far = await made.call()
            far.send(b"one", b"two")
            far.valid = False
            await made.far.close()
            await read_all(sock)
            assert made.notes.handed == [7, 7]

    run(loop, body())


@on_both_loops
def test_past_the_guard_a_connection_with_nothing_waiting_ends_in_order(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call()
            far.send(b"in time")
            await asyncio.sleep(0)
            far.valid = False
            far.close()
            assert await read_all(sock) == framed(b"in time")
            assert made.notes.counts["tcp.withheld_bytes"] == 0

    run(loop, body())


@on_both_loops
@pytest.mark.parametrize("says", [False, True])
def test_a_guard_may_close_the_connection_it_guards(loop: str, says: bool) -> None:
    """Comparing the guard may fence the incarnation, which closes all its connections."""

    class Fencing(Recorder):
        asked = 0

        def guard(self) -> bool:
            self.asked += 1
            if self.asked == 1:
                self.close()
            return says

    async def body() -> None:
        async with lab(Fencing) as made:
            sock, far = await made.call()
            far.send(b"one", b"two")
            found = await read_all(sock)
            if says:
                assert found == framed(b"one", b"two")
                assert sum(made.notes.handed) == 14
            else:
                assert made.notes.handed == [7]
                assert made.notes.counts["tcp.withheld_bytes"] == 7
            assert far.reasons == []

    run(loop, body())


@on_both_loops
def test_a_guard_that_fails_says_no(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def opened(self, connection: Connection) -> None:
            super().opened(connection)
            self.send(b"one", b"two")

        def guard(self) -> bool:
            raise LookupError("no lease")

    async def body() -> None:
        async with lab(Broken) as made:
            sock, far = await made.call()
            await read_all(sock)
            await until(lambda: far.reasons)
            assert made.notes.handed == [7]

    run(loop, body())
    assert "no lease" in caplog.text
