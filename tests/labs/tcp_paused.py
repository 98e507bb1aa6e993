"""A process that fills its sockets, to be stopped and resumed past its deadline.

usage: tcp_paused.py (domicile | plain) (asyncio | uvloop) PORT

It dials a port where nobody reads, sends until its kernel takes no more, says how many bytes that
were and when its deadline is, and after its end how many bytes it handed over in all and how many
it withheld. `plain` does the same on the loop's own transport: it, too, compares its deadline
before each write and at the entry of each callback.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from domicile.membership.clock import SystemClock
from domicile.ports.transport import Connection
from domicile.transports.tcp import TcpTransport

LEASE_S = 1.0
PACKET = b"x" * 100_000
PACKETS = 200


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Leased:
    """A handler, and a meter, with a deadline."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.deadline = self.clock.now() + 60
        self.handed = self.withheld = 0
        self.over = asyncio.Event()

    def opened(self, connection: Connection) -> None:
        for _ in range(PACKETS):
            connection.send(PACKET)

    def received(self, data: bytes) -> None:
        raise AssertionError(data)

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.over.set()

    def guard(self) -> bool:
        return self.clock.now() < self.deadline

    def count(self, name: str, value: int = 1) -> None:
        assert name == "tcp.withheld_bytes"
        self.withheld += value

    def event(self, kind: str, /, **fields: Any) -> None:
        self.handed += fields["bytes"]


async def settled(handed: Any) -> int:
    """How much was handed over, once the kernel takes no more."""
    before, same = -1, 0
    while same < 20:
        await asyncio.sleep(0.005)
        now = handed()
        same = same + 1 if now == before and now else 0
        before = now
    return before


async def domicile(port: int) -> None:
    leased = Leased()
    transport = TcpTransport(meter=leased)
    transport.dial(f"127.0.0.1:{port}", leased)
    handed = await settled(lambda: leased.handed)
    leased.deadline = leased.clock.now() + LEASE_S
    say(handed=handed, deadline=leased.deadline)
    await leased.over.wait()
    await transport.close()
    say(handed=leased.handed, withheld=leased.withheld)


class Plain(asyncio.Protocol):
    """Nothing but the loop's own transport."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.deadline = self.clock.now() + 60
        self.over = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        for _ in range(PACKETS):
            transport.write(PACKET)

    def resume_writing(self) -> None:
        if self.clock.now() >= self.deadline:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()


async def plain(port: int) -> None:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(Plain, "127.0.0.1", port)
    total = PACKETS * len(PACKET)
    handed = await settled(lambda: total - transport.get_write_buffer_size())
    protocol.deadline = protocol.clock.now() + LEASE_S
    say(handed=handed, deadline=protocol.deadline)
    await protocol.over.wait()
    say(handed=handed, withheld=0)


def main() -> None:
    kind, loop, port = sys.argv[1:]
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run((domicile if kind == "domicile" else plain)(int(port)))


if __name__ == "__main__":
    main()
