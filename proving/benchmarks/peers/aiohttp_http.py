"""aiohttp: a POST per message over connections that are kept alive."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, TCPConnector, web

from proving.benchmarks.caller import PAYLOAD, Caller, closed_loop


class Posts(Caller):
    """A request of its own for each; a one-way message is one with an empty response."""

    def __init__(self, session: ClientSession, where: str) -> None:
        self._session, self._where = session, where

    async def ask(self, number: int) -> None:
        """The body comes back."""
        async with self._session.post(f"{self._where}/echo", data=PAYLOAD) as response:
            await response.read()

    async def note(self, number: int) -> None:
        """Nothing comes back but the status."""
        async with self._session.post(f"{self._where}/note", data=PAYLOAD) as response:
            response.release()

    async def tells(self, depth: int, seconds: float) -> dict[str, Any]:
        """There is nothing one-way."""
        return await closed_loop(self.note, depth, seconds)


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _note(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(status=204)


@asynccontextmanager
async def server(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """Two routes, no access log."""
    app = web.Application()
    app.add_routes([web.post("/echo", _echo), web.post("/note", _note)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", {}
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """As many connections as there are requests in flight."""
    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        posts = Posts(session, options["where"])
        await posts.ask(0)
        yield options["where"], {"http": posts}


PARTS = {"server": server, "client": client}
