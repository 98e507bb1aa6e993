"""As `tcp_paused.py`, under TLS.

usage: tls_paused.py (asyncio | uvloop) PORT SETTINGS, the last as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys

from tcp_paused import LEASE_S, PACKET, Leased, say, settled

from domicile.settings import Settings
from domicile.transports.tcp import TcpTransport
from domicile.transports.tls import Certificates


async def main(port: int, settings: Settings) -> None:
    leased = Leased()
    certificates = Certificates.of(settings.tls_cert, settings.tls_key, settings.tls_ca)
    transport = TcpTransport(meter=leased, certificates=certificates)
    transport.dial(f"127.0.0.1:{port}", leased)
    # The handshake has no event of its own here.
    while leased.handed < len(PACKET):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    handed = await settled(lambda: leased.handed)
    leased.deadline = leased.clock.now() + LEASE_S
    say(handed=handed, deadline=leased.deadline)
    await leased.over.wait()
    await transport.close()
    say(handed=leased.handed, withheld=leased.withheld)


if __name__ == "__main__":
    loop, port, settings = sys.argv[1:]
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(int(port), Settings(**json.loads(settings))))
