"""Domicile's measured processes: a node that is home to everything, and a client of it.

Only what `domicile` exports is used, as a program would. Counting is on: a benchmark without
metrics would measure what nobody runs.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from domicile import Client, Entity, Node, Ref, Settings, connect, handler
from domicile.observe import Metrics
from proving.benchmarks.caller import PAYLOAD, Arrivals, Caller
from proving.benchmarks.part import Options, Part


class Echo(Entity, name="echo"):
    """Does as little as an entity can, and has no fields."""

    @handler
    async def echo(self, data: bytes) -> bytes:
        """Give it back."""
        return data

    @handler
    async def note(self, data: bytes) -> None:
        """Be told."""
        self.resource(Arrivals).note()


class Tally(Entity, name="tally"):
    """Knows how many tells have run at its node."""

    @handler
    async def count(self) -> int:
        """So many."""
        return self.resource(Arrivals).count

    @handler
    async def reach(self, wanted: int) -> None:
        """Answer once so many have run."""
        await self.resource(Arrivals).reach(wanted)


class Domicile(Caller):
    """Refs of a client, or of the home itself."""

    def __init__(self, client: Client, refs: Sequence[Ref[Echo]]) -> None:
        self._client, self._refs = client, refs
        self._tally = client.ref(Tally, "tally")
        self._made = count()

    @classmethod
    async def to(cls, client: Client, entities: int) -> Domicile:
        """A caller of entities that have all been started."""
        refs = [client.ref(Echo, str(number)) for number in range(entities)]
        for ref in refs:
            await ref.ask(Echo.echo, PAYLOAD)
        return cls(client, refs)

    async def ask(self, number: int) -> None:
        """One entity after the other."""
        await self._refs[number % len(self._refs)].ask(Echo.echo, PAYLOAD)

    async def new(self, number: int) -> None:
        """An id that nobody had."""
        id = f"new-{os.getpid()}-{next(self._made)}"
        await self._client.ref(Echo, id).ask(Echo.echo, PAYLOAD)

    async def begin(self, part: int) -> int:
        """What the home has seen, of whomever."""
        return await self._tally.ask(Tally.count)

    async def send(self, first: int, count: int) -> None:
        """One entity after the other."""
        refs = self._refs
        for number in range(first, first + count):
            await refs[number % len(refs)].tell(Echo.note, PAYLOAD)

    async def confirm(self, total: int) -> None:
        """An ask, sent behind the tells."""
        await self._tally.ask(Tally.reach, total)


def settings(options: Options) -> Settings:
    """Nobody is passivated while it is measured; a lone node need not wait for others."""
    tls: dict[str, Any] = {}
    if options.get("tls"):
        place = Path(options["tls"])
        tls = {
            "tls_cert": str(place / "node.pem"), "tls_key": str(place / "node.key"),
            "tls_ca": str(place / "ca.pem"),
        }  # fmt: skip
    return Settings(idle_s=3_600.0, settle_s=0.05, **tls)


def check_tls(options: Options) -> None:
    """A figure of "TLS" must not be one of plain text by mistake."""
    place = Path(options["tls"])
    context = ssl.create_default_context(cafile=str(place / "ca.pem"))
    context.check_hostname = False
    context.load_cert_chain(place / "node.pem", place / "node.key")
    with socket.create_connection(("127.0.0.1", options["port"]), timeout=5.0) as plain:
        context.wrap_socket(plain).close()


@asynccontextmanager
async def home(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A node that is home to everything, and can call itself."""
    arrivals = Arrivals()

    @asynccontextmanager
    async def resources() -> AsyncGenerator[dict[type[Any], Any]]:
        yield {Arrivals: arrivals}

    node = Node(
        options["where"], entities=[Echo, Tally], resources=resources, node_id="home",
        listen=f"127.0.0.1:{options.get('port', 0)}", settings=settings(options), meter=Metrics(),
    )  # fmt: skip
    async with node:
        yield options["where"], {"domicile": await Domicile.to(node, options["entities"])}


@asynccontextmanager
async def client(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A client of that home."""
    if options.get("tls"):
        check_tls(options)
    async with connect(options["where"], settings=settings(options), meter=Metrics()) as connected:
        yield options["where"], {"domicile": await Domicile.to(connected, options["entities"])}


PARTS: dict[str, Part] = {"server": home, "client": client}
